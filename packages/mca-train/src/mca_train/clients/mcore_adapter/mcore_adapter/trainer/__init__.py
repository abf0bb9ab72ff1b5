"""``McaTrainer`` and ``DPOTrainer`` by the parameters of ``mcore_adapter``, such as ``tokenizer``."""

from typing import Unpack

from transformers import PreTrainedTokenizerBase

from mca_models import VirtualModels
from mca_train.clients.options import client_arguments, translate
from mca_train.trainer import dpo, trainer
from mca_train.trainer.base import TrainerOptions

from .dpo_config import DPOConfig

__all__ = ["DPOTrainer", "McaTrainer"]


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


class DPOTrainer(dpo.DpoTrainer):
    """Trainer on preference pairs.

    Args:
        train_config: The preference loss.
        ref_model: Frozen reference; with an adapter the model without it is the reference instead.
        tokenizer: Tokenizer, saved with the model.
        options: Options of ``mca_train.McaTrainer``.
    """

    def __init__(
        self,
        *,
        train_config: DPOConfig,
        ref_model: VirtualModels | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        client = client_arguments(options)
        adapted = client.get("finetuning_type") == "lora"
        super().__init__(
            reference=None if adapted else ref_model,
            preference=train_config.loss(client),
            **translate(options, tokenizer),
        )
