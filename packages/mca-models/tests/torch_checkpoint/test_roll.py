"""Trees of ROLL's mcore_adapter give back every HF tensor, bit for bit, or a clear refusal."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import roll_tree
import tiny_hf
import torch
from compare import assert_same
from safetensors.torch import load_file

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_models.templates import get_family
from mca_models.torch_checkpoint.roll import is_roll, open_roll, rank_files

FIXTURE = Path(__file__).parents[5] / "shared/fixtures/roll_llama_tiny"


@pytest.mark.skipif(not FIXTURE.exists(), reason="the shared fixture is not there")
def test_what_roll_itself_wrote() -> None:
    assert is_roll(FIXTURE / "mca_tp2_pp2")
    source = open_roll(FIXTURE / "mca_tp2_pp2")
    source.check_duplicates()
    assert_same(source, load_file(FIXTURE / "hf/model.safetensors"))
    assert (source.config.layout.tp, source.config.layout.pp) == (2, 2)


def layout(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None
) -> ParallelLayout:
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


DENSE = [layout(), layout(2), layout(1, 4), layout(2, 2), layout(2, 2, 2), layout(4)]
EXPERTS = [
    layout(),
    layout(ep=2),
    layout(2, 1, ep=2),
    layout(1, 2, ep=4),
    layout(2, 2, 2, ep=2),
    layout(2, ep=4, etp=1),
]
CASES = [
    *((case, at) for case in ("llama", "llama-tied", "qwen2", "qwen3-tied") for at in DENSE),
    *((case, at) for case in ("qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe") for at in EXPERTS),
]
SPELLINGS = (roll_tree.te_grouped, roll_tree.local_sequential)
SPELLED = [(*case, SPELLINGS[number // 2 % 2]) for number, case in enumerate(CASES)]


def spelled(value: Any) -> str:
    return getattr(value, "__name__", str(value)).replace(" ", "")


def write(tmp_path: Path, made: Any, at: ParallelLayout, *args: Any, **options: Any) -> tuple[Path, Any]:
    config, hf = made
    config = replace(config, layout=at)
    roll_tree.write(tmp_path / "roll", config, hf, *args, **options)
    return tmp_path / "roll", hf


@pytest.mark.cases(3)
@pytest.mark.parametrize(("case", "at", "rename"), SPELLED, ids=spelled)
def test_every_layout_and_spelling_is_recovered(
    tmp_path: Path, checkpoint: Any, case: str, at: ParallelLayout, rename: Any
) -> None:
    directory, hf = write(tmp_path, checkpoint(case), at, rename)
    source = open_roll(directory)
    source.check_duplicates()
    assert_same(source, hf)
    wholes = roll_tree.wholes(source.config, hf)
    for param in source.params:
        for side in (1, 2):
            pieces = source.read(param, side)
            whole = wholes[param.mca_name()].view(torch.int16).numpy()
            whole = whole[: source.full_shape(param)[0]]
            if param.vocab:
                whole = np.concatenate([whole, np.zeros((-len(whole) % side, *whole.shape[1:]), whole.dtype)])
            for rank, piece in enumerate(pieces):
                assert (piece.view(np.int16) == param.shard.take(whole, rank, side)).all()


@pytest.mark.cases(12)
@pytest.mark.parametrize("rename", [roll_tree.te_grouped, roll_tree.local_sequential])
@pytest.mark.parametrize("case", tiny_hf.ALL)
def test_every_family_is_recovered(tmp_path: Path, checkpoint: Any, case: str, rename: Any) -> None:
    made = checkpoint(case)
    stages = 1 if made[0].per_layer_embedding else 2
    at = layout(2, stages, ep=2 if made[0].num_experts else 1)
    directory, hf = write(tmp_path, made, at, rename)
    assert_same(open_roll(directory), hf)


@pytest.mark.parametrize("at", [layout(), layout(2, ep=2)], ids=str)
def test_the_old_grouped_experts_are_recovered(tmp_path: Path, checkpoint: Any, at: ParallelLayout) -> None:
    directory, hf = write(tmp_path, checkpoint("qwen3_moe"), at, grouped_gemm=True)
    assert_same(open_roll(directory), hf)


def test_latent_down_projections_may_be_cut(tmp_path: Path, checkpoint: Any) -> None:
    directory, hf = write(tmp_path, checkpoint("deepseek_v3"), layout(2), cut_down_projections=True)
    assert_same(open_roll(directory), hf)


def test_prediction_layers_are_recovered(tmp_path: Path, checkpoint: Any) -> None:
    config, hf = checkpoint("deepseek_v3")
    config = config.replace_fields(mtp_num_layers=1, layout=layout(2, 2))
    names = {name for param in get_family("deepseek_v3").params(config) for name in param.hf_names()} - set(
        hf
    )
    last = f"model.layers.{config.num_layers - 1}."
    made = {}
    for name in names:
        twin = name.replace(f"model.layers.{config.num_layers}.", last)
        if twin in hf:
            made[name] = torch.randn_like(hf[twin].float()).bfloat16()
        else:
            width = 2 * config.hidden_size if "eh_proj" in name else None
            made[name] = torch.randn(
                [config.hidden_size, width] if width else [config.hidden_size]
            ).bfloat16()
    hf = {**hf, **made}
    roll_tree.write(tmp_path / "roll", config, hf, roll_tree.local_sequential)
    source = open_roll(tmp_path / "roll")
    source.check_duplicates()
    assert_same(source, hf)


def test_pieces_of_a_view_are_read_from_their_own_bytes(tmp_path: Path, checkpoint: Any) -> None:
    directory, hf = write(tmp_path, checkpoint("llama"), layout(2))
    for info in open_roll(directory).tensors():
        assert info.offset + info.nbytes <= info.file.stat().st_size
    assert_same(open_roll(directory), hf)


@pytest.mark.parametrize("case", ["qwen3_next", "gpt_oss", "deepseek_v3", "granite"])
def test_a_configuration_of_mcore_adapter_is_completed_by_the_hf_config_in_it(
    tmp_path: Path, checkpoint: Any, case: str
) -> None:
    config, hf = checkpoint(case)
    at = layout(2, 2, ep=2 if config.num_experts else 1)
    directory, _ = write(tmp_path, (config, hf), at)
    names = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
    )
    own = config.to_fields()
    flat = {name: own[name] for name in names}
    flat |= {"hf_model_type": config.model_type, "hf_config_json": json.dumps(config.hf_config), "bf16": True}
    flat |= {
        "tie_embeddings_and_output_weights": config.head.tie_word_embeddings,
        "num_moe_experts": own["num_moe_experts"],
    }
    flat |= {name: value for name, value in asdict(at).items() if value is not None}
    (directory / "mca_config.json").write_text(json.dumps(flat))
    source = open_roll(directory)
    assert source.config == replace(config, layout=at)
    assert_same(source, hf)


def test_a_different_copy_is_noticed(tmp_path: Path, checkpoint: Any) -> None:
    directory, _ = write(tmp_path, checkpoint("qwen3_moe"), layout(1, ep=2))
    file = directory / "iter_0000001/mp_rank_00_001/model_optim_rng.pt"
    saved = torch.load(file)
    saved["model"]["decoder.layers.2.mlp.router.weight"][1, 1] += 1
    torch.save(saved, file)
    source = open_roll(directory)
    with pytest.raises(
        McaError, match=r"mp_rank_00_001.*decoder.layers.2.mlp.router.weight differs from the copy"
    ):
        source.check_duplicates()


def test_a_tied_head_that_differs_is_noticed(tmp_path: Path, checkpoint: Any) -> None:
    directory, _ = write(tmp_path, checkpoint("llama-tied"), layout(1, 2))
    file = directory / "iter_0000001/mp_rank_00_001/model_optim_rng.pt"
    saved = torch.load(file)
    saved["model"]["output_layer.weight"][0, 0] += 1
    torch.save(saved, file)
    with pytest.raises(McaError, match=r"output_layer\.weight must repeat embedding"):
        open_roll(directory).check_duplicates()


def change(directory: Path, rank: str, edit: Any) -> None:
    file = directory / f"iter_0000001/{rank}/model_optim_rng.pt"
    saved = torch.load(file)
    edit(saved["model"])
    torch.save(saved, file)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m.pop("decoder.layers.0.mlp.linear_fc2.weight"),
            r"1 missing tensor \(decoder.layers.0.mlp.linear_fc2",
        ),
        (lambda m: m.update(extra=torch.ones(1)), r"1 unexpected tensor \(extra\)"),
        (
            lambda m: m.update({"decoder.layers.0.input_layernorm.weight": torch.ones(32)}),
            "one parameter twice",
        ),
        (
            lambda m: m.update({"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(4, 4)}),
            r"has shape \[4, 4\].*should be \[32, 48\], cut into \[32, 24\]",
        ),
        (
            lambda m: m.update({"embedding.word_embeddings.weight": torch.ones(10, 32)}),
            r"does not make up embedding.word_embeddings.weight of \[70, 32\]",
        ),
    ],
)
def test_what_is_not_there_or_too_much_is_refused(
    tmp_path: Path, checkpoint: Any, edit: Any, message: str
) -> None:
    directory, _ = write(tmp_path, checkpoint("llama"), layout(2, 2))
    change(directory, "mp_rank_00_000", edit)
    with pytest.raises(McaError, match=message):
        open_roll(directory)


def test_missing_and_surplus_ranks_are_named(tmp_path: Path, checkpoint: Any) -> None:
    directory, _ = write(tmp_path, checkpoint("llama"), layout(2, 2))
    (directory / "iter_0000001/mp_rank_01_001").rename(directory / "iter_0000001/mp_rank_02_001")
    with pytest.raises(
        McaError, match=r"1 missing rank \(mp_rank_01_001\) and 1 unexpected rank \(mp_rank_02_001\)"
    ):
        open_roll(directory)


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (layout(4, etp=1), "some tensor ranks wrote nothing"),
        (layout(1, etp=2), "two ranks wrote to mp_rank_00"),
    ],
)
def test_layouts_that_lose_ranks_are_refused(at: ParallelLayout, why: str) -> None:
    with pytest.raises(McaError, match=why):
        rank_files(at)


def test_no_iteration_is_one_clear_error(tmp_path: Path, checkpoint: Any) -> None:
    directory, _ = write(tmp_path, checkpoint("llama"), layout())
    (directory / "latest_checkpointed_iteration.txt").unlink()
    assert not is_roll(directory)
    with pytest.raises(McaError, match=r"latest_checkpointed_iteration\.txt: no such file"):
        open_roll(directory)


def test_a_hostile_rank_file_is_refused(tmp_path: Path, checkpoint: Any) -> None:
    import os

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{tmp_path}/ran'",)

    directory, _ = write(tmp_path, checkpoint("llama"), layout())
    file = directory / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    torch.save({"model": torch.load(file)["model"], "args": Evil()}, file)
    with pytest.raises(McaError, match=r"model_optim_rng.pt: the pickle names posix.system"):
        open_roll(directory)
    assert not (tmp_path / "ran").exists()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(McaError, match=r"model_optim_rng.pt: leads out of the directory"):
        open_roll(directory)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(McaError, match=r"model_optim_rng.pt: not a file but a directory, pipe or device"):
        open_roll(directory)
