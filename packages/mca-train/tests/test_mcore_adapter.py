"""The facade with which LLaMA-Factory imports mca as ``mcore_adapter``."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import McaError
from mca_convert.cli import main as convert
from mca_models.templates import config_from_hf, get_family
from mca_train.cli import main
from mca_train.clients.mcore_adapter.mcore_adapter.models import ClientModels, client_name
from mca_train.clients.options import client_arguments, reject_unsupported, translate

CONFIGS = Path(__file__).parents[2] / "mca-models/tests/data/vision_configs"

IMPORTED = {
    "mcore_adapter.models": ("AutoConfig", "AutoModel"),
    "mcore_adapter.models.converter.post_converter": (
        "convert_checkpoint_to_hf",
        "convert_checkpoint_to_mca",
    ),
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


CLIENT = {
    "stage": "sft",
    "finetuning_type": "full",
    "adapter_name_or_path": None,
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
    "freeze_language_model": False,
}
"""Options of LLaMA-Factory that the facade reads, with its defaults."""


def callback(**client):
    """LLaMA-Factory's reporting callback, which is the only one with the client's options."""
    return SimpleNamespace(
        model_args=SimpleNamespace(), data_args=SimpleNamespace(), finetuning_args=SimpleNamespace(**client)
    )


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"finetuning_type": "freeze"}, "finetuning_type: freeze is not supported"),
        ({"use_galore": True}, "use_galore: true is not supported .*set optimizer"),
        ({"cache_dir": "hub"}, "cache_dir: hub is not supported .*HF_HUB_CACHE"),
        ({"model_revision": "v2"}, "model_revision: v2 is not supported .*download that revision"),
        ({"ref_model": "a"}, "ref_model: a is not supported .*the reference is the initial model"),
        (
            {"finetuning_type": "lora", "adapter_name_or_path": ["a"], "create_new_adapter": True},
            "create_new_adapter: true is not supported with USE_MCA=1",
        ),
        ({"finetuning_type": "lora", "adapter_name_or_path": ["a", "b"]}, "merge them into one"),
        ({"packing": True}, "set neat_packing: true"),
        ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss: false is not supported"),
    ],
)
def test_options_that_mca_does_not_have_raise_an_error(client, message):
    with pytest.raises(McaError, match=message):
        reject_unsupported(CLIENT | client, {"do_train": True})


@pytest.mark.parametrize(
    "client",
    [
        {},
        {"stage": "pt", "packing": True},
        {"packing": True, "neat_packing": True},
        {"finetuning_type": "lora", "create_new_adapter": True},
    ],
)
def test_supported_options_raise_no_error(client):
    reject_unsupported(CLIENT | client, {"do_train": True})


def test_arguments_that_the_workflow_ignores_raise_one_error():
    args = {"do_train": False, "do_eval": True, "eval_strategy": "no"}
    with pytest.raises(McaError, match=r"(?s)do_train: false is ignored.*do_eval without eval_strategy"):
        reject_unsupported(CLIENT, args)


def test_the_options_are_those_of_the_reporting_callback():
    callbacks = [SimpleNamespace(), callback(**CLIENT | {"lora_rank": 4})]
    assert client_arguments({"callbacks": callbacks}) == CLIENT | {"lora_rank": 4}
    assert client_arguments({"callbacks": None}) == {}


class Model:
    """A vision-language model that records which parts are trained."""

    config = config_from_hf(json.loads((CONFIGS / "qwen2.5-vl-72b.json").read_text()))

    def train_parts(self, parts):
        self.parts = set(parts)


@pytest.mark.parametrize(
    ("frozen", "parts"),
    [
        ({}, {"language"}),
        ({"freeze_vision_tower": False}, {"language", "vision"}),
        ({"freeze_multi_modal_projector": False, "freeze_language_model": True}, {"projector"}),
    ],
)
def test_the_parts_that_the_client_freezes_are_frozen(frozen, parts):
    args = SimpleNamespace(seed=1, do_train=True)
    options = {"model": Model(), "args": args, "callbacks": [callback(**CLIENT | frozen)]}
    assert translate(options, None)["model"].parts == parts


def test_parameters_have_the_names_by_which_the_client_freezes_them():
    linear = torch.nn.Linear(1, 1, bias=False)
    tower = torch.nn.ModuleDict({"visual": torch.nn.ModuleDict({"blocks": linear, "merger": linear})})
    base = torch.nn.Module()
    base.chunks = torch.nn.ModuleList(
        torch.nn.ModuleDict(parts)
        for parts in ({"vision_model": tower, "decoder": linear}, {"output_layer": linear})
    )
    names = [name for name, _ in ClientModels(base).named_parameters(remove_duplicate=False)]
    assert names == [
        "vision_model.blocks.weight",
        "vision_model.merger.weight",
        "decoder.weight",
        "output_layer.weight",
    ]


def test_samples_of_the_clients_collator_have_shifted_labels():
    args = SimpleNamespace(seed=1, do_train=True)
    options = {"model": Model(), "args": args, "data_collator": print, "train_dataset": [1, 2]}
    translated = translate(options, None)
    assert translated["collator_format"].labels_are_shifted
    assert (translated["data_collator"], len(translated["train_dataset"])) == (None, 2)


@pytest.mark.parametrize("model", ["qwen2.5-vl-72b", "qwen3-vl-235b-a22b", "qwen3.5-397b-a17b"])
def test_each_prefix_by_which_the_client_freezes_names_parameters(model):
    described = json.loads((CONFIGS / f"{model}.json").read_text())
    if "num_experts" in (text := described.get("text_config", described)):
        text["num_experts"] = text["num_experts_per_tok"]  # names of hundreds of experts take a second
    config = config_from_hf(described)
    names = [client_name(f"chunks.0.{param.mca}") for param in get_family(config.model_type).params(config)]
    prefixes = [f"vision_model.{part}" for part in ("blocks", "patch_embed", "merger")]
    prefixes += [] if model.startswith("qwen2") else ["vision_model.pos_embed"]
    for prefix in (*prefixes, "embedding", "decoder", "output_layer"):
        assert any(name.startswith(prefix) for name in names), prefix


def test_the_preference_loss_has_the_options_that_the_client_does_not_pass(facade):
    config = facade.DPOConfig(beta=0.2, pref_loss="simpo", label_smoothing=0.0)
    loss = config.loss({"simpo_gamma": 0.7, "pref_ftx": 0.5})
    assert (loss.kind, loss.beta, loss.simpo_gamma, loss.rpo_alpha) == ("simpo", 0.2, 0.7, 0.5)
    plain = facade.DPOConfig(beta=0.1, pref_loss="sigmoid", label_smoothing=0.1).loss(
        {"simpo_gamma": 0.5, "pref_ftx": 0.0}
    )
    assert (plain.label_smoothing, plain.simpo_gamma, plain.rpo_alpha) == (0.1, None, None)
    with pytest.raises(McaError, match=r"'kto_pair'; .*run mca-train kto \(dpo_loss is pref_loss"):
        facade.DPOConfig(pref_loss="kto_pair").loss({})


def test_keys_of_mcore_adapter_become_those_of_mca(facade, tmp_path, monkeypatch):
    monkeypatch.setattr(
        facade.TrainingArguments, "warmup_ratio", 0.25, raising=False
    )  # a field in transformers 5.6
    args = facade.Seq2SeqTrainingArguments(output_dir=str(tmp_path), distributed_timeout_minutes=2)
    assert (args.ddp_timeout, args.warmup_steps) == (120, 0.25)


def test_full_recompute_alone_recomputes_each_layer(facade, tmp_path):
    args = facade.TrainingArguments(output_dir=str(tmp_path), recompute_granularity="full")
    assert (args.recompute_method, args.recompute_num_layers) == ("uniform", 1)


def test_stages_that_the_client_trains_elsewhere_raise_an_error(facade, tmp_path, monkeypatch):
    run = dict.fromkeys(("run_rm", "run_ppo", "run_kto", "run_sft"), print)
    monkeypatch.setitem(sys.modules, "llamafactory.train.tuner", tuner := SimpleNamespace(**run))
    facade.TrainingArguments(output_dir=str(tmp_path))
    for stage, remedy in (("rm", "mca-train reward"), ("ppo", "verl"), ("kto", "mca-train kto")):
        with pytest.raises(McaError, match=f"stage: {stage} is not supported with USE_MCA: .*use {remedy}"):
            getattr(tuner, f"run_{stage}")(1, 2)
    assert tuner.run_sft is print


def test_the_client_takes_all_families_of_mca(facade, tmp_path, monkeypatch):
    known = {"llama"}
    constants = SimpleNamespace(MCA_SUPPORTED_MODELS=known)
    monkeypatch.setitem(sys.modules, "llamafactory.extras.constants", constants)
    facade.TrainingArguments(output_dir=str(tmp_path))
    assert {"llama", "granite", "qwen2_audio"} <= known


def test_the_trainer_of_hyper_parallel_is_an_error(facade, tmp_path, monkeypatch):
    tuner = SimpleNamespace(is_hyper_parallel_available=lambda: True)
    monkeypatch.setitem(sys.modules, "llamafactory.train.tuner", tuner)
    facade.TrainingArguments(output_dir=str(tmp_path))
    with pytest.raises(McaError, match="use_hyper_parallel: true is not supported with USE_MCA"):
        tuner.is_hyper_parallel_available()


def test_rope_fusion_has_no_effect_without_transformer_engine(facade, tmp_path, monkeypatch, caplog):
    from mca_models.megatron import platform

    monkeypatch.setattr(platform, "engine_problem", lambda: "it is not installed")
    args = facade.TrainingArguments(output_dir=str(tmp_path), apply_rope_fusion=True)
    assert args.apply_rope_fusion is None
    assert "apply_rope_fusion has no effect without Transformer Engine (it is not installed)" in caplog.text


def test_rope_fusion_has_no_effect_on_models_with_images(facade, tmp_path, monkeypatch, caplog):
    from mca_models.megatron import platform

    monkeypatch.setattr(platform, "engine_problem", lambda: None)
    auto = sys.modules["mcore_adapter.models"]
    monkeypatch.setattr(auto, "resolve_directory", Path)
    for mrope, kept in ((object(), None), (None, True)):
        config = SimpleNamespace(mrope=mrope)
        monkeypatch.setattr(auto, "open_checkpoint", lambda _, config=config: SimpleNamespace(config=config))
        args = SimpleNamespace(apply_rope_fusion=True)
        assert facade.AutoConfig.from_pretrained("a", args).args.apply_rope_fusion is kept
    assert "apply_rope_fusion has no effect: images have three positions" in caplog.text


def test_checkpoints_are_converted_by_mca_convert(facade, monkeypatch, capsys):
    calls = []

    def run(words, **options):
        calls.append(words[words.index("mca_convert") + 1 :])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    layout = DistributingParallelArguments(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        account_for_loss_in_pipeline_split=True,
    )
    facade.convert_checkpoint_to_hf("a", "b", torch_dtype=torch.bfloat16)
    facade.convert_checkpoint_to_hf("a", "b", "adapter", verbose=False)
    facade.convert_checkpoint_to_mca("a", "b", layout, fp16=True)
    paths = ["--checkpoint_path", "a", "--output_path", "b"]
    assert calls[:2] == [[*paths, "--bf16"], [*paths, "--adapter_path", "adapter"]]
    assert " ".join(calls[2]).startswith(" ".join([*paths, "--to mca --fp16 --tensor_model_parallel_size 2"]))
    for words in ("--pipeline_model_parallel_size 2", "--account_for_loss_in_pipeline_split True"):
        assert words in " ".join(calls[2])
    assert convert(calls[2]) == 1
    assert "no such" in capsys.readouterr().err  # the flags are known
    with pytest.raises(McaError, match="bf16 excludes fp16"):
        facade.convert_checkpoint_to_mca("a", "b", layout, bf16=True, fp16=True)


def test_a_failed_conversion_raises_its_error(facade, tmp_path):
    with pytest.raises(McaError, match=r"mca-convert of .*absent failed: .*absent"):
        facade.convert_checkpoint_to_hf(tmp_path / "absent", tmp_path / "b", verbose=False)


def test_converting_without_mca_convert_raises_an_error(facade, monkeypatch):
    converter = sys.modules["mcore_adapter.models.converter.post_converter"]
    monkeypatch.setattr(converter, "find_spec", lambda name: None)
    with pytest.raises(McaError, match="needs the package mca-convert; install it"):
        facade.convert_checkpoint_to_hf("a", "b")
