"""Files at addresses through the real clients of S3 and Google's storage, and runs reported through real clients.

    UV_PROJECT_ENVIRONMENT=.venv-clients uv run --no-default-groups --group clients \
        pytest -n 0 integration_tests/cli/test_clients.py

The clients speak to a server on loopback, or write their files offline. Without a client its tests are skipped.
"""

import gzip
import importlib.util
import json
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_runs import config, logs
from forked_cli import launched
from object_store import OF_THE_USER, Store, serving

pytestmark = pytest.mark.ranks


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {package}, which is in the group clients")


SCHEMES = [pytest.param("s3", marks=needs("s3fs")), pytest.param("gs", marks=needs("gcsfs"))]
TEXTS = [f"text {number}" for number in range(400)]


@pytest.fixture
def store(tmp_path, monkeypatch):
    import datasets
    import fsspec

    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "cache"))
    with serving(
        Store({"bucket/rows/a.jsonl": rows(TEXTS), "bucket/a.jsonl.gz": gzip.compress(rows(TEXTS))})
    ) as store:
        for name in OF_THE_USER:
            monkeypatch.delenv(name, raising=False)
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, loopback_alone(getattr(socket.socket, name)))
        yield store
    for client in ("s3", "gs"):
        if client in fsspec.registry:
            fsspec.get_filesystem_class(client).clear_instance_cache()


def loopback_alone(connect: Callable[..., Any]) -> Callable[..., Any]:
    """``connect`` for addresses of this machine; others fail the test, whatever a client makes of the error."""

    def checked(own: socket.socket, address: Any) -> Any:
        if own.family != socket.AF_UNIX and address[0] != "127.0.0.1":
            pytest.fail(f"a client asks {address}")
        return connect(own, address)

    return checked


def rows(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def read(address: str) -> list[str]:
    import fsspec

    from mca_train.config.arguments import DataArguments
    from mca_train.data.files import load_rows

    fsspec.get_filesystem_class(address.partition("://")[0]).clear_instance_cache()  # as a new process
    return list(load_rows([address], "train_file", DataArguments(model_name_or_path="m"))["text"])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["rows/a.jsonl", "a.jsonl.gz"])
def test_a_file_is_fetched_once_until_it_is_replaced(scheme, name, store):
    for _ in range(2):
        assert read(f"{scheme}://bucket/{name}") == TEXTS
    assert store.bodies(name) == 1
    store.objects[f"bucket/{name}"] = gzip.compress(rows(["new"])) if name.endswith("gz") else rows(["new"])
    assert read(f"{scheme}://bucket/{name}") == ["new"]
    assert store.bodies(name) == 2


WRONG = {
    "key": ("bucket/none.jsonl", {}, ": there is no such file or bucket"),
    "bucket": ("none/a.jsonl", {}, ": there is no such file or bucket"),
    "rights": (
        "bucket/rows/a.jsonl",
        {"refuses": True},
        " cannot be fetched: .*Forbidden.*; check the URL, the cred",
    ),
    "cut": ("bucket/rows/a.jsonl", {"cut_at": 20}, " cannot be fetched: .*received 20 of .* bytes"),
}
"""Google's client tries for half a minute when it is cut off."""


@pytest.mark.parametrize(
    ("scheme", "name", "changes", "printed"),
    [
        pytest.param(*scheme.values, *case, marks=scheme.marks, id=f"{scheme.values[0]}-{name}")
        for scheme in SCHEMES
        for name, case in WRONG.items()
        if (*scheme.values, name) != ("gs", "cut")
    ],
)
def test_what_cannot_be_fetched_is_one_line(scheme, name, changes, printed, store):
    from mca_config.errors import McaError

    vars(store).update(changes)
    with pytest.raises(McaError, match=f"^train_file: {scheme}://{name}{printed}") as caught:
        read(f"{scheme}://{name}")
    assert "\n" not in str(caught.value)


@needs("gcsfs")
def test_nobody_is_asked_who_the_user_is(store):
    import google.auth

    with pytest.raises(google.auth.exceptions.DefaultCredentialsError):
        google.auth.default()


@needs("aiohttp")
def test_an_address_with_a_signature_is_read_and_not_shown(store):
    from mca_config.errors import McaError
    from mca_train.config.arguments import DataArguments
    from mca_train.data.streams import open_rows

    query = "?X-Amz-Signature=secret"
    address = f"{store.address}/bucket/rows/a.jsonl"
    assert read(address + query) == TEXTS
    arguments = DataArguments(model_name_or_path="m")
    found, _ = open_rows([address + query], "train_file", arguments, "text", seed=None)
    assert [row["text"] for row in found] == TEXTS
    for changes, printed in (
        ({"objects": {}}, ": there is no such file or bucket, or no right"),
        ({"refuses": True}, " cannot be fetched: 403, .*; check the URL, the credentials"),
        ({"address": "http://127.0.0.1:1"}, " cannot be fetched: Cannot connect to host 127.0.0.1:1"),
    ):
        vars(store).update(changes)
        address = f"{store.address}/bucket/rows/a.jsonl"
        with pytest.raises(McaError, match=f"^train_file: {address}{printed}") as caught:
            read(address + query)
        assert "secret" not in str(caught.value)


