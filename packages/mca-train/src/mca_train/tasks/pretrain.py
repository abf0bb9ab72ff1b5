"""``mca-train pretrain``: next-token prediction on plain text, which ``data`` splits into blocks."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mca_train.config.arguments import VIDEO_KEYS, DataArguments
from mca_train.tasks.task import Example, Task, data_format_problems

if TYPE_CHECKING:
    from pathlib import Path

    import datasets
    from torch.utils.data import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from mca_train.config.run_config import Settings
    from mca_train.data.image_rows import RowContext
    from mca_train.data.streams import FileRows
    from mca_train.data.token_dataset import Sample, TokenDataset


class Pretrain(Task):
    """Pretraining on concatenated texts in blocks of ``seq_length`` tokens, all of them targets."""

    name = "pretrain"
    is_plain_text = True
    summary = "on plain text: all texts one after another, cut into blocks of seq_length tokens"
    unused_columns = ("messages_column", "prompt_column", "completion_column", "tools_column", *VIDEO_KEYS)
    example = Example(rows="rows with `text`", length="tokens of a block", learning_rate="3.0e-4", lora=None)

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield an error for row formats, which this kind does not read."""
        return data_format_problems(self.name, settings)

    def required_column(self, data: DataArguments) -> str | None:
        """Return the text column, which every file must have."""
        return data.text_column

    def indexed(
        self, prefix: "Path", tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "TokenDataset":
        """Return the samples of an indexed dataset, as `Task.indexed`."""
        from mca_train.data.indexed import indexed_blocks

        return indexed_blocks(prefix, data.seq_length, len(tokenizer), data.tokenized_cache)

    def samples(self, rows: "datasets.Dataset", context: "RowContext") -> "TokenDataset":
        """Return the tokenized samples, as `Task.samples`."""
        from mca_train.data.image_blocks import image_blocks
        from mca_train.data.image_rows import without_decoding
        from mca_train.data.samples import pretrain_blocks

        data, key = context.data, context.key
        if _has_images(context, rows.column_names):
            known = self.image_rows(rows.column_names, context)
            return image_blocks(without_decoding(rows), known, data, key)
        return pretrain_blocks(rows, context.tokenizer, data, key, context.vision)

    def stream(
        self, rows: "FileRows", names: Sequence[str], context: "RowContext"
    ) -> "IterableDataset[Sample]":
        """Return the streamed samples, as `Task.stream`."""
        from mca_train.data.encoding import block_tokenizer
        from mca_train.data.image_blocks import ImageBlockStream
        from mca_train.data.streams import BlockStream

        data, key = context.data, context.key
        if _has_images(context, names):
            read = self.image_rows(names, context)
            return ImageBlockStream(rows, names, read, data, key)
        tokenize = block_tokenizer(names, context.tokenizer, data, key, context.vision)
        return BlockStream(rows, tokenize, data.seq_length)


def _has_images(context: "RowContext", names: Sequence[str]) -> bool:
    """Return True if rows with the columns ``names`` may have images or other media and the model has vision."""
    from mca_train.data.formats import media_columns

    vision = context.vision
    return vision is not None and not set(media_columns(vision, context.data)).isdisjoint(names)
