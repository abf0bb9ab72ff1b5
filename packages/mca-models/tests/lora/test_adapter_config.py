"""Modules of an adapter's configuration, their ranks and scales, against PEFT; and the supported values."""

import re
from math import sqrt
from typing import Any

import peft
import pytest
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from mca_config.errors import McaError
from mca_models.lora.config import _CHANGES_BASE, _REFUSED, AdapterConfig

NAMES = [
    *(
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.10.self_attn.q_proj",
    ),
    *("model.layers.1.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.1.up_proj"),
    *("model.layers.1.mlp.up_proj", "model.layers.1.xq_proj", "model.layers.1.q_proj.up_proj"),
    *("transformer.h.1.attn.c_attn", "model.norm", "lm_head", "score"),
]
BOTH: dict[str, Any] = {"target_modules": ["q_proj", "up_proj", "c_attn", "lm_head", "norm"]}


@pytest.mark.parametrize(
    "settings",
    [
        BOTH,
        {"target_modules": ["self_attn.q_proj", "lm_head"]},
        {"target_modules": ["proj"]},
        {"target_modules": r".*q_proj"},
        {"target_modules": r"q_proj"},
        {"target_modules": r"model\.layers\.1\..*"},
        *({**BOTH, "layers_to_transform": layers} for layers in (1, [1], [0, 10], [], 0, [2])),
        *(
            {**BOTH, "layers_to_transform": [1], "layers_pattern": pattern}
            for pattern in ("layers", "h", ["h", "layers"], ["layers", "experts"], "experts", [], "", "lay.*")
        ),
        {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [1]},
        *({**BOTH, "exclude_modules": left} for left in (["q_proj"], ["norm", "1.mlp.up_proj"], ["proj"])),
        *({**BOTH, "exclude_modules": left} for left in (r".*experts.*", "experts", "lm_head", "")),
        *(
            {**BOTH, "modules_to_save": saved}
            for saved in (["lm_head"], ["mlp"], ["layers.1"], ["q_proj"], ["x"])
        ),
        {**BOTH, "modules_to_save": ["norm"], "exclude_modules": ["lm_head"], "layers_to_transform": [1]},
    ],
)
def test_modules_are_adapted_as_by_peft(settings: dict[str, Any]) -> None:
    theirs = peft.LoraConfig(**settings)
    ours = AdapterConfig.from_dict({"peft_type": "LORA", **settings})
    found = {name: ours.targets(name) for name in NAMES}
    assert found == {name: bool(check_target_module_exists(theirs, name)) for name in NAMES}
    assert {name: ours.targets(name, linear=False) for name in NAMES} == found


def test_all_linear_means_linears_that_are_not_left_out() -> None:
    settings = {"target_modules": "All-Linear", "exclude_modules": ["q_proj"], "modules_to_save": ["score"]}
    adapter = AdapterConfig.from_dict({"peft_type": "LORA", **settings})
    left = {name for name in NAMES if not adapter.targets(name)}
    assert left == {name for name in NAMES if name.endswith((".q_proj", "score"))}
    assert not any(adapter.targets(name, linear=False) for name in NAMES)


@pytest.mark.parametrize("rslora", [False, True, None])
def test_ranks_and_scales_are_those_of_the_first_pattern_as_in_peft(rslora: bool | None) -> None:
    ranks = {"layers.1.mlp.up_proj": 5, "proj": 6, "self_attn.q_proj": 3, r".*experts.*": 7, "q_proj": 4}
    alphas = {r"model\.norm": 0.5, "up_proj": 12, r"layers\.1\..*": 16}
    document = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "use_rslora": rslora,
    }
    adapter = AdapterConfig.from_dict({**document, "rank_pattern": ranks, "alpha_pattern": alphas})
    plain = AdapterConfig.from_dict(document)
    for name in NAMES:
        rank = ranks.get(get_pattern_key(list(ranks), name), 2)
        alpha = alphas.get(get_pattern_key(list(alphas), name), 6)
        assert (adapter.rank(name), adapter.alpha(name)) == (rank, alpha), name
        assert adapter.scale(name) == pytest.approx(alpha / (sqrt(rank) if rslora else rank)), name
        assert (plain.rank(name), plain.alpha(name)) == (2, 6)


def test_what_a_configuration_leaves_out_is_as_in_peft() -> None:
    theirs = peft.LoraConfig(target_modules=["q_proj"])
    ours = AdapterConfig.from_dict({"peft_type": "LORA", "target_modules": ["q_proj"]})
    assert (ours.rank("q_proj"), ours.alpha("q_proj"), ours.dropout) == (theirs.r, theirs.lora_alpha, 0.0)
    assert theirs.lora_dropout == 0.0 and ours.modules_to_save == () and not ours.targets_parameter("q_proj")
    null = dict.fromkeys(("rank_pattern", "lora_dropout", "modules_to_save", "exclude_modules", "use_rslora"))
    same = AdapterConfig.from_dict({"peft_type": "LORA", "target_modules": ["q_proj"], **null})
    assert (same.rank("q_proj"), same.scale("q_proj"), same.dropout, same.modules_to_save) == (
        8,
        1.0,
        0.0,
        (),
    )


