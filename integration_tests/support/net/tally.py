"""Outcomes of many cases, and the options that were trained."""

import collections
from collections.abc import Iterable
from typing import Any

from net.run import Verdict

_EACH_ITS_OWN = ("vocab_size", "layer_types", "mlp_layer_types")
"""Values that say little."""


def summary(found: Iterable[Verdict]) -> str:
    """Return the number of each outcome, and the errors by their text."""
    found = list(found)
    words: Any = collections.Counter()
    for verdict in found:
        if verdict.refused:
            words[_without_numbers(verdict.refused)] += 1
    counts = {
        "right": sum(not (v.refused or v.unknown or v.wrong) for v in found),
        "refused": sum(bool(v.refused) for v in found),
        "unknown": sum(bool(v.unknown) for v in found),
        "WRONG": sum(bool(v.wrong) for v in found),
    }
    lines = [", ".join(f"{count} {what}" for what, count in counts.items())]
    return "\n".join([*lines, *(f"{count:5d} {text}" for text, count in words.most_common())])


def _without_numbers(text: str) -> str:
    return " ".join("N" if any(map(str.isdigit, word)) else word for word in text.split())[:160]


def coverage(found: Iterable[Verdict]) -> str:
    """A line for each option with how often each of its values was trained."""
    values: dict[str, Any] = collections.defaultdict(collections.Counter)
    for verdict in found:
        if not verdict.figures:
            continue
        case = verdict.case
        reported = {"family": case.base, "ranks": case.ranks, "MTP layers": case.prediction}
        for name, value in (case.lora or {}).items():
            each = value if isinstance(value, list) else [value]
            values[f"lora {name}"].update(map(str, each))
        reported |= {
            f"model {name}": value for name, value in case.changes.items() if name not in _EACH_ITS_OWN
        }
        for name, value in {**reported, "lora": case.lora is not None, **case.options}.items():
            values[name][str(value)] += 1
    return "\n".join(
        f"{name}: {', '.join(f'{value} ({count})' for value, count in sorted(counts.items()))}"
        for name, counts in sorted(values.items())
    )
