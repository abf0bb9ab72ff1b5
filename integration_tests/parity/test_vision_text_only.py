"""Vision models that train on text alone: logits equal those of transformers, and the vision model does not change."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch

from case_tables import TEXT_OF_VISION_MODELS
from cases import Case, as_params, group_by_ranks, needed
from checkpoint_files import tensors_of
from harness import run_in_turn, run_ranks
from layouts import arguments
from mca_convert.cli import main as convert
from parity import TOLERANCE

pytestmark = pytest.mark.ranks


def carried(work: list[tuple[Path, torch.Tensor, torch.Tensor, str]], folder: Path) -> list[float]:
    """The largest differences of logits; writes each model in both formats. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found = []
    for path, input_ids, logits, layout in work:
        model = AutoModel.from_pretrained(path, arguments(layout))
        tower = [each for item, each in model.local_params() if item.param.mca.startswith("vision_model.")]
        assert not any(tensor.requires_grad for tensor in tower)
        found.append(float((model.logits(input_ids) - logits).abs().max()))
        if layout == "tp1":
            require_positional(model.chunks[0], input_ids)
        model.save_pretrained_as_hf(folder / f"{path.name}-{layout}-hf")
        model.save_pretrained(folder / f"{path.name}-{layout}-mca")
    return found


def require_positional(chunk: Any, input_ids: torch.Tensor) -> None:
    """Megatron's own loops give a chunk its inputs by position."""
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    with torch.no_grad():
        named = chunk(input_ids=input_ids, position_ids=positions, attention_mask=None)
        assert torch.equal(chunk(input_ids, positions, None), named)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[Case, float]]:
    folder = tmp_path_factory.mktemp("carried")
    input_ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    work: dict[str, tuple[Path, torch.Tensor, torch.Tensor]] = {}
    for name in dict.fromkeys(case.model for case in needed(request)):
        model = tiny_vision.model_of(name).eval()
        model.save_pretrained(folder / name)
        with torch.no_grad():
            work[name] = folder / name, input_ids, model(input_ids=input_ids, use_cache=False).logits
    differences = {}
    for num_ranks, cases in group_by_ranks(needed(request)).items():
        ranks = run_ranks(num_ranks, carried, [(*work[case.model], case.layout) for case in cases], folder)
        differences |= dict(zip(cases, map(max, zip(*ranks, strict=True)), strict=True))
    return folder, differences


@pytest.mark.cases(
    0,
    always=[
        *("qwen2_5_vl-tp1", "qwen3_vl-tied-tp2sp", "glm4v-cp2", "qwen3_vl_moe-pp2"),
        *("qwen2_vl-tp2pp2vpp2", "mistral3-mistral4-moe-tp2ep2etp1"),
    ],
)
@pytest.mark.parametrize("case", as_params(TEXT_OF_VISION_MODELS))
def test_text_computes_the_same_and_everything_is_exported(case: Case, found: Any, tmp_path: Path) -> None:
    folder, differences = found
    source, layout = folder / case.model, case.layout
    assert differences[case] < TOLERANCE
    assert tensors_of(folder / f"{case.id}-hf") == tensors_of(source)
    written = json.loads((folder / f"{case.id}-hf/config.json").read_text())
    assert written == json.loads((source / "config.json").read_text())
    sizes = arguments(layout).layout()
    flags = [f"--{name}={size}" for name, size in asdict(sizes).items() if type(size) is int]
    converted = tmp_path / "converted"
    assert convert([f"--checkpoint_path={source}", f"--output_path={converted}", *flags]) == 0
    assert tensors_of(converted) == tensors_of(folder / f"{case.id}-mca")


def trained_on_text(source: Path, folder: Path) -> None:
    """Two steps of AdamW with weight decay, and the export. Runs on every rank."""
    from train_cases import make_trainer, quietly, samples

    trainer = make_trainer(
        source,
        folder / "run",
        train_dataset=samples(16, vocab=64, longest=24),
        eval_dataset=samples(4, vocab=64, longest=24),
        tensor_model_parallel_size=2,
        weight_decay=0.5,
        learning_rate=1e-2,
        max_steps=2,
    )
    quietly(trainer.train)
    trainer.model.save_pretrained_as_hf(folder / "trained")


def test_a_run_on_text_leaves_the_vision_part_as_it_is(tmp_path: Path) -> None:
    sources = {case: tiny_vision.save(case, tmp_path / case / "source") for case in ("qwen3_vl", "gemma3")}
    run_in_turn(2, *(partial(trained_on_text, source, tmp_path / case) for case, source in sources.items()))
    for case, source in sources.items():
        before, after = tensors_of(source), tensors_of(tmp_path / case / "trained")
        moved = {name for name, (_, _, data) in before.items() if after[name][2] != data}
        trained = {name for name in before if "language_model" in name or name.startswith("lm_head")}
        assert moved == trained, case


def adapted(source: Path, folder: Path) -> torch.Tensor:
    """Logits with a random adapter on projections that the vision part has too; it is saved. Runs on every rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    models = get_peft_model(AutoModel.from_pretrained(source, arguments("tp2")), settings)
    models.save_pretrained_as_hf(folder / "adapter")
    logits: torch.Tensor = models.logits(torch.arange(24)[None])
    return logits


@pytest.mark.parametrize("case", ["gemma3", "qwen2_5_vl"])
def test_peft_loads_an_adapter_of_the_text_part(case: str, tmp_path: Path) -> None:
    import peft
    import transformers

    source = tiny_vision.save(case, tmp_path / "source")
    ours, _ = run_ranks(2, adapted, source, tmp_path)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(source)
    with torch.no_grad():
        plain = model(torch.arange(24)[None]).logits
    lora = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs = lora(torch.arange(24)[None]).logits
    assert float((theirs - plain).abs().max()) > 1e-3
    assert float((theirs - ours).abs().max()) <= TOLERANCE
    wrapped = {name for name, _ in lora.named_parameters() if "lora_A" in name}
    assert wrapped and all("language_model" in name for name in wrapped)
