"""Results of a dry run's processes reach the process that started them."""

import threading

import pytest

from mca_config.errors import McaError
from mca_train.dry_run.stages import _in_processes
from mca_train.dry_run.step import StepNeeds


def test_an_error_that_cannot_be_sent_is_told() -> None:
    def fails() -> StepNeeds:
        error = ValueError("no kernel")
        error.held = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(McaError, match=r"^ValueError: no kernel$"):
        _in_processes([fails])


def test_any_other_error_is_itself() -> None:
    def fails() -> StepNeeds:
        raise KeyError("layer")

    with pytest.raises(KeyError, match="layer"):
        _in_processes([fails])
