"""Checks and defaults of Hugging Face's and Megatron's arguments together, without torch and transformers.

`training` combines them with Hugging Face's class. ``mca-train`` combines them with the fields alone, to report wrong
keys before it imports transformers.
"""

import contextlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from mca_config.arguments import MegatronArguments
from mca_config.errors import McaError
from mca_config.types import HfArguments, Typed

_logger = logging.getLogger(__name__)

_LOSS_ONLY = "evaluation computes the loss only"
REFUSED: Mapping[str, str] = {
    "deepspeed": "training runs on Megatron",
    "fsdp": "training runs on Megatron; use_distributed_optimizer splits optimizer state",
    "fsdp_config": "training runs on Megatron",
    "parallelism_config": "set the parallel sizes of mca",
    "auto_find_batch_size": "every rank needs the same batch size",
    "torch_compile": "Megatron compiles its own kernels",
    "torch_compile_backend": "Megatron compiles its own kernels",
    "torch_compile_mode": "Megatron compiles its own kernels",
    "use_liger_kernel": "the model's layers are Megatron's",
    "liger_kernel_config": "the model's layers are Megatron's",
    "torch_empty_cache_steps": "Megatron keeps its buffers",
    "neftune_noise_alpha": "mca adds no noise to embeddings",
    "optim_args": "set Megatron's optimizer keys instead",
    "optim_target_modules": "the optimizer updates every trainable parameter",
    "bf16_full_eval": "evaluation runs in the dtype of training",
    "fp16_full_eval": "evaluation runs in the dtype of training",
    "include_for_metrics": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "do_predict": "mca has no prediction loop",
    "label_names": "targets are always named labels",
    "push_to_hub": "training uploads nothing; mca-convert --push_to_hub uploads the result",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "save_on_each_node": "all ranks write one checkpoint into a shared directory",
    "debug": "a NaN or infinite loss or gradient always ends the run with an error",
    "ddp_bucket_cap_mb": "data parallelism is Megatron's; set ddp_bucket_size",
    "ddp_find_unused_parameters": "data parallelism is Megatron's",
    "ddp_broadcast_buffers": "data parallelism is Megatron's",
    "ddp_static_graph": "data parallelism is Megatron's",
    "dataloader_persistent_workers": "workers restart in each epoch",
    "dataloader_multiprocessing_context": "workers are forked",
    "warmup_ratio": "set warmup_steps: below 1 it is a fraction of the run",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR in the environment",
}
"""Unsupported fields, with the reason, of transformers 5.2 and later; later versions removed the last two."""
_ON: Mapping[str, str] = {
    "average_tokens_across_devices": "the loss is a mean over the targets of all ranks",
    "skip_memory_metrics": "every log has peak_memory_gib",
    "dataloader_in_order": "samples always come in order",
}
"""Flags that cannot be false."""
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
        ),
        _LOSS_ONLY,
    ),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        "training uploads nothing",
    ),
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        "Megatron recomputes activations",
    ),
    "use_cache": "training keeps no cache of keys and values",
    "log_on_each_node": "the first rank logs",
    "logging_nan_inf_filter": "a NaN or infinite loss ends the run",
    "remove_unused_columns": "columns that training does not read stay in the dataset",
    "length_column_name": "samples are not sorted by length",
    "local_rank": "the launcher sets it in the environment",
}
"""Fields without effect, with the reason; ``docs/reference/key_rules.md`` lists them."""
_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_SAMPLING = ("random", "sequential")
_ADAMW = ("adamw_torch", "adamw_torch_fused")


def hf_problems(args: HfArguments) -> list[str]:
    """Return all hf_problems with the fields that Hugging Face declares."""
    found = [
        f"{name} is not supported ({why}); remove it" for name, why in REFUSED.items() if _is_on(args, name)
    ]
    found += [
        f"{name} cannot be off ({why}); remove it"
        for name, why in _ON.items()
        if getattr(args, name, True) is False
    ]
    return [
        *found,
        *_choices(args),
        *_numbers(args),
        *_rates(args),
        *_intervals(args),
    ]


