"""Tokenizer and samples of a run, which are created once for all ranks.

`train.make_trainer` creates the model on each rank.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.checks import position_problem
from mca_config.errors import UsageError, raise_problems, raising_usage_errors
from mca_config.files import read_json
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.redaction import redacted
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.config.run_config import Settings
from mca_train.data.image_rows import ImageReader
from mca_train.data.streams import AnswerStream
from mca_train.run.early_rules import growth_problem, require_start
from mca_train.run.logs import without_model_type_warning
from mca_train.run.rules import Run
from mca_train.tasks.load import load_mixture, load_stream, load_tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_train.data.token_dataset import Samples

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """Objects that all ranks share, created once before the fork."""

    run: Run
    tokenizer: "PreTrainedTokenizerBase"
    train: "Samples"
    evaluation: "Samples | None"
    lock: OutputLock


def prepare_inputs(run: Run, lock: OutputLock) -> Inputs:
    """Lock ``output_dir`` and read tokenizer and data."""
    if os.environ.get("RANK", "0") == "0":
        lock.take()
    return read_inputs(run, lock)


def read_inputs(run: Run, lock: OutputLock) -> Inputs:
    """Read tokenizer and samples of a run whose ``output_dir`` is locked."""
    data = run.settings.data
    with raising_usage_errors():
        require_start(run.settings)  # again: another run may have ended there before the lock was taken
        tokenizer = load_tokenizer(run.settings)
        if problem := growth_problem(run.settings, len(tokenizer), run.model.vocab_size):
            raise UsageError(problem)  # `check` counts only the tokens of tokenizer.json
    paths = data.train_file or [str(entry.get("path")) for entry in data.datasets]
    logger.info("reading %s", ", ".join(map(redacted, paths)))
    images = image_reader(run.settings, run.model)
    train, longest = _training_data(run, tokenizer, images)
    if problem := position_problem(run.model, longest):
        if run.model.embedding.learned_positions:
            raise UsageError(f"seq_length {data.seq_length}: {problem}")
        logger.warning("seq_length %d: %s", data.seq_length, problem)
    evaluation = None
    if data.eval_file:
        evaluation = load_tokenized(run.task, data.eval_file, tokenizer, data, evaluation=True, images=images)
    sources = "datasets" if data.datasets else "train_file"
    for key, samples in ((sources, train), ("eval_file", evaluation)):
        raise_problems([] if samples is None else run.task.problems_in_dataset(samples), key)
    return Inputs(run, tokenizer, train, evaluation, lock)


def image_reader(settings: Settings, config: McaModelConfig) -> "ImageReader":
    """Return the image reader of the model."""
    data = settings.data
    paths = (data.model_name_or_path, data.tokenizer_name_or_path)
    return ImageReader(config=config, directories=tuple(Path(path) for path in paths if path))


def _training_data(
    run: Run, tokenizer: "PreTrainedTokenizerBase", images: "ImageReader"
) -> "tuple[Samples, int]":
    """Return the samples, and the length of the longest sequence in tokens."""
    data, args = run.settings.data, run.settings.training
    if data.streaming:
        seed = args.seed if args.data_seed is None else args.data_seed
        in_order = str(args.train_sampling_strategy) == "sequential"
        order = None if in_order else seed
        rows = load_stream(run.task, data.train_file, tokenizer, data, seed=order, images=images)
        if isinstance(rows, AnswerStream):
            rows.rows.require_target()
        return rows, data.seq_length
    if data.datasets:
        seed = args.seed if args.data_seed is None else args.data_seed
        mixture = load_mixture(run.task, tokenizer, data, seed=seed, images=images)
        logger.info("%s", mixture.describe())
        return mixture, int(mixture.lengths.max())
    train = load_tokenized(run.task, data.train_file, tokenizer, data, images=images)
    logger.info("%s of %d tokens", counted(len(train), "training sample"), int(train.lengths.sum()))
    return train, int(train.lengths.max())


def load_tokenizer(settings: Settings) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the settings.

    Raises:
        UsageError: The tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    path = settings.data.tokenizer_name_or_path or settings.data.model_name_or_path
    try:
        with without_model_type_warning():
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = redacted(" ".join(str(error).split()))[:200]
        raise UsageError(f"no tokenizer in {path} (set tokenizer_name_or_path): {reason}") from error
    file = Path(path) / "chat_template.json"  # of processors, which tokenizers do not read
    if tokenizer.chat_template is None and file.is_file():
        template = read_json(file, "a processor's chat template").get("chat_template")
        if not isinstance(template, str):
            raise UsageError(f"{file}: 'chat_template' is {template!r:.80}; expected a template's text")
        tokenizer.chat_template = template
    return tokenizer
