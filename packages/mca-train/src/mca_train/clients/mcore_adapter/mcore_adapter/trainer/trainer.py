"""``McaTrainer`` by ``mcore_adapter``'s parameters: ``tokenizer``, and a collator that returns shifted labels."""

from typing import Unpack

from transformers import PreTrainedTokenizerBase

from mca_train.clients.options import translate
from mca_train.trainer import trainer
from mca_train.trainer.base import TrainerOptions


class McaTrainer(trainer.McaTrainer):
    """Trainer on the cross entropy of the next token.

    Args:
        tokenizer: Tokenizer, saved with the model.
        options: Options of ``mca_train.McaTrainer``.
    """

    _language_input_names = ("input_ids", "attention_mask", "labels", "position_ids")
    """Inputs that LLaMA-Factory's ``_pad_batched_inputs`` pads; mca pads batches itself and does not call it."""

    def __init__(
        self, *, tokenizer: PreTrainedTokenizerBase | None = None, **options: Unpack[TrainerOptions]
    ) -> None:
        super().__init__(**translate(options, tokenizer))
