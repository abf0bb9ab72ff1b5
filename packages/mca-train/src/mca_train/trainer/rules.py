"""Rules of the trainers: a table of errors about arguments, model and data.

`check` raises one error with all problems before Hugging Face's constructor runs. Each class of trainer has its own
table, which starts with `RULES`. `unused_options` logs options without effect.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mca_config.arguments import DistributingParallelArguments, float16_problems
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError, raise_problems, raised_problems
from mca_config.layout import SIZE_FIELDS, ParallelLayout
from mca_config.types import Typed, Values
from mca_models.megatron import platform
from mca_models.megatron.factory.transformer_config import transformer_config
from mca_models.megatron.peft import PeftModels
from mca_train.batching.sampling import require_steps
from mca_train.checkpoint.model import require_format
from mca_train.config.early_arguments import optimizer_problems
from mca_train.losses import preference
from mca_train.losses.options import kto_key_problems, pair_key_problems, score_key_problems
from mca_train.lr_schedule import schedule_problems
from mca_train.trainer.base import HfTrainer
from mca_train.trainer.unused_options import unused_option_names
from mca_train.types import SampleSource, VirtualModels

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_PARAMETERS: Mapping[str, str] = {
    "compute_metrics": "evaluation computes the loss only; override evaluate",
    "preprocess_logits_for_metrics": "evaluation computes the loss only; override evaluate",
    "compute_loss_func": "override compute_loss",
    "model_init": "build the model with mca_models.AutoModel and pass it as model",
    "optimizers": "the optimizer is Megatron's; set optimizer and its keys in the arguments",
    "optimizer_cls_and_kwargs": "the optimizer is Megatron's; set optimizer and its keys in the arguments",
    "peft_config": "pass the model from mca_models.megatron.peft.get_peft_model",
    "tokenizer": "use processing_class",
}
USE_CPU_WITH_GPU = (
    "use_cpu is not supported with a GPU: the device is chosen before the arguments are read; set MCA_DEVICE=cpu in "
    "the environment, or remove use_cpu"
)
_LOADERS = "pass the samples as train_dataset and eval_dataset"
_ORDER = f"{_LOADERS} in the order that you want, with train_sampling_strategy sequential"
_OPTIMIZER = _PARAMETERS["optimizers"]
_SCHEDULE = "set lr_scheduler_type and lr_scheduler_kwargs, or learning_rate"
_EVALUATION = "override evaluate or compute_loss"
_STEP = "override training_step or compute_loss"
_CHECKPOINT = "override _save_checkpoint and call super, or write files in a callback's on_save"
_RESUME = "read files in a callback's on_train_begin"
_METHODS: Mapping[str, str] = {
    "get_train_dataloader": _LOADERS,
    "get_eval_dataloader": _LOADERS,
    "get_test_dataloader": _LOADERS,
    "_get_train_sampler": _ORDER,
    "_get_eval_sampler": _ORDER,
    "create_optimizer_and_scheduler": _OPTIMIZER,
    "create_optimizer": _OPTIMIZER,
    "get_optimizer_cls_and_kwargs": _OPTIMIZER,
    "create_scheduler": _SCHEDULE,
    "get_decay_parameter_names": "only matrices decay; set weight_decay",
    "prediction_step": _EVALUATION,
    "evaluation_loop": _EVALUATION,
    "get_batch_samples": "override before_forward, which gets each step's batch",
    "_prepare_inputs": "override before_forward, which gets each step's batch",
    "_prepare_input": "override before_forward, which gets each step's batch",
    "_get_num_items_in_batch": "override num_items and compute_loss, which count the targets",
    "compute_loss_context_manager": "override compute_loss",
    "autocast_smart_context_manager": "set bf16 or fp16",
    "_clip_grad_norm": "set max_grad_norm",
    "_inner_training_loop": _STEP,
    "_run_epoch": _STEP,
    "_maybe_log_save_evaluate": "override log, evaluate or _save_checkpoint, or add a callback",
    "_save": _CHECKPOINT,
    "_save_optimizer_and_scheduler": _CHECKPOINT,
    "_save_rng_state": _CHECKPOINT,
    "_load_from_checkpoint": _RESUME,
    "_load_optimizer_and_scheduler": _RESUME,
    "_load_rng_state": _RESUME,
    "_load_best_model": "read files in a callback's on_train_end",
}
"""Methods of Hugging Face's Trainer that are never called, and their replacements."""
_OTHERWISE: Mapping[str, str] = {
    "compute_loss": "it is compute_loss(self, output, batch) and returns the sum over the targets, and their number",
    "training_step": "it is training_step(self, batch) and makes one optimizer step",
}
"""Methods with other arguments than in Hugging Face."""
_FIXED = "calculate_per_token_loss"
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_SHORT = {name: short for short, name in SIZE_FIELDS.items()}


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """Constructor arguments of a trainer.

    Args:
        model: `VirtualModels`.
        args: Training arguments.
        trainer: The trainer that is being built.
        base: `McaTrainer`, whose methods its class may override.
        parameters: Parameters of Hugging Face's Trainer that `McaTrainer` does not support.
        train_dataset: Training samples.
    """

    model: VirtualModels
    args: "TrainingArguments"
    trainer: HfTrainer
    base: type
    parameters: Mapping[str, object]
    train_dataset: SampleSource


