"""Plans and predicted times of every case of `plan_cases`, to the last digit, and the file that records them.

    .venv/bin/python integration_tests/support/recorded_plans.py    # records what the planner says now

Measurements show within some percent that the planner is right. The record shows that it has not changed since. Change
the record only together with the reason for the change.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
RECORD = HERE / "recorded_plans.json"
DIGITS = 12
_STEPS: dict[str, dict[str, Any]] = {
    "distributed": {"use_distributed_optimizer": True},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9, "use_distributed_optimizer": False},
    "half gradients": {"accumulate_allreduce_grads_in_fp32": False},
    "offloaded": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25},
}
Record = dict[str, dict[str, list[list[float]]]]


def recorded() -> Record:
    """Return the record."""
    found: Record = json.loads(RECORD.read_text())
    return found


def write_models(folder: Path) -> None:
    """Write the configuration of every model."""
    from plan_cases import MODELS

    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def plans(models: str) -> Record:
    """Return the needs of each stage and the times of a step of each case, by kind of layers.

    They are those of megatron-core 0.16: since 0.18 interleaved stages free their outputs earlier.

    Args:
        models: Folder of `write_models`.
    """
    from mca_train.plan import sizes
    from plan_cases import CASES, checked

    with patch.object(sizes, "_waits_for_sends", lambda layout: layout.vpp == 1):
        return {
            name: {
                kind: [*map(_rounded, rows)]
                for kind, rows in _kinds(checked(name, f"{models}/{case[0]}"), number)
            }
            for number, (name, case) in enumerate(CASES.items())
        }


def _rounded(row: tuple[float, ...]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") if abs(value) > 1e-15 else 0.0 for value in row]


def _kinds(run: Any, number: int) -> Iterator[tuple[str, list[Any]]]:
    from mca_train.plan.hardware import load_hardware
    from mca_train.plan.memory import plan_layout
    from mca_train.plan.search import predict_step_time, with_changes
    from mca_train.run.plan_input import make_plan_input, planned_media

    args, world_size = run.settings.training, run.world_size
    images = planned_media(run)
    local = make_plan_input(run, "local", media=images)
    fused = replace(
        local,
        implementation="transformer_engine",
        on_gpu=True,
        evaluated=True,
        precomputed=local.reference is not None,
        forwards=2,
    )
    h100 = load_hardware("h100-80")
    # nothing is hidden: launches take no time, messages overlap with nothing, and two ranks are a node
    bare = replace(
        h100,
        device=replace(h100.device, node=2),
        efficiency=replace(h100.efficiency, launch_us=0.0, overlapped=0.0),
    )
    for kind, plan_input, changes, devices in (
        ("local", local, {}, ()),
        ("transformer_engine", fused, {}, ((h100, False), (bare, False), (bare, True))),
        ("fp8", fused, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, ((bare, True),)),
    ):
        changed = with_changes(args, changes)
        yield (
            kind,
            [astuple(stage)[1:] for stage in plan_layout(plan_input, changed, run.layout, world_size).stages],
        )
        times = (
            predict_step_time(plan_input, changed, run.layout, world_size, hardware, roughly=roughly)
            for hardware, roughly in devices
        )
        yield f"{kind} times", [astuple(time) for time in times]
    # sequences so short that the optimizer step is the peak, with one kind of optimizer for each case
    short = replace(local, seq_length=8 * run.layout.cp, media=None)
    name, changes = [*_STEPS.items()][number % len(_STEPS)]
    changed = with_changes(args, changes)
    yield name, [astuple(stage)[1:] for stage in plan_layout(short, changed, run.layout, world_size).stages]


def main() -> None:
    """Write the record."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        found = plans(folder)
    cases = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(kind)}: {json.dumps(rows)}" for kind, rows in kinds.items())
        + "\n}"
        for name, kinds in found.items()
    )
    RECORD.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    sys.path += [str(HERE), str(HERE.parents[1] / "packages/mca-models/tests")]
    main()
