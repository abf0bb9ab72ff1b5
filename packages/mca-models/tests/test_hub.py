"""Pushes to the Hub: deleted files and their order, requirements, and models without headers."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from mca_config.errors import McaError, UsageError
from mca_models.hub import headers_only, require_upload, resolve_directory, stale_files, upload

_EARLIER = [
    *(
        "README.md",
        "config.json",
        "model.safetensors",
        "model-fp8.safetensors",
        "model-00001-of-00002.safetensors",
    ),
    *(
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "model_card.bin",
    ),
    *("mca_config.json", "latest_checkpointed_iteration.txt", "iter_scores.json"),
    *("iter_0001000/mp_rank_00/model_optim_rng.pt", "iter_0002000/pp_000/tp_01.safetensors"),
    *("adapter_model.bin", "chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.json"),
    *("generation_config.json", "preprocessor_config.json", "other/model.safetensors"),
]


def _folder(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")
    return root


def test_whole_weights_replace_those_of_the_names_that_are_read(tmp_path):
    folder = _folder(tmp_path, "config.json", "model.safetensors")
    assert stale_files(_EARLIER, folder) == [
        "adapter_model.bin",
        "generation_config.json",
        "latest_checkpointed_iteration.txt",
        "mca_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin",
    ]


def test_an_iteration_is_replaced_by_the_same_iteration_alone(tmp_path):
    marks = "mca_config.json", "latest_checkpointed_iteration.txt"
    folder = _folder(tmp_path, *marks, "iter_0002000/pp_000/tp_00.safetensors")
    found = stale_files(_EARLIER, folder)
    assert [file for file in found if file.startswith("iter_")] == ["iter_0002000/pp_000/tp_01.safetensors"]


def test_an_adapter_replaces_an_adapter_alone(tmp_path):
    folder = _folder(tmp_path, "adapter_config.json", "adapter_model.safetensors")
    earlier = [
        file for file in _EARLIER if file not in ("mca_config.json", "latest_checkpointed_iteration.txt")
    ]
    assert stale_files(earlier, folder) == ["adapter_model.bin"]


def test_a_tokenizer_replaces_templates_that_are_read_before_its_own(tmp_path):
    folder = _folder(
        tmp_path, "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.model"
    )
    found = set(stale_files(_EARLIER, folder))
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.json"} <= found
    assert "generation_config.json" not in found


class _Api:
    """Takes the place of the Hub's client."""

    endpoint = "https://hub.test"
    files: list[str]
    calls: list[object]

    def whoami(self) -> None:
        self.calls.append("whoami")

    def create_repo(self, *_: object, **__: object) -> None: ...

    def model_info(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def upload_folder(self, **_: object) -> None:
        self.calls.append("upload")

    def create_commit(self, _: str, operations: list, **__: object) -> None:
        self.calls.append([operation.path_in_repo for operation in operations])


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(_Api, "calls", [], raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", _Api)
    return _Api


def test_an_earlier_model_is_there_until_the_whole_upload_is(api, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(api, "files", ["config.json", "pytorch_model.bin"], raising=False)
    upload(_folder(tmp_path, "config.json", "model.safetensors"), "org/name")
    assert api.calls == ["upload", ["pytorch_model.bin"]]
    assert [(record.levelname, "pytorch_model.bin" in record.message) for record in caplog.records] == [
        ("WARNING", True)
    ]


def test_an_adapter_does_not_hide_a_whole_mca_model(api, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "files", ["mca_config.json", "iter_0000001/manifest.json"], raising=False)
    with pytest.raises(McaError, match="holds a whole MCA model") as caught:
        upload(_folder(tmp_path, "adapter_config.json"), "org/name")
    assert "\n" not in str(caught.value)
    assert api.calls == []


def test_what_the_client_says_is_passed_on_without_secrets(api, monkeypatch):
    def refused(*_, **__):
        raise OSError("401 for https://me:SECRET@mirror/api?sig=SECRET, Authorization: Bearer SECRET")

    monkeypatch.setattr(api, "whoami", refused)
    monkeypatch.setattr(api, "model_info", refused)
    for asked in (require_upload, resolve_directory):
        with pytest.raises(McaError, match=r"OSError: 401 for https://...@mirror/api, Auth") as caught:
            asked("org/name")
        assert "SECRET" not in str(caught.value)


def test_what_an_upload_needs_is_looked_for_before(api, monkeypatch):
    require_upload("org/name@branch")
    assert api.calls == ["whoami"]
    with pytest.raises(UsageError, match=r"--push_to_hub name: expected an id like org/name"):
        require_upload("name")
    for error, reported in (
        (LocalTokenNotFoundError("x"), "you are not logged in (hf auth login, or HF_TOKEN)"),
        (OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE is set; unset it to upload"),
        (ConnectionError("no route\nto it"), "ConnectionError: no route to it"),
    ):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        for call in ("whoami", "upload_folder"):
            monkeypatch.setattr(api, call, fail)
            monkeypatch.setattr(api, "files", [], raising=False)
            with pytest.raises(McaError) as caught:
                require_upload("org/name") if call == "whoami" else upload(Path("out"), "org/name")
            assert str(caught.value) == f"--push_to_hub org/name: {reported}"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        McaError,
        match=r"needs the Hub's client; install the extra hub of mca-convert \(pip install './packages",
    ):
        require_upload("org/name")


@pytest.mark.parametrize(
    ("terminal", "variables", "level", "shown"),
    [
        (True, {}, logging.NOTSET, True),
        (True, {"LOCAL_RANK": "0"}, logging.INFO, True),
        (False, {}, logging.NOTSET, False),
        (True, {"LOCAL_RANK": "1"}, logging.NOTSET, False),
        (True, {"SLURM_LOCALID": "3"}, logging.NOTSET, False),
        (True, {}, logging.WARNING, False),  # --quiet
    ],
)
def test_bars_are_drawn_where_somebody_watches(
    terminal, variables, level, shown, api, tmp_path, monkeypatch, caplog
):
    found = []

    def fetch(*_: object, **__: object) -> str:
        found.append(not huggingface_hub.utils.are_progress_bars_disabled())
        return str(tmp_path)

    monkeypatch.setattr(api, "files", ["config.json"], raising=False)
    monkeypatch.setattr(api, "snapshot_download", fetch, raising=False)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(level, logger="mca_models")
    resolve_directory("org/name")
    assert found == [shown]
    assert not huggingface_hub.utils.are_progress_bars_disabled(), "as it was"


def test_of_pickled_weights_no_headers_are_fetched(api, tmp_path, monkeypatch, caplog):
    for name in ("config.json", "pytorch_model.bin.index.json", "adapter_model.bin"):
        (tmp_path / name).write_text("{}")
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    fetched = lambda self, repository, file, revision: str(tmp_path / file)  # noqa: E731
    monkeypatch.setattr(api, "hf_hub_download", fetched, raising=False)
    monkeypatch.setattr(api, "files", ["config.json", "pytorch_model.bin.index.json", *shards], raising=False)
    reported = f"org/old: its weights are in {shards[0]}, of which no header is fetched alone"
    with headers_only("org/old", needs_weights=False) as folder:
        assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert f"{reported}: the plan is made from config.json" in caplog.text
    with pytest.raises(McaError) as caught, headers_only("org/old", needs_weights=True):
        pass
    assert str(caught.value) == f"{reported}; fetch the model (hf download org/old) and name its directory"
    monkeypatch.setattr(api, "files", ["config.json", "adapter_model.bin"])
    with headers_only("org/old", needs_weights=True) as folder:
        assert (folder / "adapter_model.bin").exists(), "which is small"
