"""Work of a rank at the start of a run and when it saves, which grows no faster than the number of ranks."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness import run_ranks
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks

FEW, MANY = 64, 512


def _benchmark(name: str = "scale") -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def costs() -> list[dict[str, Any]]:
    measure = _benchmark().measure
    return [vars(measure(world)) for world in (FEW, MANY)]


def test_nothing_grows_faster_than_the_world():
    ((few, many),) = run_ranks(1, costs, process_group=False)
    times = MANY // FEW
    for count in ("groups", "listed", "coordinated"):
        assert 0 < many[count] <= times * few[count], count
    assert many["tensors"] == few["tensors"]
    assert many["connections"] <= 150, "gloo connects each rank of a group with each"
    assert many["received"] <= 5 * few["received"], "what each rank holds is not sent to every rank"
    assert 0 < many["files"] <= few["files"] <= 2
    assert few["index"] <= many["index"] <= 1.1 * few["index"], "replicas have no entries of their own"
    assert many["state"] == few["state"]
    for found, ranks in ((few, FEW), (many, MANY)):
        assert found["state"] / ranks <= found["asked"] <= 3 * found["state"] / ranks, (
            "a share, and what lies over its borders"
        )


def of_replicas(checkpoint: Path, folder: Path) -> dict[str, int]:
    found: dict[str, int] = _benchmark("replicas").measure(checkpoint, folder, split=True)
    return found


@pytest.mark.qualify
def test_a_replica_holds_and_reads_its_share_of_the_optimizer(tmp_path):
    sizes = _benchmark("replicas").SIZES
    checkpoint = tiny_checkpoint(tmp_path / "hf", **sizes)
    ranks = run_ranks(4, of_replicas, checkpoint, tmp_path)
    share = 3 * ranks[0]["of the model"] / 4
    assert sum(rank["held"] for rank in ranks) == 4 * share, "each parameter's state is written once"
    for rank in ranks:
        assert 0.9 * share <= rank["held"] <= 1.1 * share
        assert rank["held"] <= rank["asked"] <= 1.3 * share, "and what lies over the borders of a share"
        assert rank["asked"] + rank["index"] <= rank["read"] <= 1.4 * share


def stopped_at(signalled: int) -> int:
    """Step after which this rank stops; rank 2 gets SIGTERM in one."""
    from mca_train.trainer.monitor import StopSignal

    with StopSignal() as stop:
        for step in range(20):
            if step == signalled and os.environ["RANK"] == "2":
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed():
                return step
    return -1


def test_all_ranks_stop_after_the_same_step():
    assert run_ranks(4, stopped_at, 3) == [4] * 4
