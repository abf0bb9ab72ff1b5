"""Construction of the model, adapter, reference model and trainer on a rank.

The kind of run decides the trainer and whether there is a reference model.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mca_config.errors import raising_usage_errors
from mca_train.config.model import peft_task
from mca_train.config.model_parts import trained_parts
from mca_train.config.run_config import Settings
from mca_train.data.scoring import padding_token
from mca_train.run.inputs import Inputs

if TYPE_CHECKING:
    from mca_models import VirtualModels
    from mca_models.templates.classification_head import Head
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer

logger = logging.getLogger(__name__)


def make_trainer(inputs: Inputs) -> "McaTrainer":
    """Return the trainer of a run on this rank; collective."""
    run, settings = inputs.run, inputs.run.settings
    reference, head = None, run.task.head(settings)
    if head is not None:
        head = replace(head, pad_token_id=padding_token(inputs.tokenizer))
    if (path := run.task.reference(settings)) is not None:
        assert run.reference is not None, "it has been read with the run"
        # the reference first, as building a model seeds the random states
        reference = _base(settings, path, run.reference.vocab_size, len(inputs.tokenizer))
        reference.requires_grad_(False)
    path = settings.data.model_name_or_path
    model = _base(settings, path, run.model.vocab_size, len(inputs.tokenizer), head)
    if any(getattr(samples, "has_images", False) for samples in (inputs.train, inputs.evaluation)):
        with raising_usage_errors():
            model.require_images()
    options: TrainerOptions = {
        "model": _with_adapter(model, settings),
        "args": settings.training,
        "train_dataset": inputs.train,
        "eval_dataset": inputs.evaluation,
        "processing_class": inputs.tokenizer,
        "pack_length": settings.data.seq_length * run.task.sequences_per_sample,
    }
    with raising_usage_errors():
        return run.task.trainer(settings, reference, options)


def _base(
    settings: Settings, path: str, rows: int, tokens: int, head: "Head | None" = None
) -> "VirtualModels":
    """Load the model at ``path`` with ``head``, and extend its vocabulary from ``rows`` to ``tokens`` if larger."""
    from mca_models import AutoModel

    seed = settings.training.seed
    if tokens <= rows:
        return AutoModel.from_pretrained(path, settings.training, seed=seed, head=head)
    logger.info("the vocabulary of %s grows from %d to the tokenizer's %d", path, rows, tokens)
    return AutoModel.from_pretrained(path, settings.training, seed=seed, vocab_size=tokens, head=head)


def _with_adapter(model: "VirtualModels", settings: Settings) -> "VirtualModels":
    lora = settings.lora
    if not lora.is_enabled:
        return model
    from mca_models.megatron.peft import get_peft_model, load_adapter

    with raising_usage_errors():
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
