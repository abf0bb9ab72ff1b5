"""What the ranks of a run share and is made once: the tokenizer and the samples."""

import logging
import os
from dataclasses import dataclass
from typing import Any

from mca_config.checks import positions_exceeded
from mca_config.errors import UsageError, checking_usage
from mca_train.checkpoint.output_lock import OutputLock
from mca_train.config.model import model_config
from mca_train.config.run_config import Settings
from mca_train.data.load import Kind, load_tokenized
from mca_train.run.checks import (
    require_place,
    require_run,
    require_runnable,
    require_start,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What ranks share: made once before they are forked."""

    kind: Kind
    settings: Settings
    tokenizer: Any
    train: Any
    evaluation: Any
    lock: OutputLock


def prepare_inputs(kind: Kind, settings: Settings, lock: OutputLock) -> Inputs:
    """The lock of ``output_dir``, tokenizer and data."""
    with checking_usage():
        require_run(kind, settings)
        require_place(settings)
        require_runnable(settings)
    if os.environ.get("RANK", "0") == "0":
        lock.take()
    with lock.kept():
        return read_inputs(kind, settings, lock)


def read_inputs(kind: Kind, settings: Settings, lock: OutputLock) -> Inputs:
    """Tokenizer and samples of a run whose place is taken."""
    with checking_usage():
        require_start(settings)
        tokenizer = load_tokenizer(settings)
    logger.info("reading %s", ", ".join(settings.data.train_file))
    train = _training_data(kind, settings, tokenizer)
    longest = settings.data.seq_length if settings.data.streaming else int(train.lengths.max())
    told = positions_exceeded(model_config(settings.data.model_name_or_path), longest)
    if told:
        logger.warning("seq_length %d: %s", settings.data.seq_length, told)
    evaluation = None
    if settings.data.eval_file:
        evaluation = load_tokenized(kind, settings.data.eval_file, tokenizer, settings.data, evaluation=True)
    return Inputs(kind, settings, tokenizer, train, evaluation, lock)


def _training_data(kind: Kind, settings: Settings, tokenizer: Any) -> Any:
    files = settings.data.train_file
    if settings.data.streaming:
        from mca_train.data.streams import load_stream

        args = settings.training
        seed = args.seed if args.data_seed is None else args.data_seed
        in_order = str(args.train_sampling_strategy) == "sequential"
        return load_stream(kind, files, tokenizer, settings.data, seed=None if in_order else seed)
    train = load_tokenized(kind, files, tokenizer, settings.data)
    logger.info("%d training samples of %d tokens", len(train), int(train.lengths.sum()))
    return train


def load_tokenizer(settings: Settings) -> Any:
    """The tokenizer that the settings name.

    Raises:
        UsageError: There is none.
    """
    from transformers import AutoTokenizer

    path = settings.data.tokenizer_name_or_path or settings.data.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"no tokenizer in {path} (set tokenizer_name_or_path): {reason}") from error
