"""PEFT adapts what was trained, and nothing else, whatever names the adapter was asked for with."""

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters
import peft
import pytest
import tiny_hf
import tiny_vision
import torch
import transformers

from mca_config.model_config import McaModelConfig
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.lora import peft_names
from mca_models.lora.config import AdapterConfig
from mca_models.lora.peft_directory import peft_shapes
from mca_models.lora.peft_names import (
    _MOST_SHOWN,
    EXPERT_LINEARS,
    _beginning_with,
    _module_names,
    _shown,
    complete_peft_config,
    name_targets,
    peft_load_warnings,
)
from mca_models.lora.targets import linear_targets, stacked_targets
from mca_models.templates import FAMILIES, config_from_hf

Settings = dict[str, Any]
_PARTS = ("expert", "mamba", "linear_", "lora_rank", "index_", "ssm")
"""What the settings of models with experts, state spaces, delta nets, MLA or indexers are called."""
TEXT = [
    case
    for case, (kind, settings) in sorted(tiny_hf.ALL.items())
    if any(part in name for part in _PARTS for name in (kind, *settings))
]
DEFAULT = ("gemma4_text-experts", "glm4_moe", "minimax_m3_vl_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe")
ALL_LINEAR = (
    *(
        "afmoe",
        "deepseek_v3",
        "gemma4_text-experts",
        "longcat_flash",
        "nemotron_h",
        "qwen2_moe",
        "qwen3_next",
    ),
    "qwen3_vl_moe",
)


def hf_model(case: str) -> tuple[Any, McaModelConfig]:
    """The model of ``case`` without values, and its configuration here."""
    if case in tiny_vision.CASES:
        config = transformers.AutoConfig.for_model(**copy.deepcopy(tiny_vision.described(case)))
        kind: Any = transformers.AutoModelForMultimodalLM
    else:
        name, different = tiny_hf.ALL[case]
        config = transformers.AutoConfig.for_model(name, **{**tiny_hf.SIZE, **different})
        kind = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    return model, config_from_hf(config.to_dict())


def settings_of(config: McaModelConfig) -> Iterator[Settings]:
    """Ways to ask for an adapter on ``config``: by one word, expressions and names, with modules left out or added."""
    found = [each for each in linear_targets(config) if each.linear and not each.is_vision]
    left_out = FAMILIES[config.model_type].text(config).unadaptable
    labels = sorted({each.label for each in found} - left_out - EXPERT_LINEARS)
    last = next(name for name in ("o_proj", "out_proj", "dense", "q_proj", *labels) if name in labels)
    layers = {
        match[1] for each in found if each.label == last if (match := re.search(r"\.(\d+)\.", each.module))
    }
    layer = min(layers)
    every = {"target_modules": "all-linear"}
    yield every
    if others := [label for label in labels if label != last]:
        yield {**every, "exclude_modules": [last], "rank_pattern": {others[0]: 3}, "use_rslora": True}
    yield {**every, "exclude_modules": rf".*\.{layer}\..*"}
    yield {**every, "lora_dropout": 0.1}
    if stacks := {".".join(each.module.split(".")[-2:]) for each in stacked_targets(config)}:
        if not FAMILIES[config.model_type].text(config).transposed_experts:
            yield {**every, "target_parameters": sorted(stacks)}
    yield {"target_modules": rf".*\.{layer}\..*\.{last}"}
    yield {"target_modules": rf".*\.({'|'.join(labels)})"}
    yield {"target_modules": labels}
    yield {"target_modules": [last], "layers_to_transform": [int(layer)]}


@pytest.mark.cases(0, always=DEFAULT)
@pytest.mark.parametrize("case", (*TEXT, *sorted(tiny_vision.CASES)))
def test_peft_adapts_what_is_trained_and_nothing_else(case: str, caplog: pytest.LogCaptureFixture) -> None:
    model, config = hf_model(case)
    for settings in settings_of(config):
        caplog.clear()
        document, adapter = adapters.described(config, settings)
        expected = peft_shapes(adapter)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                lora = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**document))
            except ValueError as error:
                assert "does not work with lora_dropout" in str(error), settings
                assert "set lora_dropout to 0, or name them in exclude_modules" in caplog.text
                continue
        assert "lora_dropout" not in caplog.text
        found = {
            name.replace(".default", ""): tuple(each.shape)
            for name, each in lora.named_parameters()
            if ".lora_" in name
        }
        assert found == expected, settings


