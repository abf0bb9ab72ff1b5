"""Models of the Hub: ids in place of directories, against a server of the Hub's endpoints on loopback."""

import json
import os
import struct
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from forked_cli import launched
from harness import run_ranks
from hub_server import TOKEN, Hub, serving
from train_cases import tiny_checkpoint

pytestmark = pytest.mark.ranks

CONFIGURATIONS = """---
configs:
- config_name: default
  data_files: train.jsonl
- config_name: other
  data_files: other.jsonl
---
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two revisions of a model, with files that nobody needs beside it."""
    from tokenizers_for_tests import byte_tokenizer

    found = {}
    for revision, layers in (("main", 2), ("v1", 3)):
        folder = tmp_path_factory.mktemp(revision)
        tiny_checkpoint(folder, vocab_size=264, num_hidden_layers=layers)
        byte_tokenizer().save_pretrained(folder)
        (folder / "pytorch_model.bin").write_bytes(b"never fetched")
        (folder / "original").mkdir()
        (folder / "original" / "consolidated.00.pth").write_bytes(b"never fetched")
        found[revision] = folder
    return found


@pytest.fixture
def hub(folders):
    with serving(Hub(folders)) as served:
        yield served


def _environment(hub: Hub, cache: Path, **others: str) -> dict[str, str]:
    return os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        **others,
    }


def _convert(hub: Hub, cache: Path, *words: str, **others: str) -> "subprocess.CompletedProcess[str]":
    """Run ``mca-convert`` in a fork, with the constants that the variables of the environment set in a new process."""
    before = partial(_enter, str(cache), hub.address, others)
    return launched([sys.executable, "-m", "mca_convert", *words], before=before)


def _enter(cache: str, address: str, others: dict[str, str]) -> None:
    from huggingface_hub import constants

    os.chdir(cache)
    os.environ.update(others)
    hub_cache = f"{cache}/hub"
    vars(constants).update(_settings(hub_cache, address) | {"HF_HUB_OFFLINE": "HF_HUB_OFFLINE" in others})


def _converted_by_process(
    hub: Hub, cache: Path, *words: str, **others: str
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mca_convert", *words]
    environment = {key: value for key, value in _environment(hub, cache, **others).items() if value}
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in others else None
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=cache)


