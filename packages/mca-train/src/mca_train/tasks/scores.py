"""What kinds of run share that train a model with a head for sequences."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mca_train.config.arguments import DataArguments
from mca_train.tasks.task import AnswerTask

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PreTrainedTokenizerBase

    from mca_train.config.run_config import Settings
    from mca_train.data.file_rows import Row


class ScoreTask(AnswerTask):
    """A kind whose model scores sequences."""

    def surely_has_target(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "Callable[[Row], bool]":
        """See `AnswerTask`."""
        return lambda row: False  # a text of one token is none

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Keys that say nothing of scores."""
        from mca_train.losses.scores import key_problems

        yield from key_problems(settings.training)

    def problems_in_megatron(self, settings: "Settings", megatron: "TransformerConfig") -> Iterator[str]:
        """Losses that Megatron adds by tokens."""
        from mca_train.losses.preference import model_problems

        return model_problems(megatron)
