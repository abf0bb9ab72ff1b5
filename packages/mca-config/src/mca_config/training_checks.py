"""Checks and defaults of Hugging Face's and Megatron's arguments together, without torch and transformers.

`training` combines them with Hugging Face's class. ``mca-train`` combines them with the fields alone, to report wrong
keys before it imports transformers.
"""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from mca_config import _hf_arguments
from mca_config.arguments import MegatronArguments
from mca_config.errors import McaError
from mca_config.types import HfArguments, Typed

GREATER_IS_BETTER: Mapping[str, bool] = {
    "loss": False,
    "runtime": False,
    "samples_per_second": True,
    "steps_per_second": True,
    "rewards/chosen": True,
    "rewards/rejected": False,
    "rewards/accuracies": True,
    "rewards/margins": True,
    "logps/chosen": True,
    "logps/rejected": False,
    "kl": False,
    "accuracy": True,
    "mean_absolute_error": False,
    "margin": True,
    "mean_reward": True,
    "min_reward": True,
    "max_reward": True,
}
"""Direction by name of the metric, without ``eval_`` and the name of a dataset."""
_logger = logging.getLogger(__name__)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def choose_direction(args: HfArguments) -> None:
    """Set ``greater_is_better`` for ``metric_for_best_model`` if it is a metric of mca and the user set no value."""
    if args.metric_for_best_model is None or args.greater_is_better is not None:
        return
    name = args.metric_for_best_model.removeprefix("eval_")
    matches = (metric for metric in GREATER_IS_BETTER if name == metric or name.endswith(f"_{metric}"))
    metric = max(matches, key=len, default=None)
    args.greater_is_better = None if metric is None else GREATER_IS_BETTER[metric]


def read_schedule_settings(settings: Typed) -> Typed:
    """Return ``lr_scheduler_kwargs``, read from JSON if it is such text, with numbers for the text of numbers.

    YAML reads ``1e-6`` as text, and no type is declared for these values.
    """
    if isinstance(settings, str) and settings.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            settings = json.loads(settings)
    if isinstance(settings, dict):
        return {name: _read_numbers(value) for name, value in settings.items()}
    return settings


def _read_numbers(value: Typed) -> Typed:
    if isinstance(value, list | tuple):
        return [_read_numbers(entry) for entry in value]
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    return int(value) if value.strip().lstrip("+-").isdigit() else float(value)


@dataclass(kw_only=True)
class CheckedArguments(MegatronArguments):
    """Base of a class that also has Hugging Face's fields: defaults that depend on both, and contradictions."""

    def derive_settings(self) -> None:
        """Set Megatron's arguments that follow from Hugging Face's."""
        args: HfArguments = self
        if args.bf16 and self.accumulate_allreduce_grads_in_fp32 is None:
            self.accumulate_allreduce_grads_in_fp32 = True
        self._move_checkpointing_to_megatron()
        if args.full_determinism and self.deterministic_mode is None:
            self.deterministic_mode = True  # Hugging Face's own setting takes effect after the model is built
        if self.optimizer is None:
            self.optimizer = _require_optimizer(args.optim)
        choose_direction(args)
        args.lr_scheduler_kwargs = read_schedule_settings(args.lr_scheduler_kwargs)

    def _move_checkpointing_to_megatron(self) -> None:
        """Replace HF's gradient checkpointing flags, with which the Trainer would recompute too, by Megatron's."""
        unset = {field.name: field.default for field in fields(self) if field.name in _CHECKPOINTING}
        enabled = [name for name in unset if getattr(self, name)]
        for name in enabled:
            setattr(self, name, unset[name])
        if enabled and self.recompute_granularity is None:
            _logger.info("%s: recomputing every layer (recompute_granularity full, uniform, 1)", enabled[0])
            self.recompute_granularity, self.recompute_method, self.recompute_num_layers = (
                "full",
                "uniform",
                1,
            )

    def _problems(self) -> list[str]:
        args: HfArguments = self
        problems = super()._problems()
        if args.bf16 and args.fp16:
            problems.append("bf16 excludes fp16; remove one of the two")
        if args.full_determinism and not self.deterministic_mode:
            problems.append("full_determinism needs deterministic_mode; remove one of the two")
        problems += _hf_arguments.problems(args)
        if not self._layout_problems() and self._virtual_size() > 1:
            problems += self._interleaving_problems(args.gradient_accumulation_steps)
        return problems

    def _virtual_size(self) -> int:
        if self.pipeline_model_parallel_size is None:
            return self.virtual_pipeline_model_parallel_size or 1
        return self.layout().vpp

    def _interleaving_problems(self, steps: int) -> list[str]:
        """Check that the interleaved schedule can form groups of micro-batches of at least the pipeline size."""
        size = self.pipeline_model_parallel_size or 1
        group = self.microbatch_group_size_per_vp_stage or size
        if group < size:
            return [
                f"microbatch_group_size_per_vp_stage {group} is below pipeline_model_parallel_size {size}; raise it"
            ]
        if steps < group or 0 < steps % group < size:
            return [
                f"gradient_accumulation_steps {steps} must be at least {group} and leave a remainder of 0 or of "
                f"{size} and more when divided by it, as virtual pipelining at pipeline_model_parallel_size "
                f"{size} requires; change it, for example to {-(-steps // group) * group}"
            ]
        return []


def _require_optimizer(optim: object) -> Literal["adam", "sgd"]:
    name = str(getattr(optim, "value", optim))
    optimizer = _hf_arguments.megatron_optimizer(name)
    if optimizer is None:
        raise McaError(
            f"optim {name} is not supported by Megatron; expected adamw_torch, adamw_torch_fused or sgd, or set "
            "optimizer to adam, sgd or muon"
        )
    return optimizer


def report_problems(
    report_to: Typed, known: Collection[str], is_installed: Callable[[str], bool]
) -> Iterator[str]:
    """Yield an error for each entry of ``report_to`` that transformers does not know, or whose package is missing.

    Args:
        report_to: Value of the argument.
        known: Names that transformers knows.
        is_installed: Function that returns True for a name whose package is installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if not names or names in (["none"], ["all"]):
        return
    for name in names:
        if name not in known:
            yield f"report_to is {name!r}; expected none, all or some of {', '.join(sorted(known))}"
        elif not is_installed(name):
            yield f"report_to {name} needs the package {name}, which is not installed; install it or remove {name}"


def is_supported_optimizer(optim: str) -> bool:
    """Return True if Megatron has an optimizer for Hugging Face's ``optim``."""
    return _hf_arguments.megatron_optimizer(optim) is not None
