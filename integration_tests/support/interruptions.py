"""Callbacks that end a run in the middle, as a signal or a kill does."""

import os
import signal
from typing import Any


class Killed(Exception):
    """Ends a run as a kill does: what is on disk stays."""


def interruption(step: int, how: str) -> Any:
    """A callback that sends SIGTERM in the middle of ``step``, or kills when the step after it begins."""
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if how == "SIGTERM" and state.global_step + 1 == step and int(os.environ["RANK"]) == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if how == "kill" and state.global_step == step:
                raise Killed

    return Interrupt()


def stop_at(step: int, rank: int) -> Any:
    """A callback that sends SIGTERM to the process of ``rank`` in the middle of ``step``."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == step and int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stop()
