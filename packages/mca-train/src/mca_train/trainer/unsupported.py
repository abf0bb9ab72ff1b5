"""Parameters of Hugging Face's Trainer that would be taken and then not followed are refused here, by name.

Its training arguments are not looked through here: `mca_config.TrainingArguments` does that when they are made.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mca_config.errors import raise_problems

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_PARAMETERS: Mapping[str, str] = {
    "compute_metrics": "evaluation computes the loss only; override evaluate",
    "preprocess_logits_for_metrics": "evaluation computes the loss only; override evaluate",
    "compute_loss_func": "override compute_loss",
    "model_init": "make the model with mca_models.AutoModel and give it as model",
    "optimizers": "the optimizer is Megatron's; set optimizer and its keys in the arguments",
    "optimizer_cls_and_kwargs": "the optimizer is Megatron's; set optimizer and its keys in the arguments",
    "peft_config": "give the model that mca_models.megatron.peft.get_peft_model returns",
    "tokenizer": "it is called processing_class",
}


def require_honoured(args: "TrainingArguments", parameters: Mapping[str, object]) -> None:
    """Raises one error that names everything asked for that training would not do.

    Args:
        args: The training arguments.
        parameters: Of the trainer's constructor, those it does not have itself.

    Raises:
        McaError: There is something.
        TypeError: A parameter that Hugging Face's Trainer does not have either.
    """
    unknown = [name for name in parameters if name not in _PARAMETERS]
    if unknown:
        raise TypeError(f"McaTrainer() got an unexpected keyword argument '{unknown[0]}'")
    problems = [
        f"{name} is not supported ({why}); leave it out"
        for name, why in _PARAMETERS.items()
        if parameters.get(name) is not None
    ]
    problems += optimizer_problems(args)
    raise_problems(problems, "McaTrainer")


def optimizer_problems(args: "TrainingArguments") -> Iterator[str]:
    """What Megatron's optimizer needs and this machine, or this installation, does not have."""
    precise = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if precise and find_spec("transformer_engine") is None:
        yield (
            "use_precision_aware_optimizer needs Transformer Engine's Adam, which is not installed, or "
            "optimizer_cpu_offload; remove it"
        )
    if args.optimizer == "muon":
        if version("megatron-core").startswith("0.16."):
            yield (
                "optimizer muon needs megatron-core 0.17 or later (0.16 calls emerging-optimizers as it was before "
                "0.3, its first release) and Python 3.12; install them, or use adam or sgd"
            )
        elif find_spec("emerging_optimizers") is None:
            yield (
                "optimizer muon needs emerging-optimizers, which needs Python 3.12; install mca-train[muon] there, "
                "or use adam or sgd"
            )
