"""What a push to the Hub deletes there, and when."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from mca_config.errors import McaError
from mca_models.hub import older, upload

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
    assert older(_EARLIER, folder) == [
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
    found = older(_EARLIER, folder)
    assert [file for file in found if file.startswith("iter_")] == ["iter_0002000/pp_000/tp_01.safetensors"]


def test_an_adapter_replaces_an_adapter_alone(tmp_path):
    folder = _folder(tmp_path, "adapter_config.json", "adapter_model.safetensors")
    earlier = [
        file for file in _EARLIER if file not in ("mca_config.json", "latest_checkpointed_iteration.txt")
    ]
    assert older(earlier, folder) == ["adapter_model.bin"]


def test_a_tokenizer_replaces_templates_that_are_read_before_its_own(tmp_path):
    folder = _folder(
        tmp_path, "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.model"
    )
    found = set(older(_EARLIER, folder))
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.json"} <= found
    assert "generation_config.json" not in found


class _Api:
    """Takes the place of the Hub's client."""

    endpoint = "https://hub.test"
    files: list[str]
    calls: list[object]

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
