"""Ranks that drop the same values: those with the same activations, and no others."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from harness import run_ranks
from mca_models.megatron.features import sparse_mixer
from train_cases import make_trainer, quietly, stop_and_resume, tiny_checkpoint
from train_settings import CP, PP, SP, TP

pytestmark = pytest.mark.ranks

DROPOUT = {"hidden_dropout": 0.25, "attention_dropout": 0.25}
RUN = {"max_steps": 1, "gradient_accumulation_steps": 2, "count": 4, "warmup_steps": 0}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2": (4, TP | PP),
    "tp2-sp-cp2": (4, SP | CP),
    "dp2": (2, {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def drawn(checkpoint: Path, output: Path, **changes: Any) -> tuple[tuple[int, ...], list[Any], list[Any]]:
    """This rank's place (tp, others), what its layers' hidden dropout kept, and what attention draws next."""
    import torch
    from torch.overrides import TorchFunctionMode

    kept: list[Any] = []
    attention: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            if func is torch.nn.functional.scaled_dot_product_attention and options.get("dropout_p"):
                state = torch.get_rng_state()
                attention.append(torch.rand(4).tolist())
                torch.set_rng_state(state)
            result = func(*args, **options)
            if func is torch.nn.functional.dropout and options.get("p", 0) and options.get("training", True):
                kept.append((result.flatten()[:64] != 0).tolist())
            return result

    trainer = make_trainer(checkpoint, output, **RUN | DROPOUT | changes)
    with Watch():
        quietly(trainer.train)
    at = trainer.model.rank_context.coordinates
    return (at.tp, at.pp, at.cp, at.dp), kept[:6], attention[:4]


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_tensor_ranks_that_hold_the_same_drop_the_same(name, checkpoint, tmp_path):
    size, changes = LAYOUTS[name]
    found = run_ranks(size, drawn, checkpoint, tmp_path, **changes)
    for (at, hidden, attention), (other_at, other_hidden, other_attention) in (
        (one, other) for number, one in enumerate(found) for other in found[:number]
    ):
        assert hidden and attention
        whole = at[1:] == other_at[1:] and "sequence_parallel" not in changes
        assert (hidden == other_hidden) is whole, (at, other_at)
        assert attention != other_attention, (at, other_at)


def experts_drawn(checkpoint: Path, output: Path, **changes: Any) -> list[list[float]]:
    """The numbers by which this rank's routers draw experts."""
    import torch

    found: list[list[float]] = []

    def exponential(like: Any) -> Any:
        found.append((drawn := torch.empty_like(like).exponential_()).flatten()[:4].tolist())
        return drawn

    with patch.object(sparse_mixer, "exponential", exponential):
        quietly(make_trainer(checkpoint, output, **RUN | changes).train)
    return found


@pytest.mark.cases(0, always=["dp2"])
@pytest.mark.parametrize(("size", "changes"), [(2, {}), (4, PP | CP)], ids=["dp2", "pp2-cp2"])
def test_ranks_draw_different_experts(size, changes, tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    path = tiny_checkpoint(tmp_path / "model", PhimoeConfig, PhimoeForCausalLM, num_local_experts=4)
    first, *others = run_ranks(size, experts_drawn, path, tmp_path, **changes)
    assert first and all(not any(draws in first for draws in other) for other in others)


def restored(folder: Path) -> dict[str, Any]:
    """This rank's next draws after its random state was loaded, and those that it would have had, by layout."""
    from dataclasses import replace

    import torch

    from mca_config.layout import ParallelLayout
    from mca_models.megatron.distributed import parallel
    from mca_train import groups
    from mca_train.batching.position import RunPosition
    from mca_train.checkpoint.training_state import TRAINING, TrainingState
    from mca_train.engine.rng import save_rng

    tp2, one = ParallelLayout(tensor_model_parallel_size=2), ParallelLayout()

    def drawn_on(layout: Any, checkpoint: str) -> tuple[Any, Any]:
        parallel.seed_device(3, parallel.start(layout))
        own = torch.rand(4).tolist()
        parallel.seed_device(3, parallel.start(layout))
        here: Any = groups.current_ranks(layout)
        nothing: Any = None
        TrainingState(nothing, nothing, here, RunPosition()).load_rng(folder / checkpoint, drops=True)
        return torch.rand(4).tolist(), own

    parallel.seed_device(3, parallel.start(one))
    here = groups.current_ranks(one)
    torch.rand(7)
    save_rng(folder / "of-replicas" / TRAINING, here)
    if here.is_first:
        save_rng(folder / "of-one" / TRAINING, replace(here, world_size=1))
    went_on = torch.rand(4).tolist()
    found: dict[str, Any] = {"replicas": (*drawn_on(one, "of-replicas"), went_on)}
    return found | {f"tp2-{name}": drawn_on(tp2, name) for name in ("of-replicas", "of-one")}


def test_random_states_are_restored_on_their_own_layout_alone(tmp_path):
    first, second = run_ranks(2, restored, tmp_path)
    for drawn, own, went_on in (first["replicas"], second["replicas"]):
        assert drawn == went_on != own
    assert first["replicas"] != second["replicas"]
    for name in ("tp2-of-replicas", "tp2-of-one"):
        assert first[name] == second[name], "tensor ranks must drop alike what they hold twice"
        assert first[name][0] == first[name][1]


def on_tensor_ranks(checkpoint: Path, output: Path) -> tuple[int, Any]:
    """After a step on two replicas and one more on two tensor ranks: the generator, and what both hold of norms."""
    import torch

    run = RUN | DROPOUT | {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.05}
    quietly(make_trainer(checkpoint, output, **run).train)
    trainer = make_trainer(
        checkpoint, output, **run | TP | {"max_steps": 2, "gradient_accumulation_steps": 4}
    )
    quietly(lambda: trainer.train(resume_from_checkpoint=True))
    norms = {name: tensor.tolist() for name, tensor in trainer.model.canonical_parameters() if "norm" in name}
    return hash(torch.get_rng_state().numpy().tobytes()), norms


@pytest.mark.qualify
def test_tensor_ranks_drop_alike_after_a_run_on_replicas(checkpoint, tmp_path):
    first, second = run_ranks(2, on_tensor_ranks, checkpoint, tmp_path)
    assert first[1] and first == second


def resumed(checkpoint: Path, output: Path) -> dict[str, Any]:
    """Return the result of `stop_and_resume` for a run that draws experts."""
    import torch

    with patch.object(sparse_mixer, "exponential", lambda like: torch.empty_like(like).exponential_()):
        return stop_and_resume(checkpoint, output, 1, **RUN | {"max_steps": 3})


@pytest.mark.qualify
def test_a_run_that_draws_experts_resumes_bit_for_bit(tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    path = tiny_checkpoint(tmp_path / "model", PhimoeConfig, PhimoeForCausalLM, num_local_experts=4)
    for found in run_ranks(2, resumed, path, tmp_path):
        assert found["resumed"] == found["straight"]
        assert found["state"] == {"steps": 3, "equal_weights": True}
