"""Model types that a release of transformers cannot be the reference of: the one place that says so."""

import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest

_NORM = "5.23", "takes the norm of all groups of state space heads at once"
NEEDED = {
    "minicpm3": ("5.23", "takes no longrope, whose parameters have no factor"),
    "longcat_flash": ("5.18", "does not know moe_intermediate_size"),
    "iquestcoder": ("5.23", "has no such model"),
    "internlm3": ("5.23", "has no such model"),
    "bailing_hybrid": ("5.23", "has no such model"),
    "bailing_hybrid-compressed": ("5.24", "does not know q_lora_rank"),
    **dict.fromkeys(("exaone", "sarvam_moe", "sarvam_mla"), ("5.24", "has no such model")),
    "flint": ("5.21", "has no such model"),
    "minimax_m2": ("5.18", "does not read rotary_dim"),
    "minimax_m3_vl": ("5.22", "saves MLPs under the name of experts"),
    "bamba": _NORM,
}
"""By model type: since which release, and what is wrong before."""
OF_GROUPS = ("granitemoehybrid", _NORM)
"""A model type that is wrong where ``mamba_n_groups`` is over 1."""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


@cache
def installed() -> str:
    """Return the version of the installed transformers, of which reading takes 3 ms."""
    return version("transformers")


def before(release: str) -> bool:
    """Return True if the installed transformers is older."""
    return _numbers(installed()) < _numbers(release)


@cache
def _kinds(case: str) -> list[str]:
    """Return the model types in `NEEDED` with which the name of ``case`` starts."""
    return [kind for kind in NEEDED if _is_of(case, kind)]


def _is_of(case: str, kind: str) -> bool:
    return re.match(rf"(images )?{kind}(?![a-z0-9_])", case) is not None


def lacking(case: str, changes: Mapping[str, Any] | None = None) -> str | None:
    """Return the reason why the model of ``case``, whose name starts with its type, is not available; None: it is.

    Args:
        case: Its name.
        changes: What differs in ``config.json``.
    """
    groups = (changes or {}).get("mamba_n_groups", 1) > 1
    needed = {kind: NEEDED[kind] for kind in _kinds(case)}
    if groups and _is_of(case, OF_GROUPS[0]):
        needed[OF_GROUPS[0]] = OF_GROUPS[1]
    for kind, (release, wrong) in needed.items():
        if before(release):
            return f"{kind}: transformers {installed()} {wrong}; {release} is needed"
    return None


def require(case: str, changes: Mapping[str, Any] | None = None) -> None:
    """Skips the test where the model of ``case`` is not to be had."""
    if (reason := lacking(case, changes)) is not None:
        pytest.skip(reason)


def available(cases: Iterable[str]) -> list[str]:
    """Return the available ones of ``cases``, for a test of many; warn about the others."""
    reasons = {case: lacking(case) for case in cases}
    for reason in filter(None, reasons.values()):
        warnings.warn(reason, stacklevel=2)
    return [case for case, reason in reasons.items() if reason is None]


def skip(items: Iterable[pytest.Item]) -> None:
    """Skip each test with a parameter whose name is, or starts with, that of a model that is not to be had."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for reason in filter(None, (lacking(str(value)) for value in values)):
            item.add_marker(pytest.mark.skip(reason=reason))
