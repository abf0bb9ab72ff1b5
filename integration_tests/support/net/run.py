"""Runs cases: refused before any rank starts, on ranks, or compared; several of one size in one set of processes."""

import collections
import importlib
import math
import os
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiny_versions import lacking

from harness import RanksFailed, prepare_parent, run_ranks
from mca_config.errors import McaError
from net.admission import NoSuchModel, require_layable
from net.case import Case
from net.compare import differences, largest
from net.ours import Ours, run_cases
from net.truth import Truth, make

TOGETHER, AHEAD = 12, 60
"""Cases for one set of processes at most, and of all sizes for which the truth is made first."""
AT_ONCE, IN_EACH = 3, 12
"""Processes that make truths, and truths for which another one is worth its start."""
FOR_RANKS = (
    "mca_train.trainer.trainer",
    "mca_models.megatron.peft",
    "megatron.core.models.gpt.gpt_model",
    "peft",
)
"""Imported once, in the process that forks them."""


@dataclass
class Verdict:
    """Outcome of a case.

    Args:
        refused: The product's line against it.
        unknown: Why there is nothing to compare with: transformers cannot make or run the model.
        wrong: What differs, or a traceback.
        figures: The largest relative differences.
    """

    case: Case
    refused: str | None = None
    unknown: str | None = None
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.refused:
            return f"refused {self.case.number}: {self.refused}"
        if self.unknown:
            return f"unknown {self.case.number}: {self.unknown}"
        if self.wrong:
            return "\n    ".join([f"WRONG {self.case.repeat()}", *self.wrong])
        return f"right {self.case.number}: {' '.join(f'{k} {v:.0e}' for k, v in self.figures.items())}"


def verdicts(cases: Iterable[Case]) -> Iterator[Verdict]:
    """Return the verdicts of all cases, a few at a time."""
    prepare_parent()
    for module in FOR_RANKS:
        importlib.import_module(module)
    waiting: list[Case] = []
    for case in cases:
        if refusal := _refused_at_once(case):
            yield refusal
            continue
        waiting.append(case)
        if len(waiting) == AHEAD:
            yield from _together(waiting)
            waiting = []
    yield from _together(waiting)


def _refused_at_once(case: Case) -> Verdict | None:
    """Return the errors of arguments and layout before a rank is started."""
    try:
        require_layable(case)
    except McaError as error:
        return Verdict(case, refused=" ".join(str(error).split()))
    except NoSuchModel as error:
        return Verdict(case, unknown=str(error))
    except Exception:
        return Verdict(case, wrong=[traceback.format_exc()])
    return None


def _together(cases: list[Case]) -> Iterator[Verdict]:
    with tempfile.TemporaryDirectory(prefix="mca-net-") as name:
        folder = Path(name)
        ready: dict[int, list[tuple[Case, Truth]]] = collections.defaultdict(list)
        made = _truths(cases, folder)
        for case, truth in zip(cases, made, strict=True):
            if isinstance(truth, Truth):
                ready[case.ranks].append((case, truth))
            else:
                yield Verdict(case, unknown=truth)
        for size, pairs in ready.items():
            for start in range(0, len(pairs), TOGETHER):
                yield from _compared(size, pairs[start : start + TOGETHER], folder)


def _truths(cases: list[Case], folder: Path) -> list[Truth | str]:
    if not cases:
        return []
    size = min(AT_ONCE, math.ceil(len(cases) / IN_EACH))
    of_each = run_ranks(size, _make_some, cases, folder, timeout=120 + 15 * len(cases), process_group=False)
    return [of_each[index % size][index // size] for index in range(len(cases))]


def _make_some(cases: list[Case], folder: Path) -> list[Truth | str]:
    """Every so many of ``cases``, from this process's own first."""
    import logging

    logging.disable(logging.WARNING)
    found: list[Truth | str] = []
    for case in cases[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        if (reason := lacking(case.base, case.changes)) is not None:
            found.append(reason)
            continue
        try:
            found.append(make(case, folder / case.name))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.append(
                f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            )
    return found


def _compared(size: int, pairs: list[tuple[Case, Truth]], folder: Path) -> Iterator[Verdict]:
    jobs = [(case, truth.path, truth.adapter, folder / case.name) for case, truth in pairs]
    try:
        by_rank = run_ranks(size, run_cases, jobs, timeout=120 + 8 * size * len(jobs))
    except RanksFailed as error:
        if len(pairs) == 1:
            yield Verdict(pairs[0][0], wrong=[str(error)])
            return
        for pair in pairs:  # one by one: which is it?
            yield from _compared(size, [pair], folder / "alone")
        return
    for (case, truth), ours in zip(pairs, zip(*by_rank, strict=True), strict=True):
        yield _judged(case, truth, list(ours), folder / case.name)


def _judged(case: Case, truth: Truth, ours: list[Ours], folder: Path) -> Verdict:
    refusals = [each.refusal for each in ours if each.refusal]
    if refusals:
        all_alike = len(refusals) == len(ours)
        return Verdict(case, refused=refusals[0], wrong=[] if all_alike else ["not refused on every rank"])
    return Verdict(case, wrong=differences(case, truth, ours, folder), figures=largest(truth, ours, folder))