Rule = Callable[[TrainerSetup], Iterator[str]]
"""Function that yields the problems of a trainer's arguments, one line each."""


def check(setup: TrainerSetup, rules: Iterable[Rule]) -> None:
    """Raise one error with all problems that ``rules`` find.

    Raises:
        McaError: There is a problem; or the model is not a `VirtualModels`, or is an adapter's base model, or the
            arguments are Hugging Face's.
    """
    require_types(setup.model, setup.args)
    raise_problems([problem for rule in rules for problem in rule(setup)], "McaTrainer")


def require_types(model: VirtualModels, args: "TrainingArguments") -> None:
    """Raise if Hugging Face's model or arguments are passed, or a model whose adapter the caller dropped.

    Raises:
        McaError: They are.
    """
    if not hasattr(model, "chunks"):
        raise McaError(
            f"model is a {type(model).__name__}; expected what mca_models.AutoModel.from_pretrained returns"
        )
    model.reject_hidden_adapter()
    if not hasattr(args, "layout"):
        raise McaError(
            f"args is a {type(args).__module__}.{type(args).__name__}; expected mca_config.TrainingArguments"
        )


def require_unset(trainer: HfTrainer) -> None:
    """Raise if an attribute was set after construction that the constructor does not accept.

    Raises:
        McaError: One is set.
    """
    set_since = {name: why for name, why in _PARAMETERS.items() if vars(trainer).get(name) is not None}
    if trainer.has_other_optimizer():
        set_since |= {"optimizer or lr_scheduler": f"{_OPTIMIZER}; {_SCHEDULE}"}
    raise_problems(
        [
            f"{name} was set on the trainer, which has no effect ({why}); remove it"
            for name, why in set_since.items()
        ],
        type(trainer).__name__,
    )


def require_unmerged(model: VirtualModels) -> None:
    """Raise if an adapter is merged into the weights, or was added to the model since, so nothing would be trained.

    Raises:
        McaError: It is merged, or was added since.
    """
    model.reject_hidden_adapter()
    if isinstance(model, PeftModels) and model.merged:
        raise McaError("the adapter is merged, so nothing would be trained; call unmerge_adapter first")


# Arguments and the class


