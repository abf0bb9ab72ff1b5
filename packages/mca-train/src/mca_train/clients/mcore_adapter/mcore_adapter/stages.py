"""Errors for the stages that LLaMA-Factory would train on Hugging Face's trainer although ``USE_MCA`` is set."""

import sys
from collections.abc import Callable
from typing import Never

from mca_config.errors import UsageError

_TUNER = "llamafactory.train.tuner"
_REMEDIES = {"rm": "mca-train reward", "ppo": "verl with mca", "kto": "mca-train kto"}


def reject_other_stages() -> None:
    """Replace the programs of the stages that LLaMA-Factory does not pass to ``mcore_adapter`` by an error.

    Its tuner calls ``run_rm``, ``run_ppo`` and ``run_kto`` with the training arguments of this package, whose layout
    Hugging Face's trainer ignores.
    """
    if (tuner := sys.modules.get(_TUNER)) is not None:
        for stage, remedy in _REMEDIES.items():
            setattr(tuner, f"run_{stage}", _rejection(stage, remedy))


def _rejection(stage: str, remedy: str) -> Callable[..., Never]:
    def reject(*_arguments: object) -> Never:
        raise UsageError(
            f"stage: {stage} is not supported with USE_MCA: LLaMA-Factory passes only pt, sft and dpo to mca; use "
            f"{remedy}, or unset USE_MCA to train with Hugging Face's trainer"
        )

    return reject
