"""Adapters, frozen parts, preferences and recomputation together, on rows with pictures.

Losses and trained weights of every combination are those of transformers and PEFT in one process. `--cases all` runs
all models, kinds and layouts.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cases import Case, as_params
from crossed_runs import (
    OPTIONS,
    Prepared,
    loaded,
    losses_of,
    part_of,
    prepared,
    require_same_changes,
    score_losses,
    scored,
    write_adapter,
)
from media_runs import Row, answer_log_prob, load_model, run_training

pytestmark = pytest.mark.ranks

MODELS = ("qwen2_5_vl", "qwen3_vl", "gemma3")
KINDS = ("sft", "dpo", "kto")
RECOMPUTE = (
    *("--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", "1"),
)
LAYOUTS = {
    "tp2": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
    "pp2": ("--pipeline_model_parallel_size", "2"),
    "cp2packed": ("--context_parallel_size", "2", "--sequence_packing", "true", "--seq_length", "512"),
    "dp2": ("--nproc_per_node", "2", "--gradient_accumulation_steps", "1"),
}
ONE_PACK = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1")
"""A step of one pack with all rows, where packs are made of rows; other kinds pack the rows of a micro-batch."""
FROZEN = {"adapter": (), "seeing": ("language",), "speaking": ("vision", "projector"), "tower": ("vision",)}
"""Frozen parts of each way of training; an adapter on all parts trains none of them."""
CASES = tuple(
    Case(model, layout, (kind, way))
    for model in MODELS
    for kind in KINDS
    for way in FROZEN
    for layout in LAYOUTS
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crossings")


@cache
def adapter_of(made: Prepared) -> Path:
    """Return the directory of an adapter on all parts."""
    path = made.folder / "adapter"
    write_adapter(path, made.folder)
    return path


@cache
def expected(made: Prepared, kind: str, way: str) -> tuple[list[float], Any]:
    """Return the losses of transformers' steps, and the model after them."""
    base = load_model(made.folder / "model")

    def reference(row: Row) -> torch.Tensor:
        with torch.no_grad():
            return answer_log_prob(base, row)

    adapter = adapter_of(made) if way == "adapter" else None
    model = loaded(made, frozen=FROZEN[way], adapter=adapter)
    return losses_of(kind, made, model, reference), model


def words_of(made: Prepared, kind: str, way: str, layout: str) -> tuple[str, ...]:
    """Return the options of a way of training."""
    words = ("--kto_beta", "1") if kind == "kto" else ()
    words += ONE_PACK if layout == "cp2packed" and kind in ("sft", "dpo") else ()
    if way == "adapter":
        return (*words, "--adapter_name_or_path", str(adapter_of(made)), "--freeze", "null")
    return (*words, "--freeze", f"[{', '.join(FROZEN[way])}]")


@pytest.mark.cases(0, always=["qwen2_5_vl-cp2packed-dpo-adapter"])
@pytest.mark.parametrize("case", as_params(CASES))
def test_crossed_options_train_as_in_transformers(case: Case, root: Path) -> None:
    kind, way = case.options
    made = prepared(case.model, root)
    losses, model = expected(made, kind, way)
    words = (
        *LAYOUTS[case.layout],
        *words_of(made, kind, way, case.layout),
        *RECOMPUTE,
        *OPTIONS,
    )
    logs = run_training(made.folder, case.id, *words, kind=kind)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-4
    path = made.folder / case.id / "hf"
    if way == "adapter":
        require_same_adapter(model, path, made)
    else:
        require_same_weights(model, path, made, FROZEN[way])


HEADS = tuple(
    Case(model, layout, (kind,))
    for model in ("gemma3", "qwen3_5")
    for kind in ("reward", "classify")
    for layout in LAYOUTS
)


@pytest.mark.cases(0, always=["gemma3-cp2packed-reward"])
@pytest.mark.parametrize("case", as_params(HEADS))
def test_heads_on_recomputed_models_train_as_in_transformers(case: Case, root: Path) -> None:
    (kind,), made = case.options, prepared(case.model, root)
    path = scored(made, 1 if kind == "reward" else 2)
    losses = score_losses(kind, made, path)
    words = ["--model_name_or_path", str(path), *LAYOUTS[case.layout], *RECOMPUTE, *OPTIONS]
    words += ["--num_labels", "2"] if kind == "classify" else []
    logs = run_training(made.folder, case.id, *words, kind=kind)
    assert [log["loss"] for log in logs] == pytest.approx(losses, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-3


def require_same_adapter(model: Any, path: Path, made: Prepared) -> None:
    """Compare the weights of an adapter with those of a PEFT model."""
    model.save_pretrained(made.folder / "wanted")
    theirs, ours, before = (
        load_file(each / "adapter_model.safetensors")
        for each in (made.folder / "wanted", path, adapter_of(made))
    )
    require_same_changes(before, ours, theirs)


def require_same_weights(model: Any, path: Path, made: Prepared, frozen: tuple[str, ...]) -> None:
    """Compare all weights with those of transformers' model; frozen ones are those of the checkpoint."""
    ours, before = (
        {name: x.detach() for name, x in load_model(each).named_parameters()}
        for each in (path, made.folder / "model")
    )
    assert all(torch.equal(ours[name], before[name]) for name in ours if part_of(name) in frozen)
    require_same_changes(before, ours, {name: x.detach() for name, x in model.named_parameters()})
