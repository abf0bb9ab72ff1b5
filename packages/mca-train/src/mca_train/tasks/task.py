"""`Task` describes a kind of run; `AnswerTask` is for kinds that train on rows with answers, `ScoreTask` for heads.

A kind is a subclass in a module of this package and one line of `table`. ``data`` tokenizes rows, ``losses`` and
``trainer`` train; a kind selects among them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from mca_config.errors import UsageError
from mca_train.config.arguments import DataArguments, PairArguments, option
from mca_train.losses import options
from mca_train.losses.options import score_key_problems

if TYPE_CHECKING:
    from pathlib import Path

    import datasets
    from megatron.core.transformer import TransformerConfig
    from torch.utils.data import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from mca_config.model_config import McaModelConfig
    from mca_config.types import Values
    from mca_models import VirtualModels
    from mca_models.templates.classification_head import Head
    from mca_train.config.run_config import Settings
    from mca_train.data.encoding import RowEncoder, RowNumbers
    from mca_train.data.image_rows import ImageRows, RowContext
    from mca_train.data.samples import AnswerRows
    from mca_train.data.streams import FileRows, Row
    from mca_train.data.token_dataset import PairDataset, Sample, Samples, TokenDataset
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.trainer import McaTrainer


@dataclass(frozen=True, kw_only=True)
class Example:
    """Parts of the starter configuration that ``mca-train init`` writes for one kind.

    Attributes:
        rows: Description of the rows of its files.
        length: Meaning of ``seq_length``.
        learning_rate: A common one.
        task_lines: Lines of the kind's own keys.
        lora: Lines added to those of an adapter; None: no adapter.
    """

    rows: str = "the rows"
    length: str = "longest sequence; longer ones are cut"
    learning_rate: str = "1.0e-5"
    task_lines: str = ""
    lora: str | None = ""


class Task(ABC):
    """One kind of run.

    Attributes:
        name: Subcommand of ``mca-train``.
        summary: Its line in ``mca-train --help``.
        data_arguments: Keys of its model and files: `DataArguments`, or a subclass with more columns.
        task_arguments: Dataclass of keys that only this kind has; None: there are none.
        takes_images: True if its rows may have images.
        is_plain_text: True if its rows are plain text, in which tags place the images.
        unused_columns: Column keys that this kind does not read.
        example: Parts of its starter configuration.
        sides: Names of the sequences of a sample, each of up to ``seq_length`` tokens, which are the prefixes of its
            tensors; empty: a sample is one sequence.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    data_arguments: ClassVar[type[DataArguments]] = DataArguments
    task_arguments: ClassVar[type | None] = None
    takes_images: ClassVar[bool] = False
    is_plain_text: ClassVar[bool] = False
    unused_columns: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[Example] = Example()
    sides: ClassVar[tuple[str, ...]] = ()

    @property
    def sequences_per_sample(self) -> int:
        """Return the number of sequences that are compared with one another, or 1."""
        return max(1, len(self.sides))

    @property
    def task_keys(self) -> frozenset[str]:
        """Return the keys that not every kind has."""
        columns = {*self.data_arguments.__dataclass_fields__} - {*DataArguments.__dataclass_fields__}
        return frozenset(columns | set(getattr(self.task_arguments, "__dataclass_fields__", ())))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of its evaluation metrics besides the loss."""
        return ()

    def required_column(self, data: DataArguments) -> str | None:
        """Return the column that every file must have; None: files may differ in form."""
        return None

    def check_columns(self, names: Sequence[str], data: DataArguments, key: str) -> None:
        """Raise an error for rows without a column that `samples` needs; by default none is needed.

        It imports no library that reads rows, so that the error comes at once.

        Args:
            names: Columns of the rows.
            data: Names of columns.
            key: The argument that named the files, for errors.

        Raises:
            UsageError: A column is missing.
        """
        return None

    def needs_chat_template(self, names: Sequence[str], data: DataArguments, key: str, row: "Values") -> bool:
        """Return True if rows are surely conversations, which a template renders.

        Args:
            names: Columns of the rows.
            data: Names of columns.
            key: The argument that named the files, for errors.
            row: The first row; empty if it is not known.
        """
        return False

    @abstractmethod
    def samples(self, rows: "datasets.Dataset", context: "RowContext") -> "TokenDataset | PairDataset":
        """Return the tokenized samples of ``rows``: those of the files, one file after another."""

    def image_rows(self, names: Sequence[str], context: "RowContext") -> "ImageRows":
        """Return the reader of rows with the columns ``names``, some of which have images."""
        from mca_train.data.image_rows import ImageRows

        assert context.images is not None, "only a model with an image reader has rows with images"
        texts = self.is_plain_text
        return ImageRows(names, context.images, context.data, context.tokenizer, context.key, texts=texts)

    @abstractmethod
    def stream(
        self, rows: "FileRows", names: Sequence[str], context: "RowContext"
    ) -> "IterableDataset[Sample]":
        """Return the same samples, made during iteration; ``names`` are the rows' columns."""

    def indexed(
        self, prefix: "Path", tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "TokenDataset":
        """Return the samples of a Megatron indexed dataset, which holds tokens of plain text.

        Raises:
            UsageError: This kind does not train on plain text.
        """
        raise UsageError(
            f"datasets: {prefix} is an indexed dataset, which only mca-train pretrain reads, not {self.name}"
            "; set files of rows"
        )

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield an error for each setting that this kind does not support."""
        yield from ()

    def problems_in_megatron(self, settings: "Settings", megatron: "TransformerConfig") -> Iterator[str]:
        """Yield an error for each field of Megatron's configuration that this kind does not support."""
        yield from ()

    def problems_in_steps(self, samples: int) -> Iterator[str]:
        """Yield an error for steps of ``samples`` samples that this kind does not support."""
        yield from ()

    def problems_in_dataset(self, samples: "Samples") -> Iterator[str]:
        """Yield an error for training or evaluation samples that this kind does not support."""
        yield from ()

    def head(self, settings: "Settings") -> "Head | None":
        """Return the model's classification head; None: it is a language model."""
        return None

    def resolve_labels(self, data: DataArguments, model: "McaModelConfig") -> DataArguments:
        """Return ``data`` with the label names that the model has."""
        return data

    def extra_forward_passes(self, settings: "Settings") -> int:
        """Return the number of forward passes over a step's samples without a backward pass."""
        return 0

    def reference(self, settings: "Settings") -> str | None:
        """Return the directory of the frozen reference model; None: there is none."""
        return None

    def trainer(
        self, settings: "Settings", reference: "VirtualModels | None", options: "TrainerOptions"
    ) -> "McaTrainer":
        """Return the trainer of a run on this rank; collective.

        Args:
            settings: The run.
            reference: The model of `reference`.
            options: Options of every trainer: the model, the arguments, the samples.
        """
        from mca_train.trainer.trainer import McaTrainer

        return McaTrainer(**options)


def data_format_problems(kind: str, settings: "Settings") -> Iterator[str]:
    """Yield an error if a kind that reads only columns has a row format set."""
    if shapes := _named_formats(settings, ("text",)):
        yield f"{shapes}: mca-train {kind} reads columns, not row formats; remove it"


def _named_formats(settings: "Settings", known: Sequence[str]) -> str:
    """Return the keys and values of row formats that are set, except those in ``known``."""
    data = settings.data
    formats = [
        ("data_format", data.data_format),
        *(("format", entry.get("format")) for entry in data.datasets),
    ]
    return ", ".join(sorted({f"{key} {value}" for key, value in formats if value not in (None, *known)}))


class AnswerTask(Task):
    """Kind whose samples are rows with answers: only answers are targets, and rows without one are left out.

    Attributes:
        required_content: Content that a row without a target lacks, for a warning.
        needs_whole_rows: True if rows with a sequence above ``seq_length`` are left out instead of truncated.
    """

    required_content: ClassVar[str] = "an answer"
    needs_whole_rows: ClassVar[bool] = False

    @abstractmethod
    def encoder(
        self, names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", data: DataArguments, key: str
    ) -> "RowEncoder":
        """Return the function from a row with the columns ``names`` to tokens and targets of its sequences."""

    @abstractmethod
    def surely_has_target(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "Callable[[Row], bool]":
        """Return the function that decides without tokenizing that a row surely has a target."""

    def numbers(self, names: Sequence[str], data: DataArguments, key: str) -> "RowNumbers | None":
        """Return the function from a row to its sequences' values, such as a class; None: there are none."""
        return None

    def samples(self, rows: "datasets.Dataset", context: "RowContext") -> "TokenDataset | PairDataset":
        """Return the tokenized samples, as `Task.samples`."""
        from mca_train.data.formats import media_columns
        from mca_train.data.image_rows import without_decoding
        from mca_train.data.samples import answer_sequences
        from mca_train.data.token_dataset import PairDataset

        names = rows.column_names
        if {*names}.isdisjoint(media_columns(None, context.data)):
            context = context.without_text_reader()
        answers = self._answer_rows(names, context)
        if answers.images is not None:
            rows = without_decoding(rows)
        sequences = answer_sequences(rows, answers, context.data.preprocessing_num_workers)
        return PairDataset(sequences) if self.sides else sequences

    def stream(
        self, rows: "FileRows", names: Sequence[str], context: "RowContext"
    ) -> "IterableDataset[Sample]":
        """Return the streamed samples, as `Task.stream`."""
        from mca_train.data.streams import AnswerStream

        answers = self._answer_rows(names, context.without_text_reader())
        is_sure = self.surely_has_target(context.tokenizer, context.data)
        return AnswerStream(rows, answers, is_sure, sides=self.sides)

    def _answer_rows(self, names: Sequence[str], context: "RowContext") -> "AnswerRows":
        """Return the encoding of rows with the columns ``names``."""
        from mca_train.data.image_rows import reject_images
        from mca_train.data.samples import AnswerRows

        tokenizer, data, key, images = context.tokenizer, context.data, context.key, context.images
        reader, numbers = None, self.numbers(names, data, key)  # read from the row itself, in any format
        if images is None or not self.takes_images:
            model = "" if images is None else f" of a {images.config.model_type} model"
            reject_images(names, data, f"{key}: mca-train {self.name}{model}")
        else:
            reader = self.image_rows(names, context)
            names, tokenizer, data = reader.names, reader.tokenizer, reader.arguments
        return AnswerRows(
            encode=self.encoder(names, tokenizer, data, key),
            length=data.seq_length,
            key=key,
            wanted=self.required_content,
            numbers=numbers,
            images=reader,
            whole=self.needs_whole_rows,
        )


class PairTask(AnswerTask):
    """Kind whose rows have a better and a worse answer."""

    sides = ("chosen", "rejected")
    unused_columns = ("messages_column", "completion_column", "text_column")

    def check_columns(self, names: Sequence[str], data: DataArguments, key: str) -> None:
        """Raise an error for rows without two answers, as `Task.check_columns`."""
        from mca_train.data.formats import detect_pair_format

        detect_pair_format(names, cast("PairArguments", data), key)

    def needs_chat_template(self, names: Sequence[str], data: DataArguments, key: str, row: "Values") -> bool:
        """Return True for lists of messages and converted formats, as `Task.needs_chat_template`."""
        from mca_train.data.formats import detect_pair_format

        pair = cast("PairArguments", data)
        is_converted = detect_pair_format(names, pair, key) is not None
        return is_converted or isinstance(row.get(pair.chosen_column), list)

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield an error for row formats with one answer."""
        yield from super().problems(settings)
        if shapes := _named_formats(settings, ("alpaca", "sharegpt")):
            yield f"{shapes}: mca-train {self.name} reads the columns of pairs, or alpaca or sharegpt; remove it"


@dataclass(kw_only=True)
class ReferenceArguments:
    """Reference model."""

    reference_model_name_or_path: str | None = option(
        "Directory of the reference; None: the initial model (with LoRA: without adapter)."
    )


def adapter_reference_problems(settings: "Settings", arguments: ReferenceArguments) -> Iterator[str]:
    """Yield an error for each setting that excludes the model without its adapter as the reference."""
    if arguments.reference_model_name_or_path is not None or not settings.lora.is_enabled:
        return
    yield from options.adapter_reference_problems(settings.training)
    if settings.lora.lora_modules_to_save:
        yield (
            "lora_modules_to_save trains parts of the base model, which then cannot be the reference; set "
            "reference_model_name_or_path, or remove it"
        )


class ScoreTask(AnswerTask):
    """Kind whose model has a sequence-classification head."""

    takes_images = True

    def _answer_rows(self, names: Sequence[str], context: "RowContext") -> "AnswerRows":
        """Return the encoding of rows; those of a text model are read by their columns alone."""
        return super()._answer_rows(names, context.without_text_reader())

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
