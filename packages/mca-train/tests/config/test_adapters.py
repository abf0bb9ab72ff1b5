"""Checks of an adapter before its model is loaded."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from mca_config.errors import McaError
from mca_models.lora import AdapterConfig, rules_for_training
from mca_models.templates import config_from_hf
from mca_train.cli import main
from mca_train.config.arguments import LoraArguments
from mca_train.config.model import make_adapter, model_config
from mca_train.config.model_parts import PART_RATES, adapted_parts, part_problems

VISION = Path(__file__).parents[3] / "mca-models/tests/data/vision_configs/qwen2.5-vl-72b.json"


def saved(folder: Path, config, **settings) -> Path:
    """An adapter as peft saves it, of tensors that nobody reads."""
    document = {"peft_type": "LORA", "r": 2, **settings}
    params = rules_for_training(config, AdapterConfig.from_dict(document)).params
    names = (name for param in params for name in param.hf_names())
    folder.mkdir()
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"target_modules": "all-linear"}, {"vision", "projector", "language"}),
        ({"target_modules": ["q_proj"]}, {"language"}),
        ({"target_modules": ["mlp.0"], "modules_to_save": ["embed_tokens"]}, {"projector", "language"}),
    ],
)
def test_an_adapter_that_is_continued_says_which_parts_are_trained(settings, parts, tmp_path):
    config = config_from_hf(json.loads(VISION.read_text()))
    path = str(saved(tmp_path / "adapter", config, **settings))
    assert adapted_parts(path, config) == parts
    training = SimpleNamespace(freeze=None, **dict.fromkeys(PART_RATES.values()), overlap_param_gather=True)
    found = part_problems(training, LoraArguments(adapter_name_or_path=path), config, SimpleNamespace())
    reported = next(found, "")
    sees = parts != {"language"}
    assert reported.startswith(
        "overlap_param_gather is not supported with a trained vision or audio tower" if sees else ""
    )
    assert bool(reported) == sees


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("head", [False, True])
def test_a_new_head_beside_an_adapter_without_it_is_refused(head, run, tmp_path, capsys):
    config = model_config(str(tmp_path / "model"))
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["model.norm"]}
    if head:
        from mca_models.templates.classification_head import Head, with_head

        config = with_head(config, Head(kind="sequence_classification", labels=("reward",)))
        settings["modules_to_save"] = ["score"]
    adapter = saved(tmp_path / "adapter", config, **settings)
    refused = main(["plan", "reward", run(adapter_name_or_path=str(adapter))]) == 2
    error = "".join(capsys.readouterr())
    assert refused is not head, error
    assert head or "does not train the new head, score; merge it into its base model (mca-convert" in error


def test_a_new_adapter_of_a_model_with_a_head_trains_that(run, tmp_path):
    from mca_models.templates.classification_head import Head, with_head

    config = with_head(
        model_config(str(tmp_path / "model")), Head(kind="sequence_classification", labels=("reward",))
    )
    _, rules = make_adapter(LoraArguments(lora_rank=2), config, {"language"})
    assert [param.mca_name() for param in rules.saved] == ["output_layer.weight"]


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ({"lora_modules_to_save": ["norms"]}, ["lora_modules_to_save: 'norms' names nothing of this"]),
        (
            {"lora_target_modules": ["embed_tokens"]},
            ["lora_target_modules: ['embed_tokens'] matches no linear"],
        ),
        (
            {"lora_target_modules": ["q_proj", "embed_tokens"]},
            ["lora_target_modules: ", "use lora_modules_to_save"],
        ),
        ({"lora_target_modules": ["mlp"]}, ["lora_target_modules: ['mlp'] matches no linear"]),
        (
            {"lora_target_parameters": ["q_proj"]},
            ["lora_target_parameters: ", "move it to lora_target_modules"],
        ),
    ],
)
def test_errors_of_a_new_adapter_name_the_keys_of_the_run(keys, messages, run, tmp_path):
    config = model_config(str(tmp_path / "model"))
    with pytest.raises(McaError) as raised:
        make_adapter(LoraArguments(lora_rank=2, **keys), config, {"language"})
    for message in messages:
        assert message in str(raised.value)
    assert not re.search(r"(?<!lora_)(target_|modules_to_save)", str(raised.value))
