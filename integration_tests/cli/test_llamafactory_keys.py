"""The table of LLaMA-Factory's arguments, compared with the installed LLaMA-Factory.

    .venv-lf/bin/python -m pytest -n 0 --cases all integration_tests/cli/test_llamafactory_keys.py

Its environment is that of ``test_llamafactory.py``.
"""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from mca_train.clients.llama_factory_keys import GROUPS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.one_fork,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llamafactory") is None,
        reason="needs llamafactory==0.9.5 in an environment with .ci/llamafactory.txt",
    ),
]

_FIELDS = """
import dataclasses, json
from llamafactory.hparams import parser
from llamafactory.hparams.training_args import TrainingArguments
from mca_config.arguments import MegatronArguments
names = {cls.__name__: [each.name for each in dataclasses.fields(cls) if each.init] for cls in parser._TRAIN_MCA_ARGS}
ours = {each.name for each in dataclasses.fields(MegatronArguments)}
every = [each.name for each in dataclasses.fields(TrainingArguments)]
print(json.dumps([names, sorted(ours), every]))
"""
"""Program that prints the arguments of LLaMA-Factory's parser with ``USE_MCA``, and those that it has without."""

_ERRORS = """
import json, sys, typing, dataclasses
from types import SimpleNamespace
from llamafactory.hparams import parser
from mca_train.clients.options import client_arguments, reject_unsupported
from llamafactory.hparams.training_args import TrainingArguments
run, names = json.loads(sys.argv[1])
classes = [*parser._TRAIN_MCA_ARGS, TrainingArguments]
hints = {name: hint for cls in reversed(classes) for name, hint in typing.get_type_hints(cls).items()}
defaults = {each.name: each.default for cls in classes for each in dataclasses.fields(cls)}
VALUES = {"debug": "underflow_overflow", "model_revision": "v2", "infer_backend": "vllm", "fsdp": "full_shard",
          "optim_args": "a=b", "freeze": ["language"], "parallelism_config": "a"}
def other(name):
    if name in VALUES or isinstance(defaults[name], bool):
        return VALUES.get(name, not defaults[name])
    kinds = [hints[name], *typing.get_args(hints[name])]
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return next(each for each in typing.get_args(kind) if each != defaults[name])
        if isinstance(kind, type) and issubclass(kind, str) and hasattr(kind, "__members__"):
            return list(kind)[0].value
    return next((value for kind, value in ((bool, True), (float, 0.5), (int, 8), (list, ["a"])) if kind in kinds), "a")
found = {}
for name in names:
    try:
        model, data, training, finetuning, _ = parser.get_train_args({**run, **({name: other(name)} if name else {})})
        options = {"callbacks": [SimpleNamespace(model_args=model, data_args=data, finetuning_args=finetuning)]}
        reject_unsupported(client_arguments(options), vars(training))
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
"""Program that parses a run with each of the named arguments and prints the errors."""


def printed(program: str, *words: str) -> Any:
    """Return the JSON of the last line that ``program`` prints with ``USE_MCA``."""
    from llamafactory_runs import environment

    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment(mca=True), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_table_has_each_argument_of_the_installed_version():
    names, ours, every = printed(_FIELDS)
    for group, there in names.items():
        expected = {*there} - {*ours} if group == "TrainingArguments" else {*there}
        assert expected == GROUPS[group].keys(), f"say in llama_factory_keys how a run handles it: {group}"
    assert GROUPS["MegatronArguments"].keys() <= {*ours}
    assert {*every} - {*names["TrainingArguments"]} == GROUPS["other TrainingArguments"].keys()


def test_each_argument_that_changes_the_result_and_is_not_read_is_an_error(tmp_path):
    from llamafactory_runs import BASE

    run = BASE | {"model_name_or_path": "none", "output_dir": str(tmp_path)}
    errors = {name: key for keys in GROUPS.values() for name, key in keys.items() if key.use == "error"}
    found = printed(_ERRORS, json.dumps([run, ["", *errors]]))
    assert "" not in found
    del errors["use_hyper_parallel"]  # the tuner raises it; test_llamafactory.py runs it
    for name in errors:
        kind, _, message = found.get(name, "no error").partition(": ")
        assert kind in ("McaError", *EARLIER), (name, message)
        assert EARLIER_WORDS.get(name, name) in message, (name, message)
    kinds = [each.partition(":")[0] for each in found.values()]
    assert kinds.count("McaError") > len(kinds) / 2


EARLIER = ("ValueError", "PackageNotFoundError")
"""Kinds of LLaMA-Factory's errors before it calls mca: its own rules, and packages that are not installed."""
EARLIER_WORDS = {
    "mixture_of_depths": "mixture-of-depth",
    "use_unsloth": "unsloth",
    "enable_liger_kernel": "liger-kernel",
    "quantization_bit": "Quantization is only compatible with",
    "use_kt": "kt-kernel",
    "infer_backend": "only available for API, CLI and Web",
    "quantization_device_map": "device map for quantized models",
    "use_galore": "galore_torch",
    "use_apollo": "apollo_torch",
    "use_badam": "badam",
    "use_adam_mini": "adam-mini",
}
"""Words of those of its errors that do not name the argument."""
LORA: dict[str, Any] = {"finetuning_type": "lora", "learning_rate": 1e-2, "adapter_name_or_path": None}
DPO: dict[str, Any] = {"stage": "dpo", "dataset": "pairs"}
IMAGES: dict[str, Any] = {"model": "vision", "template": "qwen2_vl", "dataset": "sft_images"}
VIDEOS = IMAGES | {"dataset": "sft_videos", "cutoff_len": 512}
RANDOM: dict[str, Any] = {"train_sampling_strategy": "random"}
INTERLEAVED: dict[str, Any] = {"dataset": "sft,more", "mix_strategy": "interleave_under"}
STREAMED: dict[str, Any] = {"streaming": True, "dataloader_num_workers": 1}
MOE: dict[str, Any] = {"model": "moe", "template": "qwen3"}

EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "adapter_name_or_path": (LORA, "text-adapter"),
    "image_min_pixels": (IMAGES, 4096),
    "image_max_pixels": (IMAGES | {"image_min_pixels": 16}, 256),
    "video_fps": (VIDEOS, 0.5),
    "template": ({}, "llama3"),
    "cutoff_len": ({}, 16),
    "train_on_prompt": ({}, True),
    "max_samples": ({}, 3),
    "val_size": ({}, 0.5),
    "neat_packing": ({}, True),
    "default_system": ({}, "the quick brown fox"),
    "enable_thinking": (MOE, False),
    "mix_strategy": ({"dataset": "sft,more"}, "interleave_under"),
    "interleave_probs": (INTERLEAVED, "0.9,0.1"),
    "buffer_size": (STREAMED, 2),
    "disable_shuffling": (RANDOM, True),
    "lora_rank": (LORA, 2),
    "lora_alpha": (LORA, 64),
    "lora_dropout": (LORA, 0.5),
    "lora_target": (LORA, "q_proj"),
    "use_rslora": (LORA, True),
    "additional_target": (LORA, "embed_tokens"),
    "pref_beta": (DPO, 0.5),
    "pref_ftx": (DPO, 0.5),
    "pref_loss": (DPO, "hinge"),
    "dpo_label_smoothing": (DPO, 0.1),
    "simpo_gamma": (DPO | {"pref_loss": "simpo"}, 1.5),
    "freeze_vision_tower": (IMAGES, False),
    "freeze_multi_modal_projector": (IMAGES, False),
    "freeze_language_model": (IMAGES | {"freeze_vision_tower": False}, True),
    "seed": (RANDOM, 3),
    "learning_rate": ({}, 1e-4),
    "warmup_ratio": ({}, 0.9),
    "lr_scheduler_type": ({}, "constant"),
    "weight_decay": ({}, 0.5),
    "label_smoothing_factor": ({}, 0.1),
    "max_grad_norm": ({"optim": "sgd"}, 0.01),
    "moe_aux_loss_coeff": (MOE | {"moe_router_load_balancing_type": "aux_loss"}, 1.0),
}
"""Argument -> settings of a run in which it has an effect, and a value that changes the losses."""


@pytest.mark.qualify
def test_arguments_that_are_read_change_the_losses(tmp_path):
    from llamafactory_runs import history, train, workspace

    made = workspace(tmp_path)
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    (tmp_path / "dataset_info.json").write_text(json.dumps(info | {"more": info["sft"]}))
    bases: dict[str, str] = {}
    runs = []
    for name, (needs, value) in EFFECTS.items():
        value = str(tmp_path / value) if name == "adapter_name_or_path" else value
        same = json.dumps(needs, sort_keys=True)
        if same not in bases:
            bases[same] = f"base-{len(bases)}"
            runs.append(made.run(bases[same], **needs))
        runs.append(made.run(f"with-{name}", **needs | {name: value}))
    train([run | {"max_steps": 3} for run in runs], mca=True)
    without_effect = [
        name
        for name, (needs, _) in EFFECTS.items()
        if history(tmp_path / bases[json.dumps(needs, sort_keys=True)]) == history(tmp_path / f"with-{name}")
    ]
    assert not without_effect
