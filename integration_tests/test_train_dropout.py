"""Which ranks drop the same values: those that hold the same activations, and no others."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from harness import run_ranks
from test_train_layouts import CP, PP, SP, TP
from mca_models.megatron.families import sparse_mixer
from train_cases import make_trainer, quietly, tiny_checkpoint

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
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


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
    at = trainer.model.place.at
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


@pytest.mark.parametrize(
    ("size", "changes"), [(2, {}), pytest.param(4, PP | CP, marks=pytest.mark.wide)], ids=["dp2", "pp2-cp2"]
)
def test_ranks_draw_experts_of_their_own(size, changes, tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    path = tiny_checkpoint(tmp_path / "model", PhimoeConfig, PhimoeForCausalLM, num_local_experts=4)
    first, *others = run_ranks(size, experts_drawn, path, tmp_path, **changes)
    assert first and all(not any(draws in first for draws in other) for other in others)
