"""Parameters of Hugging Face's Trainer that `McaTrainer` does not support raise errors that name them.

`mca_config.TrainingArguments` checks the training arguments itself.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from mca_config.errors import McaError, raise_problems
from mca_models.megatron import platform

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
}
"""Methods of Hugging Face's Trainer that are never called, and their replacements."""
_OTHERWISE: Mapping[str, str] = {
    "compute_loss": "it is compute_loss(self, output, batch) and returns the sum over the targets, and their number",
    "training_step": "it is training_step(self, batch) and makes one optimizer step",
}
"""Methods with other arguments than in Hugging Face."""


def reject_unsupported(
    args: "TrainingArguments", parameters: Mapping[str, object], kind: type, base: type
) -> None:
    """Raise one error that names everything unsupported.

    Args:
        args: The training arguments.
        parameters: Additional parameters of the trainer's constructor.
        kind: The class of the trainer.
        base: `McaTrainer`.

    Raises:
        McaError: Something is unsupported.
        TypeError: A parameter that Hugging Face's Trainer does not have either.
    """
    unknown = [name for name in parameters if name not in _PARAMETERS]
    if unknown:
        raise TypeError(f"McaTrainer() got an unexpected keyword argument '{unknown[0]}'")
    problems = [
        f"{name} is not supported ({why}); remove it"
        for name, why in _PARAMETERS.items()
        if parameters.get(name) is not None
    ]
    if args.use_cpu and platform.device_type() == "cuda":
        problems.append(USE_CPU_WITH_GPU)
    problems += _method_problems(kind, base)
    problems += optimizer_problems(args)
    raise_problems(problems, "McaTrainer")


def _method_problems(kind: type, base: type) -> Iterator[str]:
    """Yield an error for each overridden method that is never called, or has other parameters."""
    for name, why in _METHODS.items():
        if getattr(kind, name) is not getattr(base, name):
            yield f"{kind.__name__} overrides {name}, which is never called ({why}); remove it"
    for name, why in _OTHERWISE.items():
        parameters = inspect.signature(getattr(kind, name)).parameters
        if "model" in parameters or "inputs" in parameters:
            yield f"{kind.__name__}.{name} has Hugging Face's parameters ({why})"


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


def optimizer_problems(args: "TrainingArguments") -> Iterator[str]:
    """Yield an error for each requirement of Megatron's optimizer that this installation lacks."""
    precise = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if precise and find_spec("transformer_engine") is None:
        yield (
            "use_precision_aware_optimizer needs Transformer Engine's Adam, which is not installed, or "
            "optimizer_cpu_offload; remove it"
        )
    if args.optimizer == "muon":
        if platform.megatron_version() < (0, 19):
            yield (
                "optimizer muon needs megatron-core 0.19 or later (earlier ones cannot build it, or split queries, "
                "keys and values by other heads than the layer's) and Python 3.12; install them, or use adam or sgd"
            )
        elif find_spec("emerging_optimizers") is None:
            yield (
                "optimizer muon needs emerging-optimizers, which needs Python 3.12; install mca-train[muon] there, "
                "or use adam or sgd"
            )
