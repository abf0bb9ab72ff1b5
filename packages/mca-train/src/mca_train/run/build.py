"""A rank makes here what it trains: the model, its adapter, the model that stands beside it, and the trainer.

The kind of run says which trainer that is and whether there is a second model.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.errors import UsageError, checking_usage
from mca_train.config.model import peft_task
from mca_train.config.parts import trained_parts
from mca_train.config.run_config import Settings
from mca_train.data.scored import padding_of
from mca_train.run.inputs import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_models import VirtualModels
    from mca_models.templates.heads import Head
    from mca_train.trainer.parts import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer

logger = logging.getLogger(__name__)


def make_trainer(inputs: Inputs) -> "McaTrainer":
    """The trainer of a run on this rank; collective."""
    run, settings = inputs.run, inputs.run.settings
    reference, head = None, run.task.head(settings)
    if head is not None:
        head = replace(head, pad_token_id=padding_of(inputs.tokenizer))
    if (path := run.task.reference(settings)) is not None:
        reference = _base(settings, path, inputs.tokenizer)  # first: building a model seeds the random states
        reference.requires_grad_(False)
    model = _base(settings, settings.data.model_name_or_path, inputs.tokenizer, head)
    if any(getattr(samples, "has_images", False) for samples in (inputs.train, inputs.evaluation)):
        with checking_usage():
            model.require_images()
    options: TrainerOptions = {
        "model": _with_adapter(model, settings),
        "args": settings.training,
        "train_dataset": inputs.train,
        "eval_dataset": inputs.evaluation,
        "processing_class": inputs.tokenizer,
        "pack_length": settings.data.seq_length * run.task.sequences_per_sample,
    }
    with checking_usage():
        return run.task.trainer(settings, reference, options)


def _base(
    settings: Settings, path: str, tokenizer: "PreTrainedTokenizerBase", head: "Head | None" = None
) -> "VirtualModels":
    """The model at ``path``, its vocabulary grown to the tokenizer's where that is larger, with ``head`` if given."""
    from mca_models import AutoModel
    from mca_models.opening import open_checkpoint

    seed, tokens = settings.training.seed, len(tokenizer)
    known = open_checkpoint(Path(path)).config.vocab_size
    if tokens <= known:
        return AutoModel.from_pretrained(path, settings.training, seed=seed, head=head)
    if settings.lora.wanted:
        raise UsageError(
            f"the tokenizer has {tokens} tokens, the model's vocabulary {known}, and an adapter does not hold the new "
            f"rows; write a larger base model first: AutoModel.from_pretrained({path!r}, vocab_size={tokens})"
            ".save_pretrained_as_hf(...)"
        )
    logger.info("the vocabulary of %s grows from %d to the tokenizer's %d", path, known, tokens)
    return AutoModel.from_pretrained(path, settings.training, seed=seed, vocab_size=tokens, head=head)


def _with_adapter(model: "VirtualModels", settings: Settings) -> "VirtualModels":
    lora = settings.lora
    if not lora.wanted:
        return model
    from mca_models.megatron.peft import get_peft_model, load_adapter

    with checking_usage():
        if lora.adapter_name_or_path is not None:
            adapted = load_adapter(model, lora.adapter_name_or_path)
        else:
            adapted = get_peft_model(
                model,
                lora.config(peft_task(model.config)),
                seed=settings.training.seed,
                parts=trained_parts(settings.training),
            )
    logger.info("%s", adapted.print_trainable_parameters())
    return adapted
