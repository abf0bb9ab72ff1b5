"""Tensors that each rank reads of a checkpoint, and growth of the vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import save
from torch_dist_files import by_layer
from torch_dist_files import save as save_torch_dist

from checkpoint_files import tensors_of
from harness import RanksFailed, run_ranks
from layouts import arguments, world_size
from mca_config.errors import McaError
from reference import FAMILY_CASES, Reference, make_reference

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]


def save_and_read(path: Path, folder: Path, layout: str) -> dict[str, list[float]]:
    """Save each format, then read on the same layout. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments(layout))
    models.save_pretrained(folder / "mca")
    models.save_pretrained(folder / "torch_dist", ckpt_format="torch_dist")
    return read(path, folder, [layout])


def read(path: Path, folder: Path, layouts: list[str]) -> dict[str, list[float]]:
    """Return the bytes read for each byte held, of each format by layout. Runs on every rank."""
    from mca_models.megatron import AutoModel

    def share(source: Path, layout: str) -> float:
        model: Any = AutoModel.from_pretrained(source, arguments(layout))
        held: int = sum(tensor.nbytes for _, tensor in model.local_params())
        return float(model.bytes_read / held)

    return {
        layout: [share(source, layout) for source in (path, folder / "mca", folder / "torch_dist")]
        for layout in layouts
    }


@pytest.mark.cases(0, always=["qwen3_moe"])
@pytest.mark.parametrize("case", ["qwen3-tied", "qwen3_moe"])
def test_a_rank_reads_what_it_holds(case: str, tmp_path: Path) -> None:
    reference = make_reference(case, tmp_path)
    found = run_ranks(4, save_and_read, reference.path, tmp_path, "tp2pp2")
    found += run_ranks(2, read, reference.path, tmp_path, ["tp2", "pp2vpp2"])
    assert len(found) == 6
    for by_layout in found:
        for layout, shares in by_layout.items():
            assert len(shares) == 3 and all(0.9 < share <= 1.1 for share in shares), (layout, shares)


def load_untied(path: Path, folder: Path) -> str:
    """Return the error about a torch_dist checkpoint of a tied model with another output layer. Runs on one rank."""
    from mca_models.checkpoint_kinds import open_checkpoint
    from mca_models.megatron import AutoModel

    state = by_layer(open_checkpoint(path).config, load_file(path / "model.safetensors"))
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"].clone()
    AutoModel.from_pretrained(save_torch_dist(folder / "equal", state))
    state["output_layer.weight"][3, 3] += 1
    with pytest.raises(McaError) as error:
        AutoModel.from_pretrained(save_torch_dist(folder / "other", state))
    return str(error.value)


def test_an_output_layer_that_is_not_the_embedding_is_not_passed_over(tmp_path: Path) -> None:
    reference = make_reference("qwen3-tied", tmp_path)
    (message,) = run_ranks(1, load_untied, reference.path, tmp_path / "torch_dist")
    assert "output_layer.weight must repeat embedding.word_embeddings.weight" in message
    assert "tie_word_embeddings to false" in message


def save_again(paths: list[Path], folder: Path) -> None:
    from mca_models.megatron import AutoModel

    for path in paths:
        AutoModel.from_pretrained(path, arguments("tp2")).save_pretrained_as_hf(folder / f"{path.name}-saved")


def test_weights_of_torch_save_are_read_as_safetensors_are(tmp_path: Path) -> None:
    reference = make_reference("qwen3", tmp_path)
    weights, path = load_file(reference.path / "model.safetensors"), tmp_path / "pickled"
    shutil.copytree(reference.path, path)
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    run_ranks(2, save_again, [path], tmp_path)
    assert tensors_of(tmp_path / "pickled-saved") == tensors_of(reference.path)


RANDOM = {
    "qwen3-tied": ("tp1", "tp2pp2vpp2", "cp2"),
    "qwen3_moe": ("tp1", "tp2ep2etp1pp2", "tp2etp2"),
    "deepseek_v3": ("tp1", "tp2sp"),
    "qwen3_next": ("tp1", "tp2"),
}
MORE = {"qwen3_moe": ("ep2",), "deepseek_v3": ("pp2ep2",), "qwen3_next": ("pp2",)}
"""Layouts that are drawn with ``--cases all`` only."""


