"""Log levels of mca and of libraries; ``metrics`` writes the log of losses and speeds."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mca_train.launch.environment import is_first

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


def set_log_levels(training: "TrainingArguments") -> None:
    """Set the loggers of mca to ``log_level`` on rank 0 and to ``log_level_replica`` on other ranks, if set."""
    from transformers.training_args import trainer_log_levels

    first = is_first()
    level = training.log_level if first else training.log_level_replica
    if level == ("passive" if first else "warning"):
        return
    for name in ("mca_train", "mca_models", "mca_config"):
        logging.getLogger(name).setLevel(trainer_log_levels[level] if level != "passive" else logging.INFO)


def quiet_libraries(*, first: bool) -> None:
    """Log mca's messages on rank 0 only, and from libraries only warnings of the logging module."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING if first else logging.ERROR)
    for name in ("mca_train", "mca_models", "mca_config"):
        logging.getLogger(name).setLevel(logging.INFO if first else logging.ERROR)
    warnings.filterwarnings("ignore")


@contextmanager
def without_model_type_warning() -> Iterator[None]:
    """Suppress the warning of transformers, while it loads a tokenizer, about a model type that it does not have.

    It says that the type is not supported, but only mca loads the model, and checks the type itself.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("You are using a model of type")

    log = logging.getLogger("transformers.configuration_utils")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@contextmanager
def silent_arguments() -> Iterator[None]:
    """Suppress repeated log lines of `mca_config` about the same arguments."""
    log = logging.getLogger("mca_config")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)