@pytest.mark.parametrize(
    ("entry", "tensor", "saved"),
    [
        ("embed_tokens", "model.embed_tokens.weight", True),
        ("tokens", "model.embed_tokens.weight", True),
        ("weight", "model.embed_tokens.weight", False),
        ("model", "model.embed_tokens.weight", True),
        ("embed", "model.embed_tokens.weight", False),
        ("lm_head", "lm_head.weight", True),
        ("model.norm", "model.norm.weight", True),
        ("mlp", "model.layers.0.mlp.up_proj.weight", True),
        ("0", "model.layers.0.mlp.up_proj.weight", True),
        ("1", "model.layers.0.mlp.up_proj.weight", False),
    ],
)
def test_a_saved_module_has_all_its_tensors(entry: str, tensor: str, saved: bool) -> None:
    assert AdapterConfig({"modules_to_save": ["other", entry]}).saves(tensor) is saved
    assert not AdapterConfig({}).saves(tensor)


def checked(**settings: Any) -> AdapterConfig:
    return AdapterConfig.from_dict({"peft_type": "LORA", "target_modules": ["q_proj"], **settings})


def test_each_setting_that_cannot_be_represented_is_refused_with_its_reason() -> None:
    for key, why in _REFUSED.items():
        for empty in (None, False, [], {}, ""):
            checked(**{key: empty})
        with pytest.raises(McaError, match=re.escape(f"{key} is not supported: {why}")):
            checked(**{key: [1]})
    for start in (True, False, None, "gaussian", "eva", "orthogonal", "mica"):
        checked(init_lora_weights=start)
    for start in (*_CHANGES_BASE, "PiSSA_niter_4", "LoftQ"):
        with pytest.raises(McaError, match=f"init_lora_weights '{start}' changed the base weights"):
            checked(init_lora_weights=start)
    checked(tomorrow=None, later=False)
    with pytest.raises(McaError, match="later is not known") as caught:
        checked(tomorrow=1, later=2)
    assert "tomorrow is not known" in str(caught.value)
    with pytest.raises(McaError, match="name nothing"):
        AdapterConfig.from_dict({"peft_type": "LORA"})
    assert AdapterConfig.from_dict({"peft_type": "LORA", "target_parameters": ["a"]}).targets_parameter("x.a")
    for kind in (None, "lora", "IA3"):
        with pytest.raises(McaError, match=f"peft_type is {kind!r}; only LORA adapters are supported"):
            AdapterConfig.from_dict({"peft_type": kind, "r": 0})


@pytest.mark.parametrize(
    ("key", "accepted", "refused"),
    [
        ("rank_pattern", ({}, {"a": 1}, None), ({"a": 0}, {"a": 1, "b": "x"}, [1], "a")),
        ("alpha_pattern", ({}, {"a": 0.5}, None), ({"a": None}, {"a": True}, ["a"])),
        ("lora_dropout", (None,), ("0.1", [0.1])),
        ("target_modules", ("a", ["a", "b"]), (5, ["a", 5], {"a": 1})),
        ("exclude_modules", ("a", ["a"], [], None), (5, ["a", 5])),
        ("target_parameters", (["a"], [], None), ("a", [5])),
        ("modules_to_save", (["a"], [], None), ("a", [5])),
        ("layers_to_transform", (None, [], -1), ("1", ["1"], {})),
        ("layers_pattern", ("a", ["a"], None), (5, [5])),
        ("bias", ("none",), (5, False)),
        ("init_lora_weights", (True, "gaussian", None), (1, ["gaussian"])),
        ("use_rslora", (None,), ([], "yes")),
        ("r", (3,), (None, "3", -1)),
        ("lora_alpha", (3, 0.5), (None, "3", float("-inf"))),
    ],
)
def test_each_setting_has_a_type(key: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in accepted:
        checked(**{key: value})
    for value in refused:
        with pytest.raises(McaError, match=f"{key} must be "):
            checked(**{key: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "(["},
        {"exclude_modules": "(["},
        {"layers_pattern": "(["},
        {"layers_pattern": ["a", "(["]},
        {"rank_pattern": {"a": 1, "([": 1}},
        {"alpha_pattern": {"([": 1}},
        {"modules_to_save": ["a", "(["]},
    ],
)
def test_patterns_are_regular_expressions(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(McaError, match=rf"{key}: '\(\[' is no regular expression"):
        checked(**settings)
    checked(exclude_modules=["(["])


def test_a_list_of_layers_requires_a_list_of_names() -> None:
    checked(target_modules="q_proj", layers_to_transform=None)
    with pytest.raises(McaError, match="layers_to_transform needs target_modules to be a list of names"):
        checked(target_modules="q_proj", layers_to_transform=0)
