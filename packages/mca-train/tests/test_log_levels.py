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


def test_a_tokenizer_of_a_type_that_transformers_lacks_has_no_warning(run, tmp_path, monkeypatch):
    import transformers

    from mca_train.run.inputs import load_tokenizer

    run()
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace("qwen3", "not_in_transformers"))
    shown = []
    log = logging.getLogger("transformers.configuration_utils")
    monkeypatch.setattr(
        log, "handle", lambda record: log.filter(record) and shown.append(record.getMessage())
    )
    monkeypatch.setattr(log, "level", logging.WARNING)
    transformers.PreTrainedConfig.from_pretrained(tmp_path / "model")
    assert len(shown) == 1 and "You are using a model of type" in shown[0]
    paths = SimpleNamespace(tokenizer_name_or_path=None, model_name_or_path=str(tmp_path / "model"))
    assert len(load_tokenizer(SimpleNamespace(data=paths))) > 200
    assert len(shown) == 1
