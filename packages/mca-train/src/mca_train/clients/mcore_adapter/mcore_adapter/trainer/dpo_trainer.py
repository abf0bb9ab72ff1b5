"""``DPOTrainer`` by ``mcore_adapter``'s parameters: ``ref_model``, ``train_config``, a collator of whole pairs."""

from typing import Unpack

from transformers import PreTrainedTokenizerBase

import mca_train
from mca_models import VirtualModels
from mca_train.batching.collator_output import CollatorFormat
from mca_train.losses.preference import PreferenceLoss
from mca_train.trainer.parts import TrainerOptions

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
        asked = train_config or DPOConfig()
        loss = PreferenceLoss(kind=asked.pref_loss, beta=asked.beta, label_smoothing=asked.label_smoothing)
        options["collator_format"] = CollatorFormat(labels_are_shifted=True, takes_pairs=True)
        options["processing_class"] = tokenizer
        super().__init__(reference=ref_model, preference=loss, **options)
