"""Which passes Megatron's schedule runs, in its order.

The schedule does not look at what passes compute, so with stand-ins for them it runs the same ones, at once.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from mca_train.batching.micro_batch import StepBatch
from mca_train.dry_run.tracker import Tracker
from mca_train.plan.schedule import Pass

if TYPE_CHECKING:
    from mca_train.engine.engine import Engine

_OF_PARAMETERS = ("finalize_model_grads_func", "grad_sync_func", "param_sync_func")
"""Of Megatron's configuration: what a schedule calls for gradients that stand-ins do not make."""


class Passes:
    """Follows the forward and backward passes of a step; a backward pass is known by the output that it begins with."""

    def __init__(self, tracker: Tracker) -> None:
        self.ran: list[Pass] = []
        self._numbers: list[int] = []
        self._tracker = tracker
        self._of_output: dict[int, tuple[int, int]] = {}
        self._begun: dict[int, int] = {}

    def forget(self) -> None:
        """Begins anew."""
        self.ran.clear()
        self._numbers.clear()
        self._begun.clear()
        self._of_output.clear()

    def of_a_micro_batch(self) -> list[int]:
        """The tracker's numbers of one forward and one backward pass of each chunk, of micro-batches in the middle.

        With the first forward passes weights are gathered, and with the last backward passes gradients are summed.
        """
        both = list(zip(self.ran, self._numbers, strict=True))
        forward = {step.chunk: number for step, number in both if step.forward}
        backward = {step.chunk: number for step, number in reversed(both) if not step.forward}
        return [*forward.values(), *backward.values()]

    def _begin(self, step: Pass) -> None:
        self._tracker.next_pass()
        self.ran.append(step)
        self._numbers.append(self._tracker.number)

    @contextmanager
    def followed(self, *, stand_in: bool = False) -> Iterator[None]:
        """A block in which the tracker is told of each pass; with ``stand_in`` nothing is computed in them."""
        from megatron.core.pipeline_parallel import schedules

        forward, backward = schedules.forward_step, schedules.backward_step
        if stand_in:
            forward, backward = _no_forward, _no_backward

        def forward_told(*args: Any, **kwargs: Any) -> Any:
            chunk = kwargs.get("vp_stage") or 0
            number = self._begun[chunk] = self._begun.get(chunk, -1) + 1
            self._begin(Pass(True, chunk, number))
            result = forward(*args, **kwargs)
            self._of_output[_identity(result[0])] = chunk, number
            return result

        def backward_told(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin(Pass(False, *self._of_output.pop(_identity(output_tensor))))
            return backward(input_tensor, output_tensor, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(patch.object(schedules, "forward_step", forward_told))
            stack.enter_context(patch.object(schedules, "backward_step", backward_told))
            yield


def _identity(output: Any) -> int:
    """Of the tensor that a chunk gives, which some schedules hold in a list."""
    return id(output[0] if isinstance(output, list) else output)


def _no_forward(*args: Any, **_: Any) -> tuple[Any, torch.Tensor]:
    """What ``forward_step`` gives: a list of outputs if it took one of inputs, and how many tokens there were."""
    out, given = torch.empty(1), args[4]
    return [out] if isinstance(given, list) else out, torch.zeros((), dtype=torch.int)


def _no_backward(given: Any, *_: Any) -> Any:
    return [_gradient(one) for one in given] if isinstance(given, list) else _gradient(given)


def _gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor)


def order_of(engine: "Engine", batch: StepBatch, micro_batches: int, tracker: Tracker) -> tuple[Pass, ...]:
    """The passes of this rank in a step of ``micro_batches``; collective.

    Args:
        engine: Of the run.
        batch: A step's, of any number of micro-batches.
        micro_batches: How many are run.
        tracker: Stands by.
    """
    passes = Passes(tracker)
    like = replace(batch, micro_batches=batch.micro_batches[:1] * micro_batches)
    with ExitStack() as stack:
        for config in engine.configs:
            for name in _OF_PARAMETERS:
                stack.enter_context(patch.object(config, name, None))
        stack.enter_context(passes.followed(stand_in=True))
        engine.run(like, forward_only=False)
    return tuple(passes.ran)