@needs("aiohttp")
def test_an_address_behind_a_proxy_is_asked_through_it(store, monkeypatch):
    from mca_train.data.urls import read_url, require_readable

    monkeypatch.setenv("http_proxy", store.address)
    address = "http://rows.invalid/bucket/rows/a.jsonl"
    require_readable(address, "train_file")
    assert read_url(address) == rows(TEXTS)
    assert read(address) == TEXTS


@needs("s3fs")
def test_a_connection_that_ends_in_the_middle_is_taken_up_where_it_ended(store):
    store.cut_at = 4000
    assert read("s3://bucket/rows/a.jsonl") == TEXTS
    assert [span for _, _, span in store.asked if span] == ["bytes=4000-", "bytes=8000-"]


def trained(folder: Path, name: str, **changes: Any) -> list[float]:
    done = launched(config(folder, name, tensor_model_parallel_size=2, max_steps=3, **changes))
    assert done.returncode == 0, done.stderr
    assert not [word for word in ("Traceback", "never retrieved", "credentials") if word in done.stderr], (
        done.stderr
    )
    return [log["loss"] for log in logs(folder / name) if "loss" in log]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_train_on_addresses_as_on_files(scheme, store, folder):
    store.objects["bucket/train.jsonl"] = (folder / "train.jsonl").read_bytes()
    address, local = f"{scheme}://bucket/train.jsonl", str(folder / "train.jsonl")
    streaming = {"streaming": True, "dataloader_num_workers": 1}
    plain = trained(folder, f"{scheme}-local", train_file=local, **streaming)
    assert trained(folder, f"{scheme}-stream", train_file=address, **streaming) == plain
    for number, path in enumerate((local, address)):
        entries = {"train_file": [], "datasets": [{"path": path}]}
        found = trained(folder, f"{scheme}-mixture-{number}", **entries)
        plain = found if number == 0 else plain
    assert found == plain


@needs("s3fs")
def test_the_command_names_a_bucket_that_is_not_there_and_a_connection_that_ends(store, folder):
    for name, changes, printed in (
        ("none", {}, "there is no such file or bucket"),
        ("bucket", {"cut_at": 20}, "received 20 of"),
    ):
        vars(store).update(changes)
        done = launched(config(folder, name, train_file=f"s3://{name}/rows/a.jsonl"))
        assert done.returncode == 1
        (line,) = [line for line in done.stderr.splitlines() if "s3://" in line and "error" in line]
        assert printed in line and "Traceback" not in done.stderr


def reported(folder: Path, name: str, to: str) -> "subprocess.CompletedProcess[str]":
    """Two pipeline stages, the first of which reports; the last evaluation comes after the last step."""
    changes = {"report_to": to, "eval_file": str(folder / "eval.jsonl"), "run_name": "a run"}
    done = launched(config(folder, name, pipeline_model_parallel_size=2, **changes))
    assert done.returncode == 0, done.stderr
    return done


def values_logged(folder: Path, name: str) -> dict[str, float]:
    """The last value of each name in the run's own log."""
    found: dict[str, float] = {}
    for log in logs(folder / name):
        found |= log
    return found


@needs("wandb")
def test_wandb_has_every_step_and_the_last_evaluation(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    reported(folder, "wandb", "wandb")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file.read_bytes()))
    history = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    wanted = values_logged(folder, "wandb")
    losses = [log["loss"] for log in logs(folder / "wandb") if "loss" in log]
    assert [row["train/loss"] for row in history if "train/loss" in row] == losses
    assert [row["eval/loss"] for row in history if "eval/loss" in row] == [wanted["eval_loss"]]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert run.display_name == "a run"
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]


def wandb_records(data: bytes) -> Iterator[Any]:
    """The records of wandb's file: blocks of 32 KiB; a record is cut where a block ends."""
    from wandb.proto import wandb_internal_pb2

    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@needs("mlflow")
def test_mlflow_has_one_run_with_every_step_and_the_last_evaluation(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "an experiment")
    reported(folder, "mlflow", "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("an experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")
    assert run.data.params["pipeline_model_parallel_size"] == "2"
    losses = [(log["step"], log["loss"]) for log in logs(folder / "mlflow") if "loss" in log]
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == losses
    assert run.data.metrics["eval_loss"] == values_logged(folder, "mlflow")["eval_loss"]
