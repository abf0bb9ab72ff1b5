"""`Task` is what a kind of run is made of; `AnswerTask` is for kinds that learn answers row by row.

A kind is a subclass in a file of this room and one line of `table`. How a row is tokenized is in ``data``, the loss in
``losses``, the trainer in ``trainer``; a kind says which of them belong together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mca_config.errors import UsageError
from mca_train.config.arguments import DataArguments

if TYPE_CHECKING:
    from pathlib import Path

    import datasets
    from megatron.core.transformer import TransformerConfig
    from torch.utils.data import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from mca_config.model_config import McaModelConfig
    from mca_models import VirtualModels
    from mca_models.templates.classification_head import Head
    from mca_train.config.run_config import Settings
    from mca_train.data.encoding import RowEncoder, RowNumbers
    from mca_train.data.file_rows import FileRows, Row
    from mca_train.data.image_rows import ImageReader, ImageRows
    from mca_train.data.preferences import PairDataset
    from mca_train.data.token_dataset import Sample, TokenDataset
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a configuration to begin with says of one kind, as ``mca-train init`` writes it.

    Attributes:
        rows: What the rows of its files have.
        length: What ``seq_length`` is to it.
        learning_rate: A common one.
        task_lines: Lines of its own keys.
        lora: Lines beside those of an adapter; None: an adapter is no good to it.
    """

    rows: str = "the rows"
    length: str = "longest sequence; longer ones are cut"
    learning_rate: str = "1.0e-5"
    task_lines: str = ""
    lora: str | None = ""


