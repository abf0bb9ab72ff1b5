"""``DPOTrainer`` by ``mcore_adapter``'s parameters: ``ref_model``, ``train_config``, a collator of whole pairs."""

from functools import partial
from typing import Unpack

from torch import Tensor
from transformers import PreTrainedTokenizerBase

import mca_train
from mca_config.types import JsonObject
from mca_models import VirtualModels
from mca_train.batching.collate import Collator
from mca_train.batching.collator_output import CollatorFormat
from mca_train.losses.preference import PreferenceLoss
from mca_train.trainer.parts import TrainerOptions

from .client_arguments import require_full_finetuning
from .dpo_config import DPOConfig


class DPOTrainer(mca_train.DpoTrainer):
    """Trains on preference pairs.

    Args:
        ref_model: The frozen reference; None where the loss has none.
        train_config: The loss.
        tokenizer: Saved with the model.
        options: Those of ``mca_train.McaTrainer``.
    """

    def __init__(
        self,
        *,
        ref_model: VirtualModels | None = None,
        train_config: DPOConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        require_full_finetuning(options.get("callbacks"))
        asked = train_config or DPOConfig()
        loss = PreferenceLoss(kind=asked.pref_loss, beta=asked.beta, label_smoothing=asked.label_smoothing)
        if (collate := options.get("data_collator")) is not None:
            options["data_collator"] = partial(_collate_pairs, collate)
            options["collator_format"] = CollatorFormat(labels_are_shifted=True, takes_pairs=True)
        options["processing_class"] = tokenizer
        super().__init__(reference=ref_model, preference=loss, **options)


def _collate_pairs(collate: Collator, features: list[JsonObject]) -> dict[str, Tensor]:
    """Return the batch of ``collate`` with masks as wide as tokens: LLaMA-Factory shifts tokens and labels alone."""
    batch = dict(collate(features))
    width = batch["input_ids"].shape[1]
    if (mask := batch.get("attention_mask")) is not None and mask.shape[1] == width + 1:
        batch["attention_mask"] = mask[:, 1:]
    return batch