def draw(drawn: list[tuple[str, str, int]], folder: Path) -> None:
    """Saves random models. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    for case, layout, seed in drawn:
        config = config_from_hf(json.loads((folder / f"{case}-float32" / "config.json").read_text()))
        models = AutoModel.from_config(config, arguments(layout), dtype="bfloat16", seed=seed)
        models.save_pretrained_as_hf(folder / f"{case}-{layout}-{seed}")


def test_a_seed_draws_the_same_model_on_every_layout(tmp_path: Path, every_case: bool) -> None:
    chosen = {case: layouts + MORE.get(case, ()) * every_case for case, layouts in RANDOM.items()}
    drawn = [(case, layout, 5) for case, layouts in chosen.items() for layout in layouts]
    drawn.append(("qwen3_moe", "tp1", 6))
    for case in RANDOM:
        make_reference(case, tmp_path)
    for size in (1, 2, 4):
        run_ranks(size, draw, [each for each in drawn if world_size(each[1]) == size], tmp_path)
    for case, (first, *others) in chosen.items():
        right = tensors_of(tmp_path / f"{case}-{first}-5")
        assert right.keys() >= tensors_of(tmp_path / f"{case}-float32").keys()  # DeepSeek: MTP layers too
        for layout in others:
            assert tensors_of(tmp_path / f"{case}-{layout}-5") == right, (case, layout)
    assert tensors_of(tmp_path / "qwen3_moe-tp1-6") != tensors_of(tmp_path / "qwen3_moe-tp1-5")


def broadcast(reference: Reference, folder: Path) -> tuple[int, float]:
    from mca_config.training import TrainingArguments
    from mca_models.megatron import AutoModel

    args: Any = TrainingArguments(
        output_dir=str(folder), load_broadcast=True, tensor_model_parallel_size=2, context_parallel_size=1
    )
    model = AutoModel.from_pretrained(reference.path, args, dtype="float32")
    return model.bytes_read, float((model.logits(reference.input_ids) - reference.logits).abs().max())


@pytest.mark.cases(0, always=["qwen3_moe"])
@pytest.mark.parametrize("case", ["llama-tied", "qwen3_moe"])
def test_one_replica_reads_for_all(case: str, tmp_path: Path) -> None:
    found = run_ranks(4, broadcast, make_reference(case, tmp_path), tmp_path)
    assert max(difference for _, difference in found) <= 1e-4
    assert all(nbytes > 0 for nbytes, _ in found[:2])
    assert [nbytes for nbytes, _ in found[2:]] == [0, 0], "the second replica reads nothing"


def grow(reference: Reference, layout: str, folder: Path, size: int) -> torch.Tensor:
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(reference.path, arguments(layout), vocab_size=size, seed=3)
    model.save_pretrained_as_hf(folder)
    logits: torch.Tensor = model.logits(reference.input_ids)
    return logits


@pytest.mark.cases(0, always=["qwen3-tied"])
@pytest.mark.parametrize("case", ["llama", "qwen3-tied", "qwen3_moe"])
def test_a_vocabulary_grows_alike_on_every_layout(case: str, tmp_path: Path) -> None:
    import transformers

    reference = make_reference(case, tmp_path)
    logits = {}
    for layout in ("tp1", "tp2pp2", "pp2vpp2"):
        found = run_ranks(world_size(layout), grow, reference, layout, tmp_path / layout, 77)
        logits[layout] = found[0]
        assert float((found[0][..., :70] - reference.logits).abs().max()) <= 1e-4
    exports = {layout: tensors_of(tmp_path / layout) for layout in logits}
    assert exports["tp1"] == exports["tp2pp2"] == exports["pp2vpp2"]
    assert json.loads((tmp_path / "tp1" / "config.json").read_text())["vocab_size"] == 77
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "tp2pp2", attn_implementation="eager"
    )
    with torch.no_grad():
        right = again.eval()(reference.input_ids, use_cache=False).logits
    assert float((logits["tp2pp2"] - right).abs().max()) <= 1e-4
    rows = again.get_input_embeddings().weight.detach()
    assert float((rows[70:] - rows[:70].mean(0)).abs().max()) < float(rows[:70].std()), "near the mean"
    assert float((rows[70] - rows[71]).abs().max()) > 0, "but not alike"


GROWN = {
    "tp1": tuple(FAMILY_CASES),
    "tp2": ("phi", "gptj", "phimoe", "opt", "gemma4_text-e2b", "gpt_neox", "qwen3-tied", "deepseek_v3"),
}
"""On two ranks those with a bias on the logits, with embeddings for all layers, under other names, tied, of latents."""


def grow_all(paths: list[Path], layout: str, folder: Path) -> None:
    from mca_models.megatron import AutoModel

    for path in paths:
        model = AutoModel.from_pretrained(path, arguments(layout), vocab_size=77, seed=3)
        model.save_pretrained_as_hf(folder / path.name)


@pytest.mark.qualify
@pytest.mark.parametrize("layout", GROWN)
def test_the_vocabulary_of_every_family_grows(layout: str, tmp_path: Path) -> None:
    """Old rows are kept bit for bit, of biases too; new ones lie within noise of the mean; transformers takes them."""
    import transformers

    paths = [save(case, tmp_path / "small" / case) for case in GROWN[layout]]
    run_ranks(world_size(layout), grow_all, paths, layout, tmp_path / "grown", timeout=900)
    for path in paths:
        before = load_file(path / "model.safetensors")
        after = load_file(tmp_path / "grown" / path.name / "model.safetensors")
        assert before.keys() == after.keys(), path.name
        grown = {name for name, rows in after.items() if rows.shape != before[name].shape}
        assert grown == {name for name, rows in before.items() if rows.shape[:1] == (70,)}, path.name
        for name, rows in after.items():
            assert torch.equal(rows[:70] if name in grown else rows, before[name]), (path.name, name)
        for name in grown:
            old, new = before[name].double(), after[name][70:].double()
            assert new.shape == (7, *old.shape[1:]), (path.name, name)
            away = (new - old.mean(0)) / old.std(0, unbiased=False)
            # a tenth of the deviation: six times that is not drawn, and seven rows are not alike
            assert 0 < float(away.abs().max()) < 0.6 and float((new[0] - new[1]).abs().max()) > 0, name
        _, reported = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "grown" / path.name, output_loading_info=True
        )
        assert not reported["missing_keys"] and not reported["mismatched_keys"], path.name


def test_a_vocabulary_does_not_shrink(tmp_path: Path) -> None:
    reference = make_reference("llama", tmp_path)
    with pytest.raises(RanksFailed, match="vocab_size 60 is less than the checkpoint's 70"):
        run_ranks(1, grow, reference, "tp1", tmp_path / "out", 60)