class Task(ABC):
    """One kind of run.

    Attributes:
        name: The word after ``mca-train``.
        summary: Its line in ``mca-train --help``.
        data_arguments: The keys of its model and files: `DataArguments`, or a subclass with more columns.
        task_arguments: A dataclass of the keys that this kind alone understands; None: there are none.
        takes_images: Whether its rows may have images.
        unread: Keys of rows that every kind knows and this one does not read.
        example: What a configuration to begin with says of it.
        sides: Names of the sequences of a sample, each of up to ``seq_length`` tokens, which its tensors begin with;
            none: it is one sequence.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    data_arguments: ClassVar[type[DataArguments]] = DataArguments
    task_arguments: ClassVar[type | None] = None
    takes_images: ClassVar[bool] = False
    unused_columns: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[Example] = Example()
    sides: ClassVar[tuple[str, ...]] = ()

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that are compared with one another, or 1."""
        return max(1, len(self.sides))

    @property
    def task_keys(self) -> frozenset[str]:
        """The keys that this kind understands and not every other does."""
        columns = {*self.data_arguments.__dataclass_fields__} - {*DataArguments.__dataclass_fields__}
        return frozenset(columns | set(getattr(self.task_arguments, "__dataclass_fields__", ())))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What its evaluation computes beside the loss."""
        return ()

    def required_column(self, data: DataArguments) -> str | None:
        """The column that every file must have; None: the rows of each may be of another form."""
        return None

    @abstractmethod
    def samples(
        self,
        rows: "datasets.Dataset",
        tokenizer: "PreTrainedTokenizerBase",
        data: DataArguments,
        key: str,
        images: "ImageReader | None" = None,
    ) -> "TokenDataset | PairDataset":
        """The samples of ``rows``, tokenized.

        Args:
            rows: Of the files, one after another.
            tokenizer: The model's.
            data: Columns, lengths and limits.
            key: The argument that named the files, for errors.
            images: Of the model; None: there are none.
        """

    def image_rows(
        self,
        names: Sequence[str],
        images: "ImageReader",
        data: DataArguments,
        tokenizer: "PreTrainedTokenizerBase",
        key: str,
    ) -> "ImageRows":
        """What rows with the columns ``names`` mean, of which some have images."""
        from mca_train.data.image_rows import ImageRows

        return ImageRows(names, images, data, tokenizer, key)

    @abstractmethod
    def stream(
        self,
        rows: "FileRows",
        names: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        data: DataArguments,
        key: str,
        images: "ImageReader | None" = None,
    ) -> "IterableDataset[Sample]":
        """The same, made as it is iterated; ``names`` are the rows' columns."""

    def indexed(
        self, prefix: "Path", tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "TokenDataset":
        """The samples of one of Megatron's indexed datasets, which holds tokens of plain text.

        Raises:
            UsageError: This kind learns something else.
        """
        raise UsageError(
            f"datasets: {prefix} is an indexed dataset, which only mca-train pretrain reads, not {self.name}"
        )

    def problems(self, settings: "Settings") -> Iterator[str]:
        """What this kind cannot train with, as far as the configuration shows it."""
        yield from ()

    def problems_in_megatron(self, settings: "Settings", megatron: "TransformerConfig") -> Iterator[str]:
        """The same, as far as Megatron's configuration of the model shows it."""
        yield from ()

    def problems_in_steps(self, samples: int) -> Iterator[str]:
        """The same, of steps of so many samples."""
        yield from ()

    def head(self, settings: "Settings") -> "Head | None":
        """What the model scores; None: it is a language model."""
        return None

    def resolve_labels(self, data: DataArguments, model: "McaModelConfig") -> DataArguments:
        """``data`` with what it leaves to the model, which has the head of this kind."""
        return data

    def extra_forward_passes(self, settings: "Settings") -> int:
        """Forward passes of all samples of a step that nothing is trained with."""
        return 0

    def reference(self, settings: "Settings") -> str | None:
        """The directory of a frozen model that stands beside the trained one; None: none does."""
        return None

    def trainer(
        self, settings: "Settings", reference: "VirtualModels | None", options: "TrainerOptions"
    ) -> "McaTrainer":
        """The trainer of a run on this rank; collective.

        Args:
            settings: The run.
            reference: The model of `reference`.
            options: What every trainer takes: the model, the arguments, the samples.
        """
        from mca_train.trainer.trainer import McaTrainer

        return McaTrainer(**options)


def data_format_problems(kind: str, settings: "Settings") -> Iterator[str]:
    """What a kind that reads columns alone says of shapes of rows."""
    if shapes := _named_formats(settings, ("text",)):
        yield f"{shapes}: mca-train {kind} reads columns, not shapes of rows; remove it"


def pair_format_problems(kind: str, settings: "Settings") -> Iterator[str]:
    """What a kind that reads pairs says of shapes that have one answer."""
    if shapes := _named_formats(settings, ("alpaca", "sharegpt")):
        yield f"{shapes}: mca-train {kind} reads the columns of pairs, or alpaca or sharegpt; remove it"


def _named_formats(settings: "Settings", known: Sequence[str]) -> str:
    """What ``data_format`` and the ``format`` of entries name beside ``known``, with the key."""
    data = settings.data
    asked = [("data_format", data.data_format), *(("format", entry.get("format")) for entry in data.datasets)]
    return ", ".join(sorted({f"{key} {each}" for key, each in asked if each not in (None, *known)}))


class AnswerTask(Task):
    """A kind whose samples are rows with answers: only answers count, and rows without one are left out.

    Attributes:
        wanted: What a row without a target lacks, in a warning.
    """

    required_content: ClassVar[str] = "an answer"

    @abstractmethod
    def encoder(
        self, names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", data: DataArguments, key: str
    ) -> "RowEncoder":
        """The function from a row with the columns ``names`` to tokens and targets of each of its sequences."""

    @abstractmethod
    def surely_has_target(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "Callable[[Row], bool]":
        """The function that says, without tokenizing a row, whether it surely has a target."""

    def numbers(self, names: Sequence[str], data: DataArguments, key: str) -> "RowNumbers | None":
        """The function from a row to the numbers that its sequences carry, such as its class; None: there are none."""
        return None

    def samples(
        self,
        rows: "datasets.Dataset",
        tokenizer: "PreTrainedTokenizerBase",
        data: DataArguments,
        key: str,
        images: "ImageReader | None" = None,
    ) -> "TokenDataset | PairDataset":
        """See `Task`."""
        from mca_train.data.image_rows import reject_images, without_decoding
        from mca_train.data.preferences import PairDataset
        from mca_train.data.samples import answer_sequences

        if images is None or not self.takes_images:
            reject_images(rows.column_names, data, f"{key}: mca-train {self.name}")
            encode = self.encoder(rows.column_names, tokenizer, data, key)
            numbers = self.numbers(rows.column_names, data, key)
            sequences = answer_sequences(rows, encode, data, key, self.required_content, numbers)
            return PairDataset(sequences) if self.sides else sequences
        known = self.image_rows(rows.column_names, images, data, tokenizer, key)
        encode = self.encoder(known.names, known.tokenizer, known.arguments, key)
        numbers = self.numbers(rows.column_names, data, key)  # read of the row itself, whatever its shape
        sequences = answer_sequences(
            without_decoding(rows), encode, data, key, self.required_content, numbers, known
        )
        return PairDataset(sequences) if self.sides else sequences

    def stream(
        self,
        rows: "FileRows",
        names: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        data: DataArguments,
        key: str,
        images: "ImageReader | None" = None,
    ) -> "IterableDataset[Sample]":
        """See `Task`."""
        from mca_train.data.image_rows import reject_images
        from mca_train.data.streams import AnswerStream

        known = None
        numbers = self.numbers(names, data, key)
        is_sure = self.surely_has_target(tokenizer, data)
        if images is None or images.config.vision is None or not self.takes_images:
            reject_images(names, data, f"{key}: mca-train {self.name}")
        else:
            known = self.image_rows(names, images, data, tokenizer, key)
            names, tokenizer, data = known.names, known.tokenizer, known.arguments
        encode = self.encoder(names, tokenizer, data, key)
        return AnswerStream(
            rows,
            encode,
            lambda row: is_sure(row) and not (known and known.has_images(row)),  # it is longer than its text
            data.seq_length,
            key,
            wanted=self.required_content,
            sides=self.sides,
            numbers=numbers,
            images=known,
        )