@pytest.mark.cases(0, always=["qwen3_moe", "pattern", "glm4_moe"])
@pytest.mark.parametrize(
    "case,settings",
    [
        pytest.param("qwen3_moe", {"target_modules": "all-linear"}, id="qwen3_moe"),
        pytest.param("qwen3_moe", {"target_modules": r".*\.1\.self_attn\.o_proj"}, id="pattern"),
        pytest.param("glm4_moe", {"target_modules": "all-linear"}, id="glm4_moe"),
        pytest.param(
            "mixtral", {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}, id="mixtral"
        ),
        pytest.param("minimax_m3_vl_text", {"target_modules": ["q_proj", "k_proj"]}, id="minimax_m3_vl_text"),
        *(pytest.param(case, {"target_modules": "all-linear"}, id=f"{case}-all") for case in ALL_LINEAR),
        pytest.param(
            "qwen3_vl-tied", {"target_modules": "all-linear", "modules_to_save": ["norm"]}, id="qwen3_vl-tied"
        ),
    ],
)
def test_peft_loads_what_is_trained_and_computes_the_same(
    case: str, settings: Settings, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = adapters.loaded_by_peft(case, settings, tmp_path)
    found = {name.replace(".default", "") for name, _ in loaded.model.named_parameters() if ".lora_" in name}
    assert found == {name for name in loaded.tensors if ".lora_" in name}
    assert loaded.difference < 1e-4 * loaded.moved


def test_the_names_are_written_in_one_line_of_the_log() -> None:
    _, config = hf_model("qwen3_moe")
    document: Settings = {"peft_type": "LORA", "target_modules": "all-linear"}
    assert complete_peft_config(document, config, ()) == (
        "PEFT would adapt or save other modules of this qwen3_moe model; adapter_config.json therefore names what is "
        "trained: target_modules q_proj, k_proj, v_proj, o_proj"
    )
    for right in (["q_proj", "v_proj"], ["q_proj", "gate_proj", "up_proj", "down_proj"]):
        assert complete_peft_config({"peft_type": "LORA", "target_modules": right}, config, ()) is None
    for case in ("llama", "bamba", "qwen3_5_text"):
        document = {"peft_type": "LORA", "target_modules": "all-linear"}
        assert complete_peft_config(document, hf_model(case)[1], ()) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "exclude_modules": ["experts.2.up_proj"]},
        {"target_modules": r".*\.2\.mlp\..*"},
    ],
)
def test_factors_of_some_experts_alone_are_reported(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    adapters.described(hf_model("qwen3_moe")[1], settings)
    assert "each routed expert has its own factors" in caplog.text


def test_many_names_are_shown_in_part():
    names = [f"n{number}" for number in range(_MOST_SHOWN + 2)]
    assert _shown("key", names[:_MOST_SHOWN]) == f"key {', '.join(names[:_MOST_SHOWN])}"
    assert _shown("key", names) == f"key {', '.join(names[:_MOST_SHOWN])} and 2 more"
    assert _shown("key", []) == "key none"


@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe"])
def test_modules_are_those_of_the_model_that_have_weights(case: str, tmp_path: Path) -> None:
    """Experts are one module in transformers, and one for each expert in checkpoints."""
    base = tiny_hf.save(case, tmp_path)
    model = adapters.base_model(base)
    theirs = {
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    }
    ours = _module_names(open_checkpoint(base).config)
    assert theirs <= ours
    assert all(".experts." in name for name in ours - theirs) and {"model", "model.layers"} <= ours


UP, DOWN = "shared_experts.up_proj", "shared_experts.down_proj"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"target_modules": ["o_proj", UP, DOWN]},
            {"target_modules": ["o_proj"], "target_parameters": [UP, DOWN]},
        ),
        (
            {"target_modules": [UP, "o_proj", "other"], "target_parameters": ["experts.down_proj"]},
            {"target_modules": ["o_proj", "other"], "target_parameters": ["experts.down_proj", UP]},
        ),
        ({"target_modules": ["o_proj", UP], "lora_dropout": 0.1}, {}),
        ({"target_modules": ["o_proj", "q_proj"], "modules_to_save": ["norm"]}, {}),
        (
            {"target_modules": ["o_proj", UP], "rank_pattern": {UP: 3, "o_proj": 4}},
            {
                "target_modules": ["o_proj"],
                "target_parameters": [UP],
                "rank_pattern": {r"shared_experts\.up_proj\.weight": 3, UP: 3, "o_proj": 4},
            },
        ),
        (
            {"target_modules": ["o_proj", UP], "alpha_pattern": {"o_proj": 4}, "r": 4},
            {"target_modules": ["o_proj"], "target_parameters": [UP]},
        ),
    ],
)
def test_linears_that_experts_have_too_are_named_by_their_weights(given: Settings, named: Settings) -> None:
    kind, different = tiny_hf.ALL["glm4_moe"]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    document = {"peft_type": "LORA", **given}
    assert name_targets(document, config) is bool(named)
    right = {"peft_type": "LORA", **given, **named}
    if UP in right.get("target_parameters", ()):
        right["target_parameters"] = [
            f"{name}.weight" if name in (UP, DOWN) else name for name in right["target_parameters"]
        ]
    assert document == right
    if "rank_pattern" in named:
        assert [*document["rank_pattern"]] == [*named["rank_pattern"]], "the first that matches counts"


