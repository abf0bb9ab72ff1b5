"""Errors for runs that LLaMA-Factory would train with another trainer although ``USE_MCA`` is set."""

import sys
from collections.abc import Callable
from typing import Never

from mca_config.errors import UsageError

_TUNER = "llamafactory.train.tuner"
_REMEDIES = {"rm": "mca-train reward", "ppo": "verl with mca", "kto": "mca-train kto"}


def reject_other_trainers() -> None:
    """Replace the programs that LLaMA-Factory would call instead of ``mcore_adapter`` by errors.

    Its tuner calls ``run_rm``, ``run_ppo`` and ``run_kto`` with the training arguments of this package, whose layout
    Hugging Face's trainer ignores. With ``use_hyper_parallel`` it does not read ``use_mca``, and only then it calls
    ``is_hyper_parallel_available``.
    """
    if (tuner := sys.modules.get(_TUNER)) is None:
        return
    for stage, remedy in _REMEDIES.items():
        problem = (
            f"stage: {stage} is not supported with USE_MCA: LLaMA-Factory passes only pt, sft and dpo to mca; use "
            f"{remedy}, or unset USE_MCA to train with Hugging Face's trainer"
        )
        setattr(tuner, f"run_{stage}", _rejection(problem))
    problem = (
        "use_hyper_parallel: true is not supported with USE_MCA: LLaMA-Factory would train with HyperParallel and "
        "ignore mca; remove it, or unset USE_MCA"
    )
    tuner.__dict__["is_hyper_parallel_available"] = _rejection(problem)


def _rejection(problem: str) -> Callable[..., Never]:
    def reject(*_arguments: object) -> Never:
        raise UsageError(problem)

    return reject
