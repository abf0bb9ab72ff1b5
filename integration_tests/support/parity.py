"""The parity matrix: every family on every kind of layout against ``transformers``.

    .venv/bin/python integration_tests/support/parity.py docs/validation/parity.md [CASE ...]

Prints a table of the largest absolute differences of the fp32 logits, and which combinations are refused and why;
fails where a difference is too large or a token is sent to other experts.
"""

import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from harness import run_ranks
from layouts import arguments, world_size
from reference import CASES, FAMILY_CASES, Reference, make_reference
from routing import compare

LAYOUTS = ("tp2sp", "tp2pp2sp", "pp2vpp2", "pp3uneven", "cp2", "tp2cp2sp", "ep2", "tp2ep2etp1sp")
UNEVEN = "Et|tt|tL"
TOLERANCE = 1e-4
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Measured:
    """One model on one layout: the differences, or why it was refused.

    Args:
        difference: Largest absolute difference of the logits.
        refusal: What went wrong, None if nothing did.
    """

    difference: float
    refusal: str | None = None


def is_sparse(case: str) -> bool:
    """Return True if the model of ``case`` has experts."""
    return any(CASES[case][1].get(key) for key in _EXPERTS)


def measure_all(references: list[Reference], layouts: list[str]) -> dict[tuple[str, str], Measured]:
    """All models on all layouts of this number of ranks. Runs on every rank."""
    from mca_config.errors import McaError
    from mca_models.megatron import AutoModel

    found = {}
    for layout in layouts:
        for reference in references:
            if "ep" in layout and not is_sparse(reference.model):
                continue
            more = CASES[reference.model][1].get("num_hidden_layers", 4) // 4
            uneven = {"pipeline_model_parallel_layout": UNEVEN.replace("t", "t" * more)}
            extra = uneven if layout.endswith("uneven") else {}
            try:
                model = AutoModel.from_pretrained(reference.path, arguments(layout, **extra))
            except McaError as error:
                found[reference.model, layout] = Measured(0.0, " ".join(str(error).split()))
                continue
            except Exception as error:  # the same on every rank: go on with the other models
                found[reference.model, layout] = Measured(math.inf, f"{type(error).__name__}: {error}"[:300])
                continue
            compared = compare(model, reference)
            problem = compared.problem()
            found[reference.model, layout] = Measured(math.inf if problem else compared.difference, problem)
    return found


def matrix(cases: Iterable[str], layouts: Iterable[str]) -> dict[tuple[str, str], Measured]:
    """Return the largest differences of ``measure_all`` over all ranks."""
    found: dict[tuple[str, str], Measured] = {}
    by_size: dict[int, list[str]] = {}
    for layout in layouts:
        by_size.setdefault(world_size(layout), []).append(layout)
    with tempfile.TemporaryDirectory() as folder:
        references = [make_reference(case, Path(folder)) for case in cases]
        for size, group in by_size.items():
            for of_rank in run_ranks(size, measure_all, references, group, timeout=1200):
                for key, measured in of_rank.items():
                    if key not in found or measured.difference > found[key].difference:
                        found[key] = measured
    return found


def render(found: dict[tuple[str, str], Measured], cases: Iterable[str], layouts: Iterable[str]) -> str:
    """The table and the refusals as Markdown."""
    layouts = list(layouts)
    lines = [
        "# Parity with transformers",
        "",
        "Printed by `.venv/bin/python integration_tests/support/parity.py docs/validation/parity.md`; do not edit.",
        f"megatron-core {version('megatron-core')}, transformers {version('transformers')}, torch CPU over gloo.",
        "",
        "Each figure is the largest absolute difference of the fp32 logits of a tiny random model (4 layers; 8 where",
        "they come in pairs, two for each `t` below) between the factory on that layout and `transformers` on one",
        f"process; {TOLERANCE:g} is allowed. Where there are",
        "experts, every token is sent to the same ones in every layer; a layout that did not would read **fails**.",
        f"`sp` is sequence parallelism, `pp3uneven` the pipeline `{UNEVEN}`; `-` means that the model has no experts.",
        "",
        "| case | " + " | ".join(layouts) + " |",
        "|---|" + "---|" * len(layouts),
    ]
    refusals: dict[str, list[str]] = {}
    for case in cases:
        cells = []
        for layout in layouts:
            measured = found.get((case, layout))
            if measured and measured.refusal:
                refusals.setdefault(measured.refusal, []).append(f"`{case}` on `{layout}`")
            cells.append(_cell(measured, list(refusals)))
        lines.append(f"| `{case}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "The gradient of every tensor is compared too, to 1e-4 of its largest, on twelve layouts of dense models and",
        "twenty-one of those with experts (`test_gradient_parity.py`; families with layers of their",
        "own: `test_families.py`): a choice of the pairs by default, all with `--cases all`.",
        "",
        "## Refused",
        "",
    ]
    lines += [f"{n}. {', '.join(where)}: {why}" for n, (why, where) in enumerate(refusals.items(), 1)]
    if not refusals:
        lines.append("None of these combinations.")
    return "\n".join(lines) + "\n"


def _cell(measured: Measured | None, refusals: list[str]) -> str:
    if measured is None:
        return "-"
    if measured.refusal:
        word = "refused" if measured.difference == 0 else "**fails**"
        return f"{word} ({refusals.index(measured.refusal) + 1})"
    text = f"{measured.difference:.1e}"
    return text if measured.difference <= TOLERANCE else f"**{text}**"


def main() -> int:
    """Writes the file that is named, or prints; of the cases named after it, or all. 1 if a difference is too large."""
    cases = sys.argv[2:] or list(FAMILY_CASES)
    if unknown := [case for case in cases if case not in CASES]:
        sys.stderr.write(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}\n")
        return 2
    found = matrix(cases, LAYOUTS)
    text = render(found, cases, LAYOUTS)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        sys.stdout.write(text)
    return int(any(measured.difference > TOLERANCE for measured in found.values()))


if __name__ == "__main__":
    sys.exit(main())
