"""``McaTrainer`` by ``mcore_adapter``'s parameters: ``tokenizer``, and a collator of shifted labels."""

from typing import Unpack

from transformers import PreTrainedTokenizerBase

import mca_train
from mca_train.batching.collator_output import CollatorFormat
from mca_train.trainer.parts import TrainerOptions

from .client_arguments import require_full_finetuning


class McaTrainer(mca_train.McaTrainer):
    """Trains on the cross entropy of the next token.

    Args:
        tokenizer: Saved with the model.
        options: Those of ``mca_train.McaTrainer``.
    """

    _language_input_names = ("input_ids", "attention_mask", "labels", "position_ids")

    def __init__(
        self, *, tokenizer: PreTrainedTokenizerBase | None = None, **options: Unpack[TrainerOptions]
    ) -> None:
        require_full_finetuning(options.get("callbacks"))
        shifted = options.get("data_collator") is not None
        options["collator_format"] = CollatorFormat(labels_are_shifted=shifted)
        options["processing_class"] = tokenizer
        super().__init__(**options)
