"""Log levels of mca's parts on each rank."""

import logging
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("rank", "given", "level"),
    [
        ("0", {}, None),
        ("0", {"log_level": "warning"}, logging.WARNING),
        ("0", {"log_level": "debug"}, logging.DEBUG),
        ("1", {"log_level": "debug"}, None),
        ("1", {"log_level_replica": "info"}, logging.INFO),
    ],
)
def test_log_levels_are_followed(rank, given, level, monkeypatch):
    from mca_train.run.logs import set_log_levels

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(logging.getLogger("mca_train"), "level", -7)
    set_log_levels(SimpleNamespace(**({"log_level": "passive", "log_level_replica": "warning"} | given)))
    assert logging.getLogger("mca_train").level == (-7 if level is None else level)
    for name in ("mca_models", "mca_config"):
        logging.getLogger(name).setLevel(logging.NOTSET)