def megatron_optimizer(optim: str) -> Literal["adam", "sgd"] | None:
    """Return Megatron's name of Hugging Face's ``optim``, or None if Megatron has no such optimizer."""
    return "adam" if optim in _ADAMW else "sgd" if optim == "sgd" else None


def _is_on(args: HfArguments, name: str) -> bool:
    value = getattr(args, name, None)
    if isinstance(value, dict):  # transformers 5.2 fills fsdp_config with false values
        return any(value.values())
    return value not in (None, False, "", [])


def _choices(args: HfArguments) -> Iterator[str]:
    for name in ("log_level", "log_level_replica"):
        if (level := getattr(args, name)) not in _LOG_LEVELS:
            yield f"{name} is {level!r}; expected one of {', '.join(_LOG_LEVELS)}"
    strategy = str(args.train_sampling_strategy)
    if strategy not in _SAMPLING:
        yield f"train_sampling_strategy {strategy} is not supported; use {' or '.join(_SAMPLING)}"


_AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_PART_RATES = ("vision_learning_rate", "audio_learning_rate", "projector_learning_rate")
_RATES = (
    *("learning_rate", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_epsilon"),
    *_PART_RATES,
)
_AT_LEAST_ZERO = (
    "max_grad_norm",
    "warmup_steps",
    "dataloader_num_workers",
    "data_seed",
    "logging_steps",
    "save_steps",
    "eval_steps",
    "eval_delay",
)
_SHARES = ("adam_beta1", "adam_beta2", "label_smoothing_factor", "sgd_momentum")
_ABOVE_ZERO = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window")

_HIGHEST = 1e30
"""Upper bound of learning rates and other factors on parameters: fp32 ends at 3.4e38, and Adam may divide the rate by
a small number."""

_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda value: value >= 1, "at least 1"),
    ((*_RATES, *_AT_LEAST_ZERO), lambda value: 0 <= value < math.inf, "at least 0"),
    (_RATES, lambda value: not _HIGHEST < value < math.inf, f"at most {_HIGHEST:g}"),
    (_SHARES, lambda value: 0 <= value < 1, "at least 0 and below 1"),
    (_ABOVE_ZERO, lambda value: 0 < value < math.inf, "above 0"),
    (("seed",), lambda value: 0 <= value < 2**32, "at least 0 and below 2**32"),
)


def _numbers(args: HfArguments) -> Iterator[str]:
    for names, fits, words in _RANGES:
        values = {name: getattr(args, name, None) for name in names}
        wrong = {
            name: value for name, value in values.items() if value is not None and not fits(float(value))
        }
        yield from (f"{name} must be {words}, not {value}" for name, value in wrong.items())
    if args.max_steps <= 0 and not 0 < float(args.num_train_epochs) < math.inf:
        yield f"num_train_epochs must be above 0 unless max_steps is set, not {args.num_train_epochs}"


