"""What ``mca-train pretrain``, ``sft`` and ``dpo`` train: the model, its adapter, its reference, and the trainer."""

import logging
from pathlib import Path
from typing import Any

from mca_config.errors import UsageError, checking_usage
from mca_train.config.run_config import Settings
from mca_train.data.load import Kind

logger = logging.getLogger(__name__)


def make_trainer(kind: Kind, settings: Settings, tokenizer: Any, train: Any, evaluation: Any) -> Any:
    """The trainer of a run on this rank; collective.

    Args:
        kind: What is trained.
        settings: The run.
        tokenizer: Saved with the model.
        train: Tokenized samples.
        evaluation: The same, or None.
    """
    from mca_train.trainer.trainer import McaTrainer

    args = settings.training
    reference = _reference(
        kind, settings, tokenizer
    )  # before the model: building one seeds the random states
    model = _with_adapter(_base(settings, settings.data.model_name_or_path, tokenizer), settings)
    options: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": train,
        "eval_dataset": evaluation,
        "processing_class": tokenizer,
        "pack_length": settings.data.seq_length * (2 if kind == "dpo" else 1),
    }
    with checking_usage():
        if kind != "dpo":
            return McaTrainer(**options)
        from mca_train.losses.preference import PreferenceLoss
        from mca_train.trainer.dpo import DpoTrainer

        dpo = settings.dpo
        loss = PreferenceLoss(kind=dpo.dpo_loss, beta=dpo.dpo_beta, label_smoothing=dpo.dpo_label_smoothing)
        return DpoTrainer(reference=reference, preference=loss, **options)


def _base(settings: Settings, path: str, tokenizer: Any) -> Any:
    """The model at ``path``, its vocabulary grown to the tokenizer's where that is larger."""
    from mca_models import AutoModel
    from mca_models.opening import open_checkpoint

    seed, tokens = settings.training.seed, len(tokenizer)
    known = open_checkpoint(Path(path)).config.vocab_size
    if tokens <= known:
        return AutoModel.from_pretrained(path, settings.training, seed=seed)
    if settings.lora.wanted:
        raise UsageError(
            f"the tokenizer has {tokens} tokens, the model's vocabulary {known}, and an adapter does not hold the new "
            f"rows; write a larger base model first: AutoModel.from_pretrained({path!r}, vocab_size={tokens})"
            ".save_pretrained_as_hf(...)"
        )
    logger.info("the vocabulary of %s grows from %d to the tokenizer's %d", path, known, tokens)
    return AutoModel.from_pretrained(path, settings.training, seed=seed, vocab_size=tokens)


def _reference(kind: Kind, settings: Settings, tokenizer: Any) -> Any:
    dpo = settings.dpo
    path = dpo.reference_model_name_or_path
    if kind != "dpo":
        return None
    if dpo.dpo_loss == "orpo":
        return None
    if path is None and settings.lora.wanted:
        return None
    model = _base(settings, path or settings.data.model_name_or_path, tokenizer)
    model.requires_grad_(False)
    return model


def _with_adapter(model: Any, settings: Settings) -> Any:
    lora = settings.lora
    if not lora.wanted:
        return model
    from mca_models.megatron.peft import get_peft_model, load_adapter

    if lora.adapter_name_or_path is not None:
        adapted = load_adapter(model, lora.adapter_name_or_path)
    else:
        with checking_usage():
            adapted = get_peft_model(model, lora.config(), seed=settings.training.seed)
    logger.info("%s", adapted.print_trainable_parameters())
    return adapted
