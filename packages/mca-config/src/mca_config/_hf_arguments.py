"""What of Hugging Face's training arguments Megatron does not follow, and which values mean nothing.

Megatron's own options are checked elsewhere (`arguments`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from mca_config.types import HfArguments, Typed

REFUSED: Mapping[str, str] = {
    "deepspeed": "training runs on Megatron",
    "fsdp": "training runs on Megatron; use_distributed_optimizer splits optimizer state",
    "fsdp_config": "training runs on Megatron",
    "parallelism_config": "set the parallel sizes of mca",
    "auto_find_batch_size": "the batch size must be the same on every rank",
    "torch_compile": "Megatron compiles what it can by itself",
    "torch_compile_backend": "Megatron compiles what it can by itself",
    "torch_compile_mode": "Megatron compiles what it can by itself",
    "use_liger_kernel": "the model's layers are Megatron's",
    "liger_kernel_config": "the model's layers are Megatron's",
    "torch_empty_cache_steps": "Megatron keeps its buffers",
    "neftune_noise_alpha": "noise on embeddings is not made here",
    "optim_args": "set Megatron's optimizer keys instead",
    "optim_target_modules": "the optimizer takes every trained parameter",
    "bf16_full_eval": "evaluation runs in the dtype of training",
    "fp16_full_eval": "evaluation runs in the dtype of training",
    "include_for_metrics": "evaluation computes the loss only",
    "batch_eval_metrics": "evaluation computes the loss only",
    "do_predict": "there is no prediction",
    "label_names": "the targets are labels",
    "push_to_hub": "nothing is uploaded while training; mca-convert --push_to_hub uploads the result",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "save_on_each_node": "all ranks write one checkpoint, into a directory that they share",
    "debug": "a loss or gradient that is not finite ends the run and is named",
    "ddp_bucket_cap_mb": "data parallelism is Megatron's; set ddp_bucket_size",
    "ddp_find_unused_parameters": "data parallelism is Megatron's",
    "ddp_broadcast_buffers": "data parallelism is Megatron's",
    "ddp_static_graph": "data parallelism is Megatron's",
    "dataloader_persistent_workers": "workers start anew in each epoch",
    "dataloader_multiprocessing_context": "workers are forked",
    "warmup_ratio": "set warmup_steps: below 1 it is a fraction of the run",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR in the environment",
}
"""Fields of some version of transformers from 5.2 on; the last two have left it since."""
_ON: Mapping[str, str] = {
    "average_tokens_across_devices": "the loss is a mean over the targets of all ranks",
    "skip_memory_metrics": "every log has peak_memory_gib",
    "dataloader_in_order": "samples come in order",
}
"""Switches that cannot be turned off."""
_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_SAMPLING = ("random", "sequential")
_ADAMW = ("adamw_torch", "adamw_torch_fused")


def problems(args: HfArguments) -> list[str]:
    """Everything wrong with the fields that Hugging Face declares."""
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
        *_accelerator(args.accelerator_config),
        *_words(args),
        *_numbers(args),
        *_ends(args),
    ]


def optimizer_of(optim: str) -> Literal["adam", "sgd"] | None:
    """Megatron's name of Hugging Face's ``optim``; None: it has no such optimizer."""
    return "adam" if optim in _ADAMW else "sgd" if optim == "sgd" else None


def _is_on(args: HfArguments, name: str) -> bool:
    value = getattr(args, name, None)
    if isinstance(value, dict):  # 5.2 fills fsdp_config with what is off
        return any(value.values())
    return value not in (None, False, "", [])


def _accelerator(given: Typed) -> Iterator[str]:
    """Accelerate is not used; its defaults, which a copy of the arguments holds, say nothing."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    if isinstance(given, str):
        try:
            given = json.loads(given) if given.lstrip().startswith("{") else {given: True}
        except json.JSONDecodeError:
            given = {given: True}
    values = given.to_dict() if isinstance(given, AcceleratorConfig) else given or {}
    usual = AcceleratorConfig().to_dict()
    changed = [name for name, value in values.items() if name not in usual or value != usual[name]]
    if changed:
        yield f"accelerator_config ({', '.join(changed)}) is not supported (accelerate is not used); remove it"


def _words(args: HfArguments) -> Iterator[str]:
    for name in ("log_level", "log_level_replica"):
        if (level := getattr(args, name)) not in _LOG_LEVELS:
            yield f"{name} is {level!r}; expected one of {', '.join(_LOG_LEVELS)}"
    strategy = str(args.train_sampling_strategy)
    if strategy not in _SAMPLING:
        yield f"train_sampling_strategy {strategy} is not supported; use {' or '.join(_SAMPLING)}"
    yield from _reports(args.report_to)


def _reports(given: Typed) -> Iterator[str]:
    names = [given] if isinstance(given, str) else list(given or [])
    if not names or names in (["none"], ["all"]):
        return
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            yield f"report_to is {name!r}; expected none, all or some of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
        elif name not in get_available_reporting_integrations():
            yield f"report_to {name} needs the package {name}, which is not installed; install it or remove {name}"


_AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_OF_PARTS = ("vision_learning_rate", "projector_learning_rate")
_RATES = (
    *("learning_rate", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_epsilon"),
    *_OF_PARTS,
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
"""Of what multiplies parameters: fp32 ends at 3.4e38, and Adam divides the rate by what may be small."""

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
        given = {name: getattr(args, name, None) for name in names}
        wrong = {name: value for name, value in given.items() if value is not None and not fits(float(value))}
        yield from (f"{name} must be {words}, not {value}" for name, value in wrong.items())
    if args.max_steps <= 0 and not 0 < float(args.num_train_epochs) < math.inf:
        yield f"num_train_epochs must be above 0 where max_steps is not set, not {args.num_train_epochs}"


def _ends(args: HfArguments) -> Iterator[str]:
    """Schedules that end above where they begin, and a rate of its own over a schedule without one."""
    decoupled, least = getattr(args, "decoupled_lr", None), getattr(args, "min_lr", None)
    own = getattr(args, "decoupled_min_lr", None)
    for name in _OF_PARTS:
        if (rate := getattr(args, name, None)) is not None and least is not None and least > rate:
            yield f"min_lr {least} is above {name} {rate}; lower it"
        if rate and not args.learning_rate:
            yield (
                f"{name} needs a learning_rate above 0, whose schedule it follows; raise learning_rate, and name in "
                "freeze what shall stay as it is"
            )
    if least is not None and least > args.learning_rate:
        yield f"min_lr {least} is above learning_rate {args.learning_rate}; lower it"
    if own is not None and decoupled is None:
        yield "decoupled_min_lr needs decoupled_lr; add it or remove decoupled_min_lr"
    if decoupled is None:
        return
    if not args.learning_rate:
        yield "decoupled_lr needs a learning_rate above 0, whose schedule it follows; raise learning_rate"
    lowest = own if own is not None else least
    if lowest is not None and lowest > decoupled:
        name = "min_lr" if own is None else "decoupled_min_lr"
        yield f"{name} {lowest} is above decoupled_lr {decoupled}; set decoupled_min_lr to at most {decoupled}"
