"""Commands about data: ``mca-train data`` shows a run's samples, ``mca-train tokenize`` writes an indexed dataset.

The preview has counts, lengths and decoded samples. Neither loads the model.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mca_config.errors import McaError, UsageError, raise_problems, raising_usage_errors
from mca_config.printable import counted
from mca_config.types import Values
from mca_train.batching.packing import PackedDataset
from mca_train.config.model import model_config
from mca_train.config.run_config import Settings, with_directories
from mca_train.data.encoding import WarningRecorder, block_tokenizer
from mca_train.data.indexed import write_indexed
from mca_train.data.streams import open_rows
from mca_train.data.token_dataset import IGNORED, Sample
from mca_train.run.early_rules import data_files
from mca_train.run.inputs import image_reader, load_tokenizer
from mca_train.run.logs import quiet_libraries
from mca_train.run.settings import make_settings
from mca_train.tasks import TASKS, infer_task
from mca_train.tasks.load import load_first, load_mixture, load_tokenized
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.mixture import Mixture
    from mca_train.data.token_dataset import PairDataset, TokenDataset

OPEN, CLOSE = "⟦", "⟧"
_BARS, _WIDEST, _SHOWN, _LONGEST = 10, 40, 3, 4000
_ROWS_OF_A_STREAM = 1000


def render_preview(
    samples: "TokenDataset | PairDataset | Mixture", tokenizer: "PreTrainedTokenizerBase"
) -> str:
    """Render the preview of ``samples``, of which the first, the last and one in between are decoded."""
    lengths = np.asarray(samples.lengths, np.int64)
    lengths = lengths.reshape(len(samples), -1)
    sequences = lengths.reshape(-1)
    targets = sum(_count_targets(samples[index]) for index in range(len(samples)))
    pairs = lengths.shape[1] > 1
    lines = [
        f"{counted(len(samples), 'pair' if pairs else 'sample')}, {counted(int(sequences.sum()), 'token')}, "
        f"of which {targets:,} are targets",
        f"tokens of a {'sequence' if pairs else 'sample'}: {int(sequences.min())} to {int(sequences.max())}, "
        f"median {int(np.median(sequences))}, mean {sequences.mean():.0f}",
        "",
        *length_histogram(sequences),
    ]
    indices = dict.fromkeys(np.linspace(0, len(samples) - 1, min(_SHOWN, len(samples))).astype(int).tolist())
    for index in indices:
        lines += ["", f"sample {index}, targets between {OPEN} and {CLOSE}:"]
        lines += [text for side in _sequences(samples[index]) for text in render_sequence(*side, tokenizer)]
    return "\n".join(lines) + "\n"


def length_histogram(lengths: NDArray[np.int64]) -> Iterator[str]:
    """Yield one bar per range of lengths."""
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.linspace(low, high + 1, _BARS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    width = len(str(high))
    for first, stop, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * (-(-int(count) * _WIDEST // int(counts.max())))
        yield f"  {first:>{width}} - {stop - 1:>{width}}  {bar:<{_WIDEST}}  {count:,}"


def render_sequence(
    ids: list[int], is_target: list[bool], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """Yield the lines of a decoded sequence with marked targets, shortened if it is very long."""
    text = ""
    for targets, tokens in _group_targets(ids, is_target):
        part = str(tokenizer.decode(tokens))
        text += f"{OPEN}{part}{CLOSE}" if targets else part
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    yield from (f"  | {line}" for line in text.split("\n"))


def _group_targets(ids: Iterable[int], is_target: Iterable[bool]) -> Iterator[tuple[bool, list[int]]]:
    run: list[int] = []
    before = False
    for token, counts in zip(ids, is_target, strict=True):
        if run and counts != before:
            yield before, run
            run = []
        run.append(token)
        before = counts
    if run:
        yield before, run


def _sequences(sample: Sample) -> Iterator[tuple[list[int], list[bool]]]:
    for side in ("", "chosen_", "rejected_"):
        if f"{side}input_ids" in sample:
            labels = sample[f"{side}labels"]
            yield sample[f"{side}input_ids"].tolist(), (labels != IGNORED).tolist()


def _count_targets(sample: Sample) -> int:
    """Count the trained tokens; the first token of a sequence is never trained."""
    return sum(
        int((values[1:] != IGNORED).sum()) for name, values in sample.items() if name.endswith("labels")
    )


def print_data(task: Task | None, values: Values, where: str) -> int:
    """Print counts, lengths, fill and samples of a configuration's data.

    Args:
        task: The kind of run; None: inferred from the keys.
        values: Keys and values of the configuration.
        where: Their origin for error messages.
    """
    quiet_libraries(first=True)
    task = task or infer_task(values)
    settings = make_settings(task, with_directories(values, only="tokenizer"), where)
    raise_problems(data_files(task, settings), where, kind=UsageError)
    with raising_usage_errors():
        tokenizer = load_tokenizer(settings)
    warnings = WarningRecorder()
    logger = logging.getLogger("mca_train")
    logger.addHandler(warnings)
    logger.propagate = False
    try:
        _print(task, settings, tokenizer, warnings)
    finally:
        logger.removeHandler(warnings)
        logger.propagate = True
    return 0


def _print(
    task: Task, settings: Settings, tokenizer: "PreTrainedTokenizerBase", warnings: WarningRecorder
) -> None:
    args, data = settings.training, settings.data
    seed = args.seed if args.data_seed is None else args.data_seed
    if data.streaming:
        rows = min(data.max_train_samples or _ROWS_OF_A_STREAM, _ROWS_OF_A_STREAM)
        data = replace(data, max_train_samples=rows)
        sys.stdout.write(f"streaming: the first {counted(rows, 'row')}\n")
    images = None
    if Path(data.model_name_or_path).is_dir():  # otherwise rows with images are an error
        model = model_config(data.model_name_or_path)
        images, data = image_reader(settings, model), task.resolve_labels(data, model)
    for key, files in (
        ("train_file", data.train_file),
        ("datasets", data.datasets),
        ("eval_file", data.eval_file),
    ):
        if not files:
            continue
        samples: Mixture | TokenDataset | PairDataset
        if key == "datasets":
            mixture = samples = load_mixture(task, tokenizer, data, seed=seed, images=images)
            warnings.lines.append(mixture.describe())
        elif key == "train_file" and data.streaming:
            samples = load_first(task, [str(file) for file in files], tokenizer, data, images=images)
        else:
            samples = load_tokenized(
                task,
                [str(file) for file in files],
                tokenizer,
                data,
                evaluation=key == "eval_file",
                images=images,
            )
        sys.stdout.write(f"\n{key}, mca-train {task.name}\n" + render_preview(samples, tokenizer))
        if args.sequence_packing:
            length, parts = data.seq_length * task.sequences_per_sample, args.context_parallel_size or 1
            in_order = key == "eval_file" or args.train_sampling_strategy != "random"
            packs = PackedDataset(
                samples,
                length,
                multiple=2 * parts if parts > 1 else 1,
                seed=None if in_order else seed,
                name=key,
            )
            warnings.lines.append(f"packing: {packs.fill}")
        sys.stdout.write("".join(["\n", *(f"{line}\n" for line in warnings.lines)]) if warnings.lines else "")
        warnings.lines.clear()


_FLAG = "output_prefix"
_ROWS_AT_ONCE = 256


def tokenize(values: Values, where: str, output_prefix: str | None) -> int:
    """Tokenize ``train_file``, each row a document that ends with the end-of-sequence token.

    Args:
        values: Keys and values of a pre-training run.
        where: Their origin for error messages.
        output_prefix: Of the dataset's two files; None: the configuration has it.
    """
    quiet_libraries(first=True)
    prefix = values.get(_FLAG) if output_prefix is None else output_prefix
    values = {key: value for key, value in values.items() if key != _FLAG}
    if not isinstance(prefix, str):
        raise UsageError(
            "mca-train tokenize needs --output_prefix: <prefix>.bin and <prefix>.idx are written"
        )
    task = TASKS["pretrain"]
    settings = make_settings(task, with_directories(values, only="tokenizer"), where)
    raise_problems(data_files(task, settings), where, kind=UsageError)
    if settings.data.datasets:
        raise UsageError(f"{where}: mca-train tokenize reads train_file, not datasets; set train_file")
    with raising_usage_errors():
        tokenizer = load_tokenizer(settings)

    count, tokens = write_indexed(Path(prefix), _documents(settings, tokenizer), len(tokenizer))
    sys.stdout.write(
        f"wrote {prefix}.bin and {prefix}.idx: {counted(count, 'document')}, {counted(tokens, 'token')}\n"
    )
    return 0


def _vision(model: str) -> Values | None:
    """Return the vision fields of the configuration of ``model``; None: it has none, or cannot be read."""
    try:
        return model_config(model).vision_fields
    except McaError:  # a directory of a tokenizer alone, or a model that only Megatron trains
        return None


def _documents(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Sequence[int]]:
    data, key = settings.data, "train_file"
    vision = _vision(data.model_name_or_path)
    rows, names = open_rows(data.train_file, key, data, data.text_column, seed=None, vision=vision)
    tokens_of = block_tokenizer(names, tokenizer, data, key, vision)
    left = iter(rows)
    while some := list(islice(left, _ROWS_AT_ONCE)):
        yield from tokens_of(some, [row.place for row in some])
