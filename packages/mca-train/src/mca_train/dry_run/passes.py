"""Which passes Megatron's schedule runs, in its order."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from mca_train.dry_run.tracker import Tracker
from mca_train.plan.schedule import Pass


class Passes:
    """Follows the forward and backward passes of a step; a backward pass is known by the output that it begins with."""

    def __init__(self, tracker: Tracker) -> None:
        self.ran: list[Pass] = []
        self._tracker = tracker
        self._of_output: dict[int, tuple[int, int]] = {}
        self._begun: dict[int, int] = {}

    def forget(self) -> None:
        """Begins anew."""
        self.ran.clear()
        self._begun.clear()
        self._of_output.clear()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """A block in which the tracker is told of each pass."""
        from megatron.core.pipeline_parallel import schedules

        forward, backward = schedules.forward_step, schedules.backward_step

        def forward_told(*args: Any, **kwargs: Any) -> Any:
            self._tracker.next_pass()
            chunk = kwargs.get("vp_stage") or 0
            number = self._begun[chunk] = self._begun.get(chunk, -1) + 1
            self.ran.append(Pass(True, chunk, number))
            result = forward(*args, **kwargs)
            self._of_output[_identity(result[0])] = chunk, number
            return result

        def backward_told(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._tracker.next_pass()
            self.ran.append(Pass(False, *self._of_output.pop(_identity(output_tensor))))
            return backward(input_tensor, output_tensor, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(patch.object(schedules, "forward_step", forward_told))
            stack.enter_context(patch.object(schedules, "backward_step", backward_told))
            yield


def _identity(output: Any) -> int:
    """Of the tensor that a chunk gives, which some schedules hold in a list."""
    return id(output[0] if isinstance(output, list) else output)
