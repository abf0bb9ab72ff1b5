"""``mca-train plan --dry_run`` runs some micro-batches of a step, and reports the whole step."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dry_run_cases import DENSE, PP, SPLIT, TP, VPP, be_no_rank, prepared
from harness import run_ranks
from mca_train.dry_run.step import StepNeeds

pytestmark = pytest.mark.ranks

OVERLAP = SPLIT | {"overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True}
STEPS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    # kind, ranks, micro-batches that suffice, keys
    "vpp tp dp": ("pretrain", 8, 4, {PP: 2, VPP: 2, TP: 2, "sequence_parallel": True} | OVERLAP),
    "dpo pp": ("dpo", 2, 3, {PP: 2}),
    "tp dp": ("sft", 4, 2, {TP: 2} | OVERLAP),
}
WHOLE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("reported")
    (path / "config.json").write_text(json.dumps(DENSE))
    return path


def needs(folder: Path, name: str, micro_batches: int) -> StepNeeds:
    """Return what the first rank needs. Runs in a separate process, which is no rank."""
    from mca_train.dry_run.step import measure_step

    be_no_rank()
    kind, size, _, changes = STEPS[name]
    run = prepared(folder, kind, changes | {"gradient_accumulation_steps": WHOLE}, size)
    return measure_step(run.task, run.settings, run.model, 0, size, micro_batches)


@pytest.mark.qualify
@pytest.mark.parametrize("name", STEPS)
def test_messages_of_a_few_micro_batches_give_those_of_a_step(name: str, folder: Path) -> None:
    few, whole = (
        run_ranks(1, needs, folder, name, count, process_group=False)[0] for count in (STEPS[name][2], WHOLE)
    )
    reported = {(m.operation, m.ranks): (m.count, m.bytes) for m in few.messages_in_step(WHOLE)}
    assert reported == {(m.operation, m.ranks): (m.count, m.bytes) for m in whole.messages}
    assert sum(m.count for m in few.messages) < sum(m.count for m in whole.messages)


def printed(folder: Path) -> list[str]:
    """Return the command's output as an object and as text, both of one dry run."""
    from functools import cache

    from mca_train.cli import main
    from mca_train.run import plan_command

    be_no_rank()
    of_run, found = plan_command._dry_run, []
    once = cache(lambda: of_run(*given[0], ordered=True))
    given: list[Any] = []

    def dry_run(*args: Any, ordered: bool) -> Any:
        given.append(args)
        return once()

    plan_command._dry_run = dry_run
    words = ["plan", "pretrain", str(folder / "run.yaml"), "--gpus", "2", "--device", "h100-80"]
    for more in (["--plot", str(folder / "pictures"), "--json"], ["--dry_run"]):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main([*words, *more]) == 0
        found.append(out.getvalue())
    return found


def test_the_command_runs_draws_and_reports_a_step(folder: Path) -> None:
    keys = {"model_name_or_path": str(folder), "output_dir": str(folder / "out"), "seq_length": 128}
    keys |= {PP: 2, "gradient_accumulation_steps": WHOLE, "bf16": True}
    (folder / "run.yaml").write_text(json.dumps(keys))
    (both,) = run_ranks(1, printed, folder, process_group=False)
    found, text = json.loads(both[0])["dry_run"], both[1]
    assert (found["schema"], found["version"], found["implementation"]) == ("mca-train/dry-run", 1, "local")
    first, last = found["stages"]
    assert [first["micro_batches"], last["micro_batches"]] == [3, 2]
    assert [len(stage["order"]) for stage in (first, last)] == [6, 6]
    assert all(stage["peak"] == max(stage["curve"]) > stage["weights"] > 0 for stage in (first, last))
    sent = next(message for message in first["messages"] if message["operation"] == "send")
    assert (sent["count"], sent["count_of_step"]) == (3, WHOLE)
    assert sent["bytes_of_step"] == WHOLE * 128 * 64 * 2 * 8, "hidden states of 8 samples"
    pictures = {
        f"{n}.{k}"
        for n in ("schedule", "memory", "memory_over_step", "layers", "messages")
        for k in ("svg", "png")
    }
    assert {path.name for path in (folder / "pictures").iterdir()} == pictures
    note = "measured with Megatron's own layers; Transformer Engine's on h100-80 keep less"
    assert note in text and note in (folder / "pictures/memory.svg").read_text()
    assert f"micro-batches: 2 to 3 of {WHOLE}, because more micro-batches need no more memory" in text
    assert f"in a step of {WHOLE} micro-batches, " in text
    assert "Transformer Engine's, on h100-80" in text, "the plan above it is of the device"
