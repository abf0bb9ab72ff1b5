"""`LearningRate`: Hugging Face's learning rate schedules for Megatron's parameter groups."""

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from mca_config.errors import McaError
from mca_config.printable import counted
from mca_config.types import JsonObject, Values
from mca_train.config.early_arguments import (
    SCHEDULE_ERRORS,
    check_rates,
    check_schedule_settings,
    checked_steps,
    metric_schedule,
    schedule_problem,
)

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

ParamGroup = dict[str, Any]
"""One of an optimizer's parameter groups, with parameters and hyperparameters of torch and Megatron."""


def followed_metric(name: str | None, greater_is_better: bool | None) -> str | None:
    """Return a description of ``metric_for_best_model`` and its direction; None if it is not set."""
    if name is None:
        return None
    return f"eval_{name.removeprefix('eval_')} ({'greater' if greater_is_better else 'smaller'} is better)"


class LearningRate:
    """A Hugging Face scheduler over a separate optimizer, whose rate is written into Megatron's groups.

    HF's schedulers need a ``torch.optim.Optimizer``. Megatron's optimizer is not one, and its groups have rates and
    decays (``max_lr``, ``wd_mult``) relative to the run's.

    Args:
        args: The training arguments.
        num_steps: Optimizer steps of the run.
    """

    def __init__(self, args: "TrainingArguments", num_steps: int) -> None:
        from transformers.optimization import get_scheduler

        self._base = self._given = float(args.learning_rate)
        self._least = self._least_given = float(args.min_lr or 0.0)
        self._decay = float(args.weight_decay)
        self._warmup = int(args.get_warmup_steps(num_steps))
        carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=self._base)
        self.scheduler: LRScheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer=carrier,
            num_warmup_steps=self._warmup,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        carrier.step()  # a scheduler that steps before its optimizer warns
        self._carrier = carrier
        self._metric = followed_metric(args.metric_for_best_model, args.greater_is_better)
        self._by_metric = str(args.lr_scheduler_type.value) in ("reduce_lr_on_plateau", "greedy")

    @property
    def value(self) -> float:
        """The rate of the next step."""
        return self._between(self._base, self._least)

    def _between(self, highest: float, least: float) -> float:
        """Return the next step's rate for parameters with maximum ``highest`` and final rate ``least``."""
        rate = float(self._carrier.param_groups[0]["lr"])
        share = rate / self._base if self._base else 0.0
        if least and (self._by_metric or self.scheduler.last_epoch >= self._warmup):
            return least + (highest - least) * share
        return rate if highest == self._base else highest * share

    def check(self, num_steps: int) -> None:
        """Compute the rates of a run in advance; a schedule that follows a metric has none.

        Raises:
            ValueError: A rate is not finite; transformers raises other errors.
        """
        if not self._by_metric:
            function = cast("LambdaLR", self.scheduler).lr_lambdas[0]
            check_rates(function, self._base, self._warmup, num_steps)

    def write(self, groups: Sequence[ParamGroup]) -> None:
        """Set the rate of every one of Megatron's parameter groups."""
        for group in groups:
            highest, least = group.get("max_lr"), group.get("min_lr")
            rate = self._between(
                self._base if highest in (None, self._given) else highest,
                self._least if least in (None, self._least_given) else least,
            )
            group["lr"] = rate * group.get("lr_mult", 1.0)

    def write_decay(self, groups: Sequence[ParamGroup]) -> None:
        """Set the decay of every group; callbacks may change it later."""
        for group in groups:
            group["weight_decay"] = self._decay * group.get("wd_mult", 1.0)

    def step(self) -> None:
        """Advance after an optimizer step; a schedule that follows a metric advances at evaluations instead."""
        if not self._by_metric:
            self.scheduler.step()

    def move(self, steps: int) -> None:
        """Move the schedule by ``steps``, also negative; a schedule that follows a metric is unchanged."""
        if steps == 0 or self._by_metric:
            return
        self.scheduler.last_epoch = max(self.scheduler.last_epoch + steps, 0)
        self._compute()

    def _compute(self) -> None:
        """Set the next step's rate to the schedule's value at its current step."""
        rate = self._base * cast("LambdaLR", self.scheduler).lr_lambdas[0](self.scheduler.last_epoch)
        self._carrier.param_groups[0]["lr"] = rate
        self.scheduler._last_lr = [rate]

    def state_dict(self) -> JsonObject:
        """Return the scheduler's state, the next step's rate, and the metric that the schedule may follow."""
        state = {"mca_rate": self._carrier.param_groups[0]["lr"], "mca_metric": self._metric}
        state |= {"mca_base": self._base, "mca_least": self._least}
        return dict(self.scheduler.state_dict()) | state

    def load_state_dict(self, state: Values, steps: int) -> None:
        """Restore the step of the schedule, with the rates of this run's arguments.

        A schedule that follows a metric restores its rate instead, and its knowledge of the metric only if the metric
        is the same.

        Args:
            state: State of a schedule of this or another type.
            steps: The step, if ``state`` is of a schedule that follows a metric.
        """
        rest = dict(state)
        rate, metric = rest.pop("mca_rate"), rest.pop("mca_metric", self._metric)
        base, least = rest.pop("mca_base", self._base), rest.pop("mca_least", self._least)
        counts_steps = "lr_lambdas" in rest
        if self._by_metric:
            self._carrier.param_groups[0]["lr"] = rate
            self._base, self._least = (
                base,
                least,
            )  # the rate, and those of other groups, are relative to these
            if not counts_steps and metric == self._metric:
                self.scheduler.load_state_dict(rest)
            return
        self.scheduler.last_epoch = rest["last_epoch"] if counts_steps else steps
        self._compute()


def run_rate(training: "TrainingArguments", steps: int) -> LearningRate:
    """Return the learning rate of a run, whose length may not have been known when the arguments were checked.

    Raises:
        McaError: The schedule cannot be computed for a run of ``steps``.
    """
    try:
        rate = LearningRate(training, steps)
        if steps > 0:
            rate.check(steps)
    except SCHEDULE_ERRORS as error:
        kind, settings = training.lr_scheduler_type.value, training.lr_scheduler_kwargs or {}
        warmup = (
            f"the run has {counted(steps, 'step')}, {training.get_warmup_steps(steps)} of them of warm-up"
        )
        raise McaError(f"{schedule_problem(kind, settings, error)} ({warmup})") from error
    return rate


def schedule_problems(training: "TrainingArguments") -> Iterator[str]:
    """Build the schedule as a check, because Hugging Face raises many errors about ``lr_scheduler_kwargs``."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    settings, steps = training.lr_scheduler_kwargs or {}, checked_steps(training)
    schedule = training.lr_scheduler_type.value
    function = TYPE_TO_SCHEDULER_FUNCTION[training.lr_scheduler_type]
    try:
        check_schedule_settings(metric_schedule(training.lr_scheduler_type.name) or function, settings)
        with warnings.catch_warnings(action="ignore"):
            rate = LearningRate(training, steps)
        rate.check(steps)
    except SCHEDULE_ERRORS as error:
        yield schedule_problem(schedule, settings, error)
