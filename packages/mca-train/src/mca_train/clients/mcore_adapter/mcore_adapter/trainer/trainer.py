"""``McaTrainer`` by ``mcore_adapter``'s parameters: ``tokenizer``, and a collator that returns shifted labels."""

from typing import Unpack

from transformers import PreTrainedTokenizerBase

from mca_train.batching.collate import CollatorFormat
from mca_train.clients.unsupported import reject_unsupported
from mca_train.trainer import trainer
from mca_train.trainer.base import TrainerOptions


class McaTrainer(trainer.McaTrainer):
    """Trainer on the cross entropy of the next token.

    Args:
        tokenizer: Tokenizer, saved with the model.
        options: Options of ``mca_train.McaTrainer``.
    """

    def __init__(
        self, *, tokenizer: PreTrainedTokenizerBase | None = None, **options: Unpack[TrainerOptions]
    ) -> None:
        reject_unsupported(options)
        shifted = options.get("data_collator") is not None
        options["collator_format"] = CollatorFormat(labels_are_shifted=shifted)
        options["processing_class"] = tokenizer
        super().__init__(**options)
