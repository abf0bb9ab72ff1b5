"""Secrets of addresses are in nothing that a failing command prints, logs or writes."""

import json
import logging
from types import SimpleNamespace

import datasets
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_train.cli import main
from mca_train.data.image_files import ImageFile
from mca_train.launch.failures import report_failure
from mca_train.run import record

pytestmark = pytest.mark.usefixtures("own_threads")

SECRET = "S3CR3T"
WEB = f"https://me:{SECRET}@127.0.0.1:1/a.jsonl?sig={SECRET}"
FAILING = f"failing://me:{SECRET}@host/a.jsonl"
ADDRESSES = (
    *("train_file", "eval_file", "model_name_or_path", "tokenizer_name_or_path", "adapter_name_or_path"),
    *("resume_from_checkpoint", "additional_configs", "deepspeed", "no_such_key"),
)


class Failing(MemoryFileSystem):
    """Files whose client quotes addresses and headers in its errors."""

    protocol = "failing"

    def info(self, path, **_):
        raise OSError(
            f"401 for {WEB}; Max retries exceeded with url: /a?{SECRET} (Authorization: Bearer {SECRET})"
        )

    _open = info


@pytest.fixture(autouse=True)
def _failing_addresses(tmp_path, monkeypatch):
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def require_no_secret(folder, capsys, caplog):
    """Returns what was printed and logged, in which there is none, and in no file either."""
    found = "".join([*capsys.readouterr(), caplog.text])
    assert SECRET not in found
    written = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.yaml"]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    return found


COMMANDS = {"sft": (), "plan": (), "plan --json": ("--json",), "data": ()}


@pytest.mark.parametrize("command", COMMANDS)
def test_problems_of_a_configuration_have_no_secrets(command, run, tmp_path, capsys, caplog):
    flags = COMMANDS[command]
    for changes in (
        {"hub_token": [SECRET, SECRET]},
        *({key: WEB} for key in ADDRESSES),
        {"datasets": [{"p": WEB}]},
    ):
        main([command.split()[0], run(**changes), *flags])
        require_no_secret(tmp_path, capsys, caplog)


FAILS = {
    "train_file": {"train_file": FAILING},
    "eval_file": {"eval_file": FAILING},
    "datasets": {"train_file": ..., "datasets": [{"path": FAILING}]},
    "streaming": {"train_file": [FAILING], "streaming": True, "max_steps": 1},
}


@pytest.mark.parametrize(
    ("command", "key"),
    [*(("sft", key) for key in FAILS), *(("data", key) for key in FAILS), ("tokenize", "train_file")],
)
def test_what_a_client_says_has_no_secrets(command, key, run, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    words = ["--output_prefix", str(tmp_path / "tokens")] if command == "tokenize" else []
    assert main([command, run(**FAILS[key]), *words]) != 0
    reported = "failing://me:...@host/a.jsonl cannot be fetched: 401 for https://...@127.0.0.1:1/a.jsonl"
    assert reported in require_no_secret(tmp_path, capsys, caplog)


def test_images_that_cannot_be_fetched_are_named_without_secrets():
    with pytest.raises(
        McaError, match=r"^image: failing://me:...@host/a.jsonl cannot be fetched: 401"
    ) as caught:
        ImageFile(FAILING).size()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("reports", [True, False])
def test_what_a_failing_rank_reports_has_no_secrets(reports, tmp_path, capsys, caplog):
    def target():
        raise RuntimeError(f"cannot open {WEB}")

    assert report_failure(target, tmp_path if reports else None, 0) == 1
    if reports:
        assert "https://...@127.0.0.1:1/a.jsonl" in (tmp_path / "report_0.json").read_text()
    require_no_secret(tmp_path, capsys, caplog)


def test_the_record_of_a_run_has_no_secrets(tmp_path, capsys, caplog):
    values = {"train_file": [WEB], "datasets": [{"path": WEB}], "hub_token": SECRET, "seed": 1}
    settings = SimpleNamespace(training=SimpleNamespace(output_dir=str(tmp_path)), values=values)
    record.write_record(
        SimpleNamespace(
            settings=settings, task=SimpleNamespace(name="sft"), world_size=1, layout=ParallelLayout()
        )
    )
    written = json.loads((tmp_path / "run.json").read_text())["configuration"]
    assert written["train_file"] == ["https://...@127.0.0.1:1/a.jsonl"] and written["seed"] == 1
    require_no_secret(tmp_path, capsys, caplog)
