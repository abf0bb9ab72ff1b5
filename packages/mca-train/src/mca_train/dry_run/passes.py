"""Order of the passes in Megatron's pipeline schedule.

The schedule does not depend on the results of passes, so it runs in the same order without their computation.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mca_models.megatron.platform import replaced
from mca_train.batching.micro_batch import StepBatch
from mca_train.dry_run.tracker import Tracker
from mca_train.plan.schedule import Pass

if TYPE_CHECKING:
    from mca_train.engine.engine import Engine

_PARAMETER_HOOKS = ("finalize_model_grads_func", "grad_sync_func", "param_sync_func")
"""Callbacks in Megatron's configuration that need gradients, which skipped passes do not produce."""


class PassTracer:
    """Tracer of the forward and backward passes of a step; a backward pass is matched by its output tensor."""

    def __init__(self, tracker: Tracker) -> None:
        self.ran: list[Pass] = []
        self._numbers: list[int] = []
        self._tracker = tracker
        self._pass_by_output: dict[int, tuple[int, int]] = {}
        self._num_forward: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all passes."""
        self.ran.clear()
        self._numbers.clear()
        self._num_forward.clear()
        self._pass_by_output.clear()

    def micro_batch_passes(self) -> list[int]:
        """Return the numbers of one forward and one backward pass per chunk, from micro-batches in the middle.

        The first forward passes also all-gather weights, and the last backward passes also reduce gradients.
        """
        both = list(zip(self.ran, self._numbers, strict=True))
        forward = {step.chunk: number for step, number in both if step.forward}
        backward = {step.chunk: number for step, number in reversed(both) if not step.forward}
        return [*forward.values(), *backward.values()]

    def _start_pass(self, step: Pass) -> None:
        self._tracker.next_pass()
        self.ran.append(step)
        self._numbers.append(self._tracker.number)

    @contextmanager
    def trace(self, *, skip_compute: bool = False) -> Iterator[None]:
        """Context in which the tracker is notified of each pass; with ``skip_compute`` passes compute nothing."""
        from megatron.core.pipeline_parallel import schedules

        forward, backward = schedules.forward_step, schedules.backward_step
        if skip_compute:
            forward, backward = _no_forward, _no_backward

        def traced_forward(*args: Any, **kwargs: Any) -> Any:
            chunk = kwargs.get("vp_stage") or 0
            number = self._num_forward[chunk] = self._num_forward.get(chunk, -1) + 1
            self._start_pass(Pass(True, chunk, number))
            result = forward(*args, **kwargs)
            self._pass_by_output[_identity(result[0])] = chunk, number
            return result

        def traced_backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._start_pass(Pass(False, *self._pass_by_output.pop(_identity(output_tensor))))
            return backward(input_tensor, output_tensor, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(replaced(schedules, "forward_step", traced_forward))
            stack.enter_context(replaced(schedules, "backward_step", traced_backward))
            yield


def _identity(output: Any) -> int:
    """Return the id of a chunk's output tensor, which some schedules wrap in a list."""
    return id(output[0] if isinstance(output, list) else output)


def _no_forward(*args: Any, **_: Any) -> tuple[Any, torch.Tensor]:
    """Return empty outputs in the form of ``forward_step``: outputs, as a list if inputs are, and a token count."""
    out, inputs = torch.empty(1), args[4]
    return [out] if isinstance(inputs, list) else out, torch.zeros((), dtype=torch.int)


def _no_backward(inputs: Any, *_: Any) -> Any:
    return [_gradient(one) for one in inputs] if isinstance(inputs, list) else _gradient(inputs)


def _gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor)


def schedule_order(
    engine: "Engine", batch: StepBatch, micro_batches: int, tracker: Tracker
) -> tuple[Pass, ...]:
    """Return the passes of this rank in a step of ``micro_batches``; collective.

    Args:
        engine: Engine of the run.
        batch: Batch of a step, of any number of micro-batches.
        micro_batches: Number of micro-batches to schedule.
        tracker: Tracker of the dry run.
    """
    passes = PassTracer(tracker)
    like = replace(batch, micro_batches=batch.micro_batches[:1] * micro_batches)
    with ExitStack() as stack:
        for config in engine.configs:
            for name in _PARAMETER_HOOKS:
                stack.enter_context(replaced(config, name, None))
        stack.enter_context(passes.trace(skip_compute=True))
        engine.run(like, forward_only=False)
    return tuple(passes.ran)
