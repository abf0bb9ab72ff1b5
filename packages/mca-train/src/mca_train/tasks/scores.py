"""Base of the kinds of run with a sequence-classification head."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mca_train.config.arguments import DataArguments
from mca_train.losses.options import score_key_problems
from mca_train.tasks.task import AnswerTask

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PreTrainedTokenizerBase

    from mca_train.config.run_config import Settings
    from mca_train.data.file_rows import Row


class ScoreTask(AnswerTask):
    """Kind whose model has a sequence-classification head."""

    def surely_has_target(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "Callable[[Row], bool]":
        """Return False for every row: a text of one token has no target."""
        return lambda row: False

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield an error for each key that does not apply to sequence classification."""
        yield from score_key_problems(settings.training)

    def problems_in_megatron(self, settings: "Settings", megatron: "TransformerConfig") -> Iterator[str]:
        """Yield an error for each loss that Megatron adds per token."""
        from mca_train.losses.preference import model_problems

        return model_problems(megatron)
