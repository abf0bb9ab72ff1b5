"""``mca-train sft``: supervised fine-tuning on answers, whose tokens ``data`` selects."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mca_train.config.arguments import DataArguments
from mca_train.tasks.task import AnswerTask, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_config.types import Values
    from mca_train.data.encoding import RowEncoder
    from mca_train.data.streams import Row


class Sft(AnswerTask):
    """Supervised fine-tuning on conversations, prompts with completions, or text."""

    name = "sft"
    takes_images = True
    example = Example(
        rows="rows with `messages`, or `prompt` and `completion`",
        task_lines="sequence_packing: true                  # several samples in one row instead of padding\n",
    )
    summary = "on answers: messages, prompt and completion, or text; only answers count in the loss"

    def check_columns(self, names: Sequence[str], data: DataArguments, key: str) -> None:
        """Raise an error for rows of no known format, as `Task.check_columns`."""
        from mca_train.data.formats import detect_format

        detect_format(names, data, key)

    def needs_chat_template(self, names: Sequence[str], data: DataArguments, key: str, row: "Values") -> bool:
        """Return True for the formats of conversations, as `Task.needs_chat_template`."""
        from mca_train.data.formats import detect_format

        found = detect_format(names, data, key)
        is_prompt = found == "prompt_completion" and isinstance(row.get(data.prompt_column), list)
        return is_prompt or found in ("messages", "alpaca", "sharegpt")

    def encoder(
        self, names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", data: DataArguments, key: str
    ) -> "RowEncoder":
        """Return the row encoder, as `AnswerTask.encoder`."""
        from mca_train.data.encoding import row_encoder

        return row_encoder(names, tokenizer, data, key)

    def surely_has_target(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "Callable[[Row], bool]":
        """Return the quick check for targets, as `AnswerTask.surely_has_target`."""
        from mca_train.data.streams import sft_target_check

        return sft_target_check(tokenizer, data)
