"""The facade with which LLaMA-Factory imports mca as ``mcore_adapter``."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mca_config.errors import McaError
from mca_train.cli import main

IMPORTED = {
    "mcore_adapter.models": ("AutoConfig", "AutoModel"),
    "mcore_adapter.trainer": ("DPOTrainer", "McaTrainer"),
    "mcore_adapter.trainer.dpo_config": ("DPOConfig",),
    "mcore_adapter.training_args": ("Seq2SeqTrainingArguments", "TrainingArguments"),
    "mcore_adapter.utils": ("get_logger",),
}
"""Names that LLaMA-Factory imports."""


@pytest.fixture
def facade(capsys, monkeypatch):
    assert main(["client", "mcore_adapter"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert (path / "mcore_adapter/__init__.py").is_file()
    monkeypatch.syspath_prepend(path)
    yield SimpleNamespace(
        **{
            name: getattr(importlib.import_module(module), name)
            for module, names in IMPORTED.items()
            for name in names
        }
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcore_adapter"]:
        del sys.modules[name]


def test_an_unknown_client_names_the_known_ones(capsys):
    assert main(["client", "mcore"]) == 2
    assert "mcore_adapter" in capsys.readouterr().err


def callback(data=None, **finetuning):
    return SimpleNamespace(
        finetuning_args=SimpleNamespace(**finetuning), data_args=SimpleNamespace(packing=data)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"callbacks": [callback(finetuning_type="lora")]},
            "finetuning_type: lora",
        ),
        ({"callbacks": [callback(stage="pt")]}, "stage: pt"),
        ({"callbacks": [callback(data=True)]}, "packing"),
        ({"args": SimpleNamespace(sequence_packing=True)}, "sequence_packing"),
        ({"eval_dataset": []}, "evaluation"),
        ({"args": SimpleNamespace(resume_from_checkpoint="a/b")}, "resume_from_checkpoint: a/b"),
    ],
)
def test_options_that_were_never_compared_raise_an_error(facade, options, message):
    with pytest.raises(McaError, match=f"^{message}.* is not supported by the mcore_adapter facade yet; "):
        facade.McaTrainer(**options)


def test_the_preference_stage_raises_an_error(facade):
    for call in (facade.DPOTrainer, facade.DPOConfig, lambda: facade.AutoConfig.from_pretrained("a")):
        with pytest.raises(
            McaError, match=r"^stage: dpo is not supported by the mcore_adapter facade yet; use"
        ):
            call()


def test_models_with_images_raise_an_error(facade, monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(vision={}, model_type="qwen2_vl"))
    monkeypatch.setattr("mca_models.AutoModel.from_pretrained", lambda path, args: model)
    with pytest.raises(McaError, match="a qwen2_vl model with images is not supported"):
        facade.AutoModel.from_pretrained("a")


def test_keys_of_mcore_adapter_become_those_of_mca(facade, tmp_path, monkeypatch):
    monkeypatch.setattr(
        facade.TrainingArguments, "warmup_ratio", 0.25, raising=False
    )  # a field in transformers 5.6
    args = facade.Seq2SeqTrainingArguments(output_dir=str(tmp_path), distributed_timeout_minutes=2)
    assert (args.ddp_timeout, args.warmup_steps) == (120, 0.25)
