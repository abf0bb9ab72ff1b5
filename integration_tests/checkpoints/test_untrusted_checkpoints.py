"""Checkpoints that a run must not load: pickles with code, other models, other optimizers."""

import json
import os
import pickle
import re
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from train_cases import STEPS, make_trainer, quietly, stop_and_resume, tiny_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

SHORT = {"gradient_accumulation_steps": 1}
SAVING = SHORT | {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
SGD = {"plain": {"optim": "sgd"}, "momentum": {"optim": "sgd", "sgd_momentum": 0.9}}


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


def refusal(call: Any) -> str:
    from mca_config.errors import McaError

    try:
        quietly(call)
    except McaError as error:
        return str(error)
    return "no error"


def resume(model: Path, checkpoint: Path, **changes: Any) -> str:
    trainer = make_trainer(model, checkpoint.parent, **SHORT | {"max_steps": 3} | changes)
    return refusal(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)))


def copied(checkpoint: Path, name: str) -> Path:
    """A run's directory with ``checkpoint`` in it."""
    return Path(shutil.copytree(checkpoint, checkpoint.parent.parent / name / checkpoint.name))


def plant(checkpoint: Path, name: str, data: bytes) -> None:
    """Replaces or adds a file, and makes the manifest fit."""
    (checkpoint / name).write_bytes(data)
    manifest = checkpoint / "training" / "manifest.json"
    document = json.loads(manifest.read_text())
    document["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    manifest.write_text(json.dumps(document))


def plant_object(checkpoint: Path, evil: Evil) -> None:
    """Turns a tensor of the optimizer into an object, which torch would unpickle."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    folder = checkpoint / "training" / "optimizer"
    index = pickle.loads((folder / ".metadata").read_bytes())
    name = next(key for key in index.state_dict_metadata if key.startswith("optimizer.state.exp_avg."))
    torch.save(evil, folder / "__9_0.distcp")
    data = (folder / "__9_0.distcp").read_bytes()
    index.state_dict_metadata[name] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(name)] = _StorageInfo("__9_0.distcp", 0, len(data))
    plant(checkpoint, "training/optimizer/__9_0.distcp", data)
    plant(checkpoint, "training/optimizer/.metadata", pickle.dumps(index))


def pickles(model: Path, folder: Path) -> dict[str, str]:
    """Return the errors of resuming, by the place of a planted command, which would make the file ``<where>.ran``."""
    from mca_models import AutoModel

    trainer = make_trainer(model, folder / "run", **SAVING, ckpt_format="torch_dist")
    quietly(trainer.train)
    said = {"whole": resume(model, copied(folder / "run" / "checkpoint-2", "whole"))}
    for where, name in {
        "index": "training/optimizer/.metadata",
        "model": "iter_0000001/.metadata",
        "common": "training/optimizer/common.pt",
    }.items():
        checkpoint = copied(folder / "run" / "checkpoint-2", where)
        plant(checkpoint, name, pickle.dumps(Evil(folder / f"{where}.ran")))
        said[where] = resume(model, checkpoint)
    said["factory"] = refusal(lambda: AutoModel.from_pretrained(folder / "model" / "checkpoint-2"))
    checkpoint = copied(folder / "run" / "checkpoint-2", "random")
    plant(checkpoint, "training/rng_0.safetensors", b"no such file")
    said["random"] = resume(model, checkpoint)
    checkpoint = copied(folder / "run" / "checkpoint-2", "object")
    plant_object(checkpoint, Evil(folder / "object.ran"))
    return said | {"object": resume(model, checkpoint)}


def test_no_pickle_of_a_checkpoint_is_run(tmp_path):
    (said,) = run_ranks(1, pickles, tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=2), tmp_path)
    assert list(tmp_path.glob("*.ran")) == []
    assert said["whole"] == said["common"] == "no error"
    for where in ("index", "model", "factory"):
        assert "which a checkpoint of weights does not need; nothing was executed" in said[where]
    assert "holds no 'exp_avg." in said["object"]
    assert re.match(r"\S*rng_0.safetensors: ", said["random"]), said["random"]


def others(folder: Path) -> dict[str, str]:
    """Return the errors of another model and of another optimizer that resume the checkpoint of a Qwen3 with Adam."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = partial(tiny_checkpoint, num_hidden_layers=2)
    model = tiny(folder / "qwen3")
    quietly(make_trainer(model, folder / "run", **SAVING).train)
    checkpoint = folder / "run" / "checkpoint-2"
    llama = tiny(folder / "llama", LlamaConfig, LlamaForCausalLM)
    quietly(make_trainer(llama, folder / "llama-run", **SAVING).train)
    changed = {
        "width": {"hidden_size": 32},
        "vocabulary": {"vocab_size": 140},
        "half": {"num_hidden_layers": 1},
    }
    said = {name: resume(tiny(folder / name, **fields), checkpoint) for name, fields in changed.items()}
    said["llama takes qwen3"] = resume(llama, checkpoint)
    said["qwen3 takes llama"] = resume(model, folder / "llama-run" / "checkpoint-2")
    for name, optimizer in SGD.items():
        said[name] = resume(model, checkpoint, **optimizer)
    quietly(make_trainer(model, folder / "sgd", **SAVING | SGD["plain"]).train)
    said["adam takes sgd"] = resume(model, folder / "sgd" / "checkpoint-2")
    said["momentum takes plain"] = resume(model, folder / "sgd" / "checkpoint-2", **SGD["momentum"])
    return said


def test_another_model_or_optimizer_is_refused(tmp_path):
    (said,) = run_ranks(1, others, tmp_path)
    assert "model_type is qwen3 there, llama here" in said["llama takes qwen3"]
    assert "model_type is llama there, qwen3 here" in said["qwen3 takes llama"]
    assert "hidden_size is 64 there, 32 here" in said["width"]
    assert "vocab_size is 130 there, 140 here" in said["vocabulary"]
    assert "num_layers is 2 there, 1 here" in said["half"]
    assert "this run's keeps momentum_buffer; resume with the" in said["momentum takes plain"]
    for name in SGD:  # names tell apart what muon of an adapter and sgd with momentum keep alike
        assert "was written by optimizer adam, this run's is sgd; resume with" in said[name]
    assert "was written by optimizer sgd, this run's is adam" in said["adam takes sgd"]
    assert all("\n" not in line for line in said.values())


def sgd(model: Path, folder: Path) -> dict[str, Any]:
    return {name: stop_and_resume(model, folder / name, **SHORT, **fields) for name, fields in SGD.items()}


@pytest.mark.qualify
def test_sgd_resumes_without_changing_a_bit(tmp_path):
    (found,) = run_ranks(1, sgd, tiny_checkpoint(tmp_path / "tiny"), tmp_path)
    for run in found.values():
        assert run["resumed"] == run["straight"]
        assert run["state"] == {"steps": STEPS, "equal_weights": True}


def places(model: Path, folder: Path) -> dict[str, str]:
    """Return the errors about output directories that are not empty."""
    run, mine = folder / "mine", folder / "run"
    shutil.copytree(model, folder / "model")
    (run / "hf").mkdir(parents=True)
    (run / "hf" / "precious.txt").write_text("x")
    (run / "iter_0000009").mkdir()
    notes = folder / "notes"
    notes.mkdir()
    (notes / "notes.txt").write_text("x")
    said = {
        "mine": refusal(make_trainer(model, run, **SHORT, max_steps=1).train),
        "model": refusal(make_trainer(folder / "model", folder / "model", **SHORT, max_steps=1).train),
        "notes": refusal(make_trainer(model, notes, **SHORT, max_steps=1).train),
    }
    for _ in range(2):
        trainer = make_trainer(model, mine, **SHORT, max_steps=1, save_hf_model=True)
        said["own"] = refusal(trainer.train)
        quietly(trainer.save_model)
        (mine / "iter_0000009").mkdir(exist_ok=True)
        (mine / "hf" / "precious.txt").write_text("x")
    return said


def test_files_of_other_programs_in_output_dir_are_kept(tmp_path):
    model = tiny_checkpoint(tmp_path / "tiny")
    (said,) = run_ranks(1, places, model, tmp_path)
    assert "mine holds hf/precious.txt, iter_0000009, which mca did not write" in said["mine"]
    assert "which it would overwrite; set another directory" in said["model"]
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == sorted(p.name for p in model.iterdir())
    assert (tmp_path / "mine" / "hf" / "precious.txt").is_file(), "refused before anything was written"
    assert said["notes"] == said["own"] == "no error"
    own = tmp_path / "run"
    for name in ("hf/precious.txt", "hf/model.safetensors", "iter_0000009", "iter_0000001/manifest.json"):
        assert (own / name).exists(), name
    assert not [path.name for path in own.iterdir() if path.name.startswith(".")]
