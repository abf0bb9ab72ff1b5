"""The levels of the loggers are set here, those of this project and those of the libraries.

The log of losses and speeds is something else: it is written in ``metrics``.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mca_train.launch.environment import is_first

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


def set_log_levels(training: "TrainingArguments") -> None:
    """Set what this project says to ``log_level``, on ranks but the first to ``log_level_replica``, where asked."""
    from transformers.training_args import trainer_log_levels

    first = is_first()
    level = training.log_level if first else training.log_level_replica
    if level == ("passive" if first else "warning"):
        return
    for name in ("mca_train", "mca_models", "mca_config"):
        logging.getLogger(name).setLevel(trainer_log_levels[level] if level != "passive" else logging.INFO)


def quiet_libraries(*, first: bool) -> None:
    """One voice: rank 0 logs what this project says; the libraries only warn, and not about themselves."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING if first else logging.ERROR)
    for name in ("mca_train", "mca_models", "mca_config"):
        logging.getLogger(name).setLevel(logging.INFO if first else logging.ERROR)
    warnings.filterwarnings("ignore")


@contextmanager
def silent_arguments() -> Iterator[None]:
    """Keep `mca_config` from logging again what it has logged about the same arguments."""
    log = logging.getLogger("mca_config")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)
