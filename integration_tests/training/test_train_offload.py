"""Optimizer state in host memory changes nothing but the host's rounding, and is saved as any other.

`--cases all` runs every case, and more steps.
"""

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from loss_curves import worst
from optimizer_states import BF16, HALF, LOADED, OFF, PRECISE, after_loading
from reshard_runs import ALL, FIRST, run
from train_cases import history, make_trainer, quietly, tiny_checkpoint
from train_settings import ASYNC, DP, PP, TP, ZERO

pytestmark = pytest.mark.ranks

EACH = HALF | {"overlap_cpu_optimizer_d2h_h2d": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def curve(
    checkpoint: Path, output: Path, steps: int, *, one_adam: bool = False, **changes: Any
) -> dict[str, Any]:
    """Losses and norms of a run, and which share of its parameters stepped on the host.

    Args:
        checkpoint: The model.
        output: For the run.
        steps: Of the run.
        one_adam: The optimizer on the host is the device's own instead of torch's.
        changes: Arguments.
    """
    if one_adam:
        import megatron.core.optimizer as megatron

        from mca_models.megatron.platform import FusedAdam

        megatron.CPUAdam = type("HostAdam", (FusedAdam,), {})
    changes |= {"gradient_accumulation_steps": 1}
    trainer = make_trainer(checkpoint, output, max_steps=steps, decoupled_lr=2e-3, **changes)
    quietly(trainer.train)
    return {
        "loss": history(trainer, "loss"),
        "grad_norm": history(trainer, "grad_norm"),
        "host": on_host(trainer),
    }


def on_host(trainer: Any) -> tuple[float, int] | None:
    """The share of parameters, and the number of optimizers, on the host."""
    (optimizer,) = {
        id(part.optimizer): part.optimizer for part in trainer.engine.optimizer.chained_optimizers
    }.values()
    if not hasattr(optimizer, "cpu_optimizers"):
        return None
    sizes = [
        sum(param.numel() for group in one.param_groups for param in group["params"])
        for one in optimizer.cpu_optimizers
    ]
    return sum(sizes) / sum(param.numel() for param in optimizer.param_to_inner_param), len(sizes)


def curves(
    checkpoint: Path, output: Path, steps: int, base: dict[str, Any], changes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    plain = curve(checkpoint, output, steps, **base)
    assert plain["host"] is None
    found = {name: curve(checkpoint, output, steps, **(base | more)) for name, more in changes.items()}
    # last, for it replaces the host's optimizer for good
    same = {
        name: curve(checkpoint, output, steps, one_adam=True, **(base | more))
        for name, more in changes.items()
    }
    return {"plain": plain, "found": found, "same": same}


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "alone": (1, {}, {"all": OFF, "half": HALF, "each": EACH}),
    "split bf16": (2, ZERO | BF16, {"half": HALF, "precise": EACH | PRECISE}),
    "split": (2, ZERO, {"half": HALF, "precise": HALF | PRECISE}),
    "tp2": (2, TP, {"half": EACH}),
    "tp2 bf16": (2, TP | BF16, {"half": EACH}),
    "pp2": (2, PP, {"half": HALF}),
    "pp2 bf16": (2, PP | BF16, {"half": HALF}),
}


@pytest.mark.cases(0, always=["split bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloading_changes_nothing_but_the_hosts_rounding(layout, checkpoint, tmp_path, every_case):
    (size, base, changes), steps = LAYOUTS[layout], 20 if every_case else 4
    for rank in run_ranks(size, curves, checkpoint, tmp_path, steps, base, changes, timeout=240):
        plain = rank["plain"]
        assert max(plain["grad_norm"]) > 1, "something has to be clipped"
        for name, more in changes.items():
            share, optimizers = rank["found"][name]["host"]
            wanted = more.get("optimizer_offload_fraction", 1.0)
            assert wanted <= share < wanted + 0.35, name
            assert (optimizers > 1) == ("overlap_cpu_optimizer_d2h_h2d" in more)
            # with one implementation of Adam on both sides every bit is the same
            assert rank["same"][name]["loss"] == plain["loss"], name
            assert rank["same"][name]["grad_norm"] == plain["grad_norm"], name
            assert worst(plain["loss"], rank["found"][name]["loss"]) < (2e-3 if "bf16" in base else 1e-6), (
                name
            )


SPLIT = ZERO | DP
RESUMED: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "exactly, bf16": ((1, EACH | BF16), (1, EACH | BF16)),
    "exactly, split, precise, in background": ((2, HALF | SPLIT | PRECISE | BF16 | ASYNC),) * 2,
    "another fraction": ((1, HALF), (1, OFF)),
    "offloaded from now on": ((1, {}), (1, HALF)),
    "not offloaded any more": ((1, OFF), (1, {})),
    "split to tp2": ((2, HALF | SPLIT), (2, OFF | TP)),
    "pp2 to split, precise": ((2, OFF | PP), (2, HALF | SPLIT | PRECISE)),
}


@pytest.mark.cases(0, always=["exactly, split, precise, in background"])
@pytest.mark.parametrize("name", RESUMED)
def test_the_loss_curve_goes_on(name, checkpoint, tmp_path, every_case):
    (size, before), (other, after) = RESUMED[name]
    first, steps = (4, 24) if every_case else (FIRST, ALL)
    straight = run_ranks(size, run, checkpoint, tmp_path / "straight", steps, first=first, **before)[0]
    saved = tmp_path / "straight" / f"checkpoint-{first}"
    resumed = run_ranks(other, run, checkpoint, tmp_path / "resumed", steps, saved, **after)[0]
    assert len(resumed["loss"]) == steps
    if before == after:
        assert resumed == straight
    assert resumed["loss"][:first] == straight["loss"][:first]
    assert worst(straight["loss"], resumed["loss"]) < 1e-4


def test_weights_loaded_under_the_optimizer_stay(checkpoint, tmp_path):
    assert run_ranks(1, after_loading, checkpoint, tmp_path) == [dict.fromkeys(LOADED, True)]