def unsupported_parameters(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for each parameter of Hugging Face's Trainer that is set."""
    for name, why in _PARAMETERS.items():
        if setup.parameters.get(name) is not None:
            yield f"{name} is not supported ({why}); remove it"


def device(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for a processor next to a GPU."""
    if setup.args.use_cpu and platform.device_type() == "cuda":
        yield USE_CPU_WITH_GPU


def overridden_methods(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for each overridden method that is never called, or has other parameters."""
    kind = type(setup.trainer)
    for name, why in _METHODS.items():
        if getattr(kind, name, None) is not getattr(setup.base, name, None):
            yield f"{kind.__name__} overrides {name}, which is never called ({why}); remove it"
    for name, why in _OTHERWISE.items():
        parameters = inspect.signature(getattr(kind, name)).parameters
        if "model" in parameters or "inputs" in parameters:
            yield f"{kind.__name__}.{name} has Hugging Face's parameters ({why})"


def optimizer(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for each requirement of the optimizer that this installation or the dtype lacks."""
    yield from optimizer_problems(setup.args)
    if setup.model.config.dtype == "float16":
        yield from float16_problems(setup.args)


def vocabulary(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error if the model's head does not match the loss."""
    head, trainer = setup.model.config.head, setup.trainer
    smooth = setup.args.label_smoothing_factor
    if smooth and trainer.wants_logits:
        yield "label_smoothing_factor is not supported with wants_logits; remove it"
    if smooth and trainer.token_values is not None:
        yield "label_smoothing_factor is not supported with token_values; remove it"
    if head.num_labels is not None and not trainer.wants_logits:
        yield (
            f"the model has a {head.head_kind} head; train it with RewardTrainer, "
            "ClassificationTrainer or a custom trainer that sets wants_logits"
        )


def require_no_upload(callbacks: Iterable[TrainerCallback]) -> None:
    """Raise if a callback would upload the model, whose weights it does not see.

    Raises:
        McaError: Its environment variable enables an upload.
    """
    uploads = {"WandbCallback": "WANDB_LOG_MODEL", "DVCLiveCallback": "HF_DVCLIVE_LOG_MODEL"}
    for callback in callbacks:
        variable = uploads.get(type(callback).__name__)
        log_model = getattr(callback, "_log_model", None)
        if variable is not None and getattr(log_model, "is_enabled", log_model is True):
            raise McaError(
                f"{variable}: {type(callback).__name__} would upload a model without weights, which are sharded over "
                "ranks; unset it, and upload output_dir after the run"
            )


def model_arguments(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error if the arguments ask for another model than the one that was built.

    Arguments that shape a model are read when it is built. Those that the trainer's arguments omit stay as they were.
    """
    model, args = setup.model, setup.args
    if differences := [*_layout(model, args), *_precision(model, args), *_settings(model, args)]:
        yield (
            f"args differ from those that the model was built with: {', '.join(differences)}; pass the same args to "
            "AutoModel, unchanged, or remove them here"
        )


def _differs(name: str, requested: Typed, current: Typed) -> str:
    return (
        f"{name} {getattr(requested, 'name', requested)} (the model has {getattr(current, 'name', current)})"
    )


def _layout(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    current = model.config.layout
    requested = args.layout(current)
    for name in LAYOUT_FIELDS:
        if getattr(args, name) is not None and _entry(requested, name) != _entry(current, name):
            yield _differs(name, _entry(requested, name), _entry(current, name))


def _entry(layout: ParallelLayout, name: str) -> Typed:
    """Return a field of ``layout``; a size of None reads as 1."""
    return getattr(layout, _SHORT.get(name, name))


def _precision(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    for name, dtype in _PRECISIONS.items():
        was = getattr(model.args, name, None)  # the model was built with it, and with an explicit dtype
        if getattr(args, name) and model.config.dtype != dtype and getattr(args, name) != was:
            yield _differs(name, True, model.config.dtype)


def _settings(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    """Yield differences of Megatron's configuration that would change the computation."""
    config, current = model.config, model.args.transformer_config_overrides()
    requested = {
        name: value
        for name, value in args.transformer_config_overrides().items()
        if name not in current or current[name] != value
    }
    if not requested:
        return
    before, after = (
        transformer_config(config, arguments, config.layout, config.dtype)
        for arguments in (model.args, _with(model.args, requested))
    )
    idle = {_FIXED, *unused_option_names(args, config, after)}
    for name in requested:
        if name not in idle and getattr(after, name) != getattr(before, name):
            yield _differs(name, getattr(after, name), getattr(before, name))


def _with(args: DistributingParallelArguments, changes: Values) -> DistributingParallelArguments:
    changed = copy.copy(args)
    extra = dict(args.additional_configs) if isinstance(args.additional_configs, dict) else {}
    for name, value in changes.items():
        if name in vars(args):
            setattr(changed, name, value)
        else:
            extra[name] = value
    changed.additional_configs = extra
    return changed


# Losses of the kinds of trainer


def pairs(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for each argument and loss that preference pairs do not support."""
    yield from pair_key_problems(setup.args)
    yield from preference.model_problems(setup.model.megatron)


def unpaired(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for each argument and loss that KTO does not support."""
    yield from kto_key_problems(setup.args)
    yield from preference.kto_model_problems(setup.model.megatron)


def classification(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for another head than one for sequence classification, and what it does not support."""
    if (kind := setup.model.config.head.head_kind) != "sequence_classification":
        yield (
            f"{type(setup.trainer).__name__} needs a sequence-classification head, not {kind}; "
            "build it with AutoModel.from_pretrained(..., head=Head(...))"
        )
    yield from score_key_problems(setup.args)
    yield from preference.model_problems(setup.model.megatron)


def one_label(setup: TrainerSetup) -> Iterator[str]:
    """Yield an error for a reward model with another number of labels than 1."""
    head = setup.model.config.head
    if head.head_kind == "sequence_classification" and head.num_labels != 1:
        yield f"num_labels is {head.num_labels}; a reward model needs 1"


RULES: tuple[Rule, ...] = (
    unsupported_parameters,
    device,
    overridden_methods,
    model_arguments,
    optimizer,
    lambda setup: schedule_problems(setup.args),
    vocabulary,
    lambda setup: raised_problems(require_steps, setup.train_dataset, setup.args.max_steps),
    lambda setup: raised_problems(require_format, setup.model, setup.args.ckpt_format),
)
"""Errors of every trainer."""