_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the evaluation loss."""


def _intervals(args: HfArguments) -> Iterator[str]:
    """Report contradictions of logging, evaluation and saving that Hugging Face finds only after imports, or later."""
    evaluates, schedule = _name(args.eval_strategy), _name(args.lr_scheduler_type)
    for key, strategy in _keys_in_steps(args).items():
        value = getattr(args, key)
        if key == "logging_steps" and value == 0:
            fix = "; set eval_steps" if strategy == "eval_strategy" else ""
            yield f"logging_steps must be above 0 with {strategy} steps, not 0{fix}"
        elif value and 1 < value < math.inf and value % 1:
            yield f"{key} must be a whole number or below 1, not {value}"
    if schedule in _BY_METRIC and evaluates == "no":
        yield f"lr_scheduler_type {schedule} follows the evaluation loss, but eval_strategy is no; set it"
    if args.dataloader_prefetch_factor is not None and args.dataloader_num_workers == 0:
        yield (
            "dataloader_prefetch_factor needs dataloader_num_workers above 0; set it or remove "
            "dataloader_prefetch_factor"
        )
    if _name(args.save_strategy) == "best" and args.metric_for_best_model is None:
        if not args.load_best_model_at_end and schedule not in _BY_METRIC:  # for these it is the loss
            yield "save_strategy best needs metric_for_best_model; set it, for example to loss"
    if args.load_best_model_at_end:
        yield from _best_model_problems(args, evaluates, _name(args.save_strategy))


def _keys_in_steps(args: HfArguments) -> dict[str, str]:
    """Return the keys of intervals in steps that the run follows, each with the strategy that makes it do so."""
    keys: dict[str, str] = {}
    for name in ("logging", "eval", "save"):
        if _name(getattr(args, f"{name}_strategy")) == "steps":
            key = "logging_steps" if name == "eval" and not args.eval_steps else f"{name}_steps"
            keys.setdefault(key, f"{name}_strategy")
    return keys


def _best_model_problems(args: HfArguments, evaluates: str, saves: str) -> Iterator[str]:
    """Report checkpoints that ``load_best_model_at_end`` cannot choose from, because no evaluation is at their step."""
    if saves in ("best", "no") and evaluates == "no":
        return  # no contradiction; `mca-train` has a rule for it
    if evaluates == "no":
        yield "load_best_model_at_end is true, but eval_strategy is no; set it, or remove the key"
    elif saves not in (evaluates, "best"):
        yield (
            f"save_strategy is {saves} and eval_strategy {evaluates}, but load_best_model_at_end chooses among "
            f"evaluated checkpoints; set save_strategy to {evaluates} or best"
        )
    elif saves == evaluates == "steps":
        name = "eval_steps" if args.eval_steps else "logging_steps"
        every, kept = float(args.eval_steps or args.logging_steps), float(args.save_steps)
        scale = 1e6 if every < 1 and kept < 1 else 1  # as Hugging Face compares fractions of a run
        if kept == 0:
            yield "save_steps is 0, so no checkpoint is written for load_best_model_at_end; set it"
        elif every and (every < 1) != (kept < 1):
            yield (
                f"save_steps is {kept:g} and {name} {every:g}, one a number of steps and the other a share of the run, "
                "but load_best_model_at_end needs a multiple; set both in steps or both below 1"
            )
        elif every and kept < math.inf and kept * scale % (every * scale):
            yield (
                f"save_steps is {args.save_steps:g}, but load_best_model_at_end needs a multiple of {name} "
                f"({every:g}); change one of the two"
            )


def _name(value: object) -> str:
    """Return the word of a choice, which may be a member of an enumeration."""
    return str(getattr(value, "value", value))


def _rates(args: HfArguments) -> Iterator[str]:
    """Report schedules whose end is above their start, and separate rates without a schedule to follow."""
    decoupled, min_lr = getattr(args, "decoupled_lr", None), getattr(args, "min_lr", None)
    decoupled_min_lr = getattr(args, "decoupled_min_lr", None)
    for name in _PART_RATES:
        if (rate := getattr(args, name, None)) is not None and min_lr is not None and min_lr > rate:
            yield f"min_lr {min_lr} is above {name} {rate}; lower it"
        if rate and not args.learning_rate:
            yield (
                f"{name} follows the schedule of learning_rate, which must be above 0; raise learning_rate, and add "
                "the parts that must not change to freeze"
            )
    if min_lr is not None and min_lr > args.learning_rate:
        yield f"min_lr {min_lr} is above learning_rate {args.learning_rate}; lower it"
    if decoupled_min_lr is not None and decoupled is None:
        yield "decoupled_min_lr needs decoupled_lr; add it or remove decoupled_min_lr"
    if decoupled is None:
        return
    if not args.learning_rate:
        yield "decoupled_lr follows the schedule of learning_rate, which must be above 0; raise learning_rate"
    lowest = decoupled_min_lr if decoupled_min_lr is not None else min_lr
    if lowest is not None and lowest > decoupled:
        name = "min_lr" if decoupled_min_lr is None else "decoupled_min_lr"
        yield f"{name} {lowest} is above decoupled_lr {decoupled}; set decoupled_min_lr to at most {decoupled}"


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

    expected_values: ClassVar[Mapping[str, str]] = {"optim": f"{', '.join(_ADAMW)} or sgd"}
    """Values that are supported, by field, for errors about values that Hugging Face does not know."""

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
        problems += hf_problems(args)
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
    optimizer = megatron_optimizer(name)
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
    return megatron_optimizer(optim) is not None