def test_a_plan_reads_headers_alone(hub, tmp_path):
    done = _convert(
        hub, tmp_path, "plan", "--checkpoint_path", "org/model@v1", "--tensor_model_parallel_size", "2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "org/model@v1: Hugging Face checkpoint qwen3" in done.stdout
    assert "this conversion can run" in done.stdout
    (span,) = hub.downloads("model.safetensors")
    assert span == f"bytes=0-{(1 << 17) - 1}"
    assert not hub.downloads(".bin") and not hub.downloads(".pth")
    shown = _convert(hub, tmp_path, "inspect", "org/model", "--json")
    assert json.loads(shown.stdout)["sizes"]["num_layers"] == 2
    assert "/mca-hub-" not in shown.stdout


def test_of_a_server_without_ranges_no_more_is_read_than_headers(hub, tmp_path, monkeypatch):
    import huggingface_hub.utils
    from huggingface_hub import constants

    from mca_models.hub import headers_only

    for name, value in _settings(str(tmp_path / "cache"), hub.address).items():
        monkeypatch.setattr(constants, name, value)
    header = b'{"a": {"dtype": "U8", "shape": [33554432], "data_offsets": [0, 33554432]}}'.ljust(1 << 18)
    whole = struct.pack("<Q", len(header)) + header + bytes(1 << 25)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(whole)
    hub.folders, hub.ranges = {"main": tmp_path / "model"}, False
    read = []
    session = huggingface_hub.utils.get_session()
    stream = session.stream

    @contextmanager
    def counting(*given, **named):
        with stream(*given, **named) as response:
            yield response
            read.append((str(response.url), response.num_bytes_downloaded))

    monkeypatch.setattr(session, "stream", counting)
    with headers_only("org/model", needs_weights=True) as folder:
        file = folder / "model.safetensors"
        assert file.stat().st_size == len(whole)
        assert file.read_bytes()[: 8 + len(header)] == whole[: 8 + len(header)]
    sizes = [size for address, size in read if address.endswith("model.safetensors")]
    assert len(sizes) == 2, "the beginning, and the rest of the header"
    assert sum(sizes) < 1 << 20


def test_an_adapter_is_fetched_by_its_id_and_merged(hub, folders, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = "model.layers.{}.self_attn.q_proj"
    parts = {name.format(layer): (torch.randn(2, 64), torch.randn(64, 2)) for layer in range(2)}
    tensors = {}
    for module, (down, up) in parts.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    save_file(tensors, adapter / "adapter_model.safetensors")
    hub.adapters = {"main": adapter}
    words = ["--checkpoint_path", "org/model", "--adapter_path", "org/adapter", "--merge"]
    done = _convert(hub, tmp_path, *words, "--output_path", "merged")
    assert done.returncode == 0, done.stderr
    before, after = (
        load_file(folder / "model.safetensors") for folder in (folders["main"], tmp_path / "merged")
    )
    for module, (down, up) in parts.items():
        expected = before[f"{module}.weight"] + 2 * up @ down
        torch.testing.assert_close(after[f"{module}.weight"], expected)


def test_a_conversion_fetches_what_it_needs_and_then_works_offline(hub, folders, tmp_path):
    done = _converted_by_process(hub, tmp_path, "--checkpoint_path", "org/model", "--output_path", "mca")
    assert done.returncode == 0, done.stderr
    assert "Fetching" not in done.stderr, "a bar where no terminal is"
    fetched = {
        path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path
    }
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= fetched
    assert not {name for name in fetched if name.endswith((".bin", ".pth"))}
    same = _convert(hub, tmp_path, "verify", str(folders["main"]), "mca")
    assert same.returncode == 0, same.stdout
    hub.asked.clear()
    words = ["--checkpoint_path", "org/model", "--output_path", "again"]
    offline = _convert(hub, tmp_path, *words, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert not hub.asked


@pytest.mark.parametrize(
    ("name", "private", "reported"),
    [
        ("org/modle", False, "the Hub has no such model"),
        ("org/model@v9", False, "the model has no such revision"),
        ("org/model", True, "or it is private"),
    ],
)
def test_what_the_hub_refuses_is_one_line(name, private, reported, hub, tmp_path):
    hub.private = private
    done = _convert(hub, tmp_path, "--checkpoint_path", name, "--output_path", "mca")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"error: {name}: no such directory is here, and the Hub answered: " in done.stderr
    assert reported in done.stderr


def test_a_private_model_is_read_with_the_token_and_an_export_is_uploaded(hub, folders, tmp_path):
    hub.private = True
    hub.folders = {"main": tmp_path / "earlier", "v1": folders["v1"]}
    stale = ["adapter_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    kept = [
        "README.md",
        "iter_0001000/pp_000/tp_00.safetensors",
        "other/model.safetensors",
        "model-fp8.safetensors",
    ]
    for name in (*stale, *kept, "config.json", "model.safetensors"):
        (hub.folders["main"] / name).parent.mkdir(parents=True, exist_ok=True)
        (hub.folders["main"] / name).write_text("{}")
    words = [
        "--checkpoint_path",
        str(folders["main"]),
        "--to",
        "hf",
        "--output_path",
        "out",
        "--push_to_hub",
        "org/model",
    ]
    done = _convert(hub, tmp_path, *words, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert hub.created == ["model"]
    assert hub.uploaded["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert "config.json" in hub.uploaded
    assert all(name in done.stderr for name in stale)
    assert sorted(hub.deleted) == stale, "what of the earlier model readers would take for the new one's"
    hub.folders = folders
    assert _convert(hub, tmp_path, "plan", "--checkpoint_path", "org/model", HF_TOKEN=TOKEN).returncode == 0


def _settings(cache: str, address: str) -> dict[str, object]:
    """Constants that the client's library took from the environment when it was imported."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    of_server = {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
    return of_server | {"HF_HUB_CACHE": cache, "HF_HUB_DISABLE_XET": True}


def _loaded(cache: str, address: str) -> float:
    from huggingface_hub import constants

    vars(constants).update(_settings(cache, address))
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained("org/model@v1")
    return float(sum(parameter.detach().sum() for chunk in models.chunks for parameter in chunk.parameters()))


def test_ranks_of_a_machine_download_once(hub, folders, tmp_path):
    first, second = run_ranks(2, _loaded, str(tmp_path), hub.address)
    assert first == second
    assert hub.downloads("model.safetensors") == [""]


def test_a_download_that_is_cut_goes_on_where_it_ended(hub, folders, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from mca_train.config.run_config import with_directories

    for name, value in _settings(str(tmp_path / "cache"), hub.address).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what it goes on from; 10 MB otherwise
    hub.cut_at = 50_000
    found = Path(str(with_directories({"model_name_or_path": "org/model"})["model_name_or_path"]))
    assert hub.downloads("model.safetensors") == ["", "bytes=50000-"]
    whole = folders["main"] / "model.safetensors"
    assert (found / "model.safetensors").read_bytes() == whole.read_bytes()


def test_training_starts_from_an_id(hub, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    from mca_train.cli import main

    for name, value in _settings(str(tmp_path / "cache"), hub.address).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "hello there"}\n')
    run = {"model_name_or_path": "org/model", "train_file": "a.jsonl", "output_dir": "out", "seq_length": 32}
    Path("run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in run.items()))
    assert main(["plan", "pretrain", "run.yaml"]) == 0
    assert "qwen3" in capsys.readouterr().out
    assert not hub.downloads(".safetensors") and not hub.downloads("tokenizer.json")
    assert main(["pretrain", "run.yaml", "--tensor_model_parallel_size", "3"]) == 2
    assert not hub.downloads(".safetensors")  # what is wrong is found before weights are fetched
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("org/model", "org/none"))
    assert main(["plan", "run.yaml"]) == 2
    assert (
        "model_name_or_path: org/none: no such directory is here, and the Hub answered"
        in capsys.readouterr().err
    )


MISTAKES = (
    (["--model_name_or_path", "org/none"], "model_name_or_path: org/none: no such directory is here, and"),
    (
        ["--model_name_or_path", "org/none", "--max_eval_samples", "3"],
        "max_eval_samples is set, but eval_file",
    ),
    (
        ["--model_name_or_path", "org/model", "--tensor_model_parallel_size", "3"],
        "cannot be divided by tensor_model_parallel_size 3",
    ),
    (
        ["--model_name_or_path", "org/model", "--lora_rank", "2", "--lora_target_modules", "q_prj"],
        "['q_prj'] matches no linear",
    ),
)
"""Flags and the message about them."""


def test_mistakes_with_a_model_of_the_hub_are_found_before_torch_is_imported(hub, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "hello there"}\n')
    common = ["--train_file", "a.jsonl", "--output_dir", "out"]
    commands = [[*name, *common, *flags] for flags, _ in MISTAKES for name in (["sft"], ["plan", "sft"])]
    code = f"""
import contextlib, io, json, sys
from mca_train.cli import main
found = []
for words in {commands!r}:
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        code = main(words)
    found.append([code, text.getvalue(), [name for name in ("torch", "transformers") if name in sys.modules]])
print(json.dumps(found))
"""
    environment = _environment(hub, tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    messages = [message for _, message in MISTAKES for _ in range(2)]
    for words, message, (exit_code, text, heavy) in zip(
        commands, messages, json.loads(done.stdout), strict=True
    ):
        assert (exit_code, heavy) == (2, []), (words, text)
        assert message in text, words
    assert not hub.downloads(".safetensors") and not hub.downloads("tokenizer.json")


def test_rows_of_a_dataset_are_read_by_its_id_and_by_addresses(tmp_path, monkeypatch):
    import datasets
    from huggingface_hub import HfFileSystem, constants

    from mca_train.config.arguments import DataArguments
    from mca_train.data.files import load_rows
    from mca_train.data.row_paths import row_paths
    from mca_train.data.sources import load_source, parse_sources
    from mca_train.data.urls import read_url

    revisions = {}
    for name, count in (("main", 4), ("v1", 6)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"question": f"{name} {number}"}) + "\n" for number in range(count)]
        (tmp_path / name / "train.jsonl").write_text("".join(lines))
        (tmp_path / name / "other.jsonl").write_text(json.dumps({"question": f"other of {name}"}) + "\n")
        (tmp_path / name / "README.md").write_text(CONFIGURATIONS)
        revisions[name] = tmp_path / name
    with serving(Hub({}, datasets=revisions)) as hub:
        for name, value in _settings(str(tmp_path / "cache"), hub.address).items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "made"))
        HfFileSystem.clear_instance_cache()
        monkeypatch.chdir(tmp_path)
        entry = {"path": "org/rows", "split": "train[:3]", "columns": {"text": "question"}}
        arguments = DataArguments(model_name_or_path="m")
        others = {**entry, "subset": "other", "split": "train", "name": "c"}
        sources = parse_sources([entry, {**entry, "revision": "v1", "name": "b"}, others])
        texts = [list(load_source(source, "datasets", arguments)["text"]) for source in sources]
        found = load_rows(["hf://datasets/org/rows/train.jsonl"], "train_file", arguments)
        page = f"{hub.address}/datasets/org/rows/resolve/main/train.jsonl?download=true"
        of_page = load_rows([page], "train_file", arguments)
        of_row = read_url(row_paths(["org/rows"], None, "v1").resolve("train.jsonl"))
    HfFileSystem.clear_instance_cache()
    wanted = [[f"{name} {number}" for number in range(3)] for name in ("main", "v1")]
    assert texts == [*wanted, ["other of main"]]
    assert of_row == (tmp_path / "v1" / "train.jsonl").read_bytes()
    assert list(found["question"]) == list(of_page["question"]) == [f"main {number}" for number in range(4)]
