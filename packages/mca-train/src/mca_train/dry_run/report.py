"""Text and JSON reports of a dry run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_train.dry_run.step import StepNeeds
from mca_train.dry_run.tracker import Message
from mca_train.plan.chunks import Implementation
from mca_train.plan.memory import GIB

_COLUMNS = ("weights", "gradients", "optimizer", "reference", "activations", "temporaries", "peak")
_SHOWN = 12
SCHEMA, VERSION = "mca-train/dry-run", 1


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a dry run.

    Args:
        stages: Needs of one rank per pipeline stage.
        accumulated: Micro-batches per step of the run.
        implementation: Implementation of the layers that ran.
        note: How the layers differ from those on the planned device; None: they do not differ.
    """

    stages: Sequence[StepNeeds]
    accumulated: int
    implementation: Implementation
    note: str | None = None

    @property
    def fullest(self) -> StepNeeds:
        """Stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)


def render_dry_run(dry_run: DryRun) -> str:
    """Render the needs of each stage, and the messages of the stage with the highest peak."""
    stages, accumulated, fullest = dry_run.stages, dry_run.accumulated, dry_run.fullest
    ran = [stage.micro_batches for stage in stages]
    count = f"{min(ran)} to {max(ran)}" if len(set(ran)) > 1 else str(ran[0])
    more = (
        ""
        if set(ran) == {accumulated}
        else f" of {accumulated}, because more micro-batches need no more memory"
    )
    columns = [name for name in _COLUMNS if name != "reference" or any(s.reference for s in stages)]
    lines = [
        f"dry run      one step by the run's own engine on fake tensors; micro-batches: {count}{more}",
        *([f"             {dry_run.note}"] if dry_run.note else []),
        "",
        f"{'stage':>5}{'rank':>7}" + "".join(f"{name:>13}" for name in columns) + "   at the peak",
    ]
    for stage in stages:
        cells = "".join(f"{getattr(stage, name) / GIB:>13.3f}" for name in columns)
        lines.append(f"{stage.stage:>5}{stage.rank:>7}{cells}   {_peak_location(stage)}")
    lines += [
        "",
        "GiB at the peak of a rank of each stage; kernels, allocators and communication buffers come on top",
        f"computed     {_flops(stages, accumulated) / 1e12:,.3g} TFLOP a step by these ranks",
        f"messages     of rank {fullest.rank}, stage {fullest.stage}, in {describe_step(fullest, accumulated)}:",
    ]
    messages = sorted(fullest.messages_in_step(accumulated), key=lambda message: -message.bytes)
    lines += [f"  {_format_message(message)}" for message in messages[:_SHOWN] if message.bytes]
    return "\n".join(lines) + "\n"


def describe_step(stage: StepNeeds, accumulated: int) -> str:
    """Return the number of micro-batches in a step, and how many of them ran."""
    ran = "" if stage.micro_batches == accumulated else f", {stage.micro_batches} of which were run"
    return f"a step of {accumulated} micro-batch{'es' * (accumulated != 1)}{ran}"


def _flops(stages: Sequence[StepNeeds], accumulated: int) -> float:
    return sum(stage.flops / stage.micro_batches * accumulated for stage in stages)


def _peak_location(stage: StepNeeds) -> str:
    module = stage.module or "loss and schedule"
    return f"{'backward of ' if stage.backward else ''}{module} ({stage.operation})"


def _format_message(message: Message) -> str:
    ranks = message.ranks
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    over = f"{counted(len(ranks), 'rank')} ({shown})"
    return f"{message.operation:<34}{message.count:>8} times{message.bytes / GIB:>12.3f} GiB   over {over}"


def dry_run_document(dry_run: DryRun) -> JsonObject:
    """Return the dry run as a JSON object of schema ``mca-train/dry-run``, version 1; sizes in bytes."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "implementation": dry_run.implementation,
        "stages": [
            asdict(stage) | {"messages": _messages(stage, dry_run.accumulated)} for stage in dry_run.stages
        ],
    }


def _messages(stage: StepNeeds, accumulated: int) -> list[JsonObject]:
    both = zip(stage.messages, stage.messages_in_step(accumulated), strict=True)
    return [
        {
            "operation": ran.operation,
            "ranks": ran.ranks,
            "count": ran.count,
            "bytes": ran.bytes,
            "count_of_step": whole.count,
            "bytes_of_step": whole.bytes,
        }
        for ran, whole in both
    ]