def test_stacked_weights_are_named_by_their_last_three_words() -> None:
    config = config_from_hf(tiny_vision.described("qwen3_vl_moe"))
    own = [each for each in linear_targets(config) if each.base.expert is not None]
    (warning,) = peft_load_warnings(config, AdapterConfig({"target_modules": ["up_proj"]}), own)
    assert "; to load the adapter there, name mlp.experts.gate_up_proj, mlp.experts.down_proj in" in warning
    assert "factors for down_proj, gate_proj, up_proj, which" in warning


@pytest.mark.parametrize(
    ("case", "labels", "dropout", "named"),
    [
        ("qwen3_moe", ["gate", "q_proj"], 0.1, "gate"),
        ("qwen3_moe", ["gate"], 0.0, None),
        ("qwen3_moe", ["q_proj"], 0.1, None),
        ("qwen2_moe", ["gate", "shared_expert_gate"], 0.1, "gate"),
        ("glm4_moe", ["gate", "up_proj"], 0.1, "up_proj, gate"),
        ("llama", ["up_proj"], 0.1, None),
        ("kimi_k2", ["gate"], 0.1, None),
    ],
)
def test_what_peft_takes_for_a_parameter_has_no_dropout(
    case: str, labels: list[str], dropout: float, named: str | None
) -> None:
    kind, different = tiny_hf.ALL[case]
    config = config_from_hf({**tiny_hf.SIZE, **different, "model_type": kind})
    adapted = [each for each in linear_targets(config) if each.label in labels and each.base.expert is None]
    assert adapted
    found = list(peft_load_warnings(config, AdapterConfig({"lora_dropout": dropout}), adapted))
    assert len(found) == (named is not None)
    if named:
        assert found[0].startswith(
            f"lora_dropout: PEFT on transformers 5 adapts {named} of this {kind} model as"
        )


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, None),
        ({"exclude_modules": ["a"]}, ["a"]),
        ({"target_modules": "all-linear"}, r"(.*\.)?gate|(.*\.)?mixer"),
        ({"target_modules": "ALL-linear", "exclude_modules": "x.*"}, r"x.*|(.*\.)?gate|(.*\.)?mixer"),
        (
            {"target_modules": "all-linear", "exclude_modules": ["a.b"]},
            r"(.*\.)?a\.b|(.*\.)?gate|(.*\.)?mixer",
        ),
    ],
)
def test_all_linear_excludes_what_cannot_be_adapted(
    given: Settings, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text: Any = SimpleNamespace(unadaptable={"mixer", "gate"})
    family = SimpleNamespace(text=lambda config: text, vision=None)
    monkeypatch.setattr(peft_names, "get_family", lambda kind: family)
    document = dict(given)
    peft_names.exclude_unadapted(document, SimpleNamespace(model_type="any"), ("language",))  # type: ignore[arg-type]
    assert (
        document.get("exclude_modules") == written and document.keys() - {"exclude_modules"} <= given.keys()
    )


@pytest.mark.parametrize(
    ("name", "is_part"), [("a.b", True), ("a.b.c", True), ("a.bc", False), ("a", False), ("tower_2.x", True)]
)
def test_a_name_with_a_point_at_its_end_is_that_of_a_module_with_its_parts(name: str, is_part: bool) -> None:
    assert bool(re.match(_beginning_with(["a.b.", "tower"]), name)) == is_part
