"""Every family's template against checkpoints that transformers itself saved."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_hf
import torch
import transformers

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint_kinds import open_checkpoint
from mca_models.templates import FAMILIES, config_from_hf, config_to_hf, get_family
from mca_models.templates.config_table import REQUIRED
from mca_models.templates.parts.passthrough import without_passthrough
from mca_models.templates.shapes import full_shape
from mca_models.weights import Param

TEXT = [kind for kind, family in FAMILIES.items() if family.vision is None]


@pytest.fixture(scope="module", params=list(tiny_hf.ALL))
def checkpoint(request: Any, tmp_path_factory: Any) -> Path:
    return tiny_hf.save(request.param, tmp_path_factory.mktemp(request.param))


@lru_cache(maxsize=1)
def load(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the checkpoint, which its tests share."""
    return safetensors.torch.load_file(directory / "model.safetensors")


@lru_cache(maxsize=1)
def params_of(directory: Path) -> list[Param]:
    config = config_from_hf(tiny_hf.read_config(directory))
    family = get_family(config.model_type)
    return family.params(family.with_checkpoint_names(config, load(directory).keys()))


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in tiny_hf.ALL.values()} == set(TEXT)


def test_names_are_exactly_those_of_the_checkpoint(checkpoint: Path) -> None:
    tensors, params = load(checkpoint), params_of(checkpoint)
    assert {name for param in params for name in param.hf_names()} == set(tensors)
    mca = [param.mca_name() for param in params]
    assert len(mca) == len(set(mca))


def test_shapes_follow_from_the_configuration(checkpoint: Path) -> None:
    tensors = load(checkpoint)
    config = config_from_hf(tiny_hf.read_config(checkpoint))
    family = get_family(config.model_type)
    found = family.with_checkpoint_names(config, tensors.keys())
    assert family.hf_shapes(found) == {name: tuple(x.shape) for name, x in tensors.items()}
    for param in family.params(found):
        whole = param.to_full([tensors[name] for name in param.hf_names()])
        assert tuple(whole.shape) == full_shape(param, found), param.mca_name()


@pytest.mark.parametrize("size", [1, 2])
def test_round_trip_is_bit_exact_in_numpy_and_torch(checkpoint: Path, size: int) -> None:
    tensors = load(checkpoint)
    for param in params_of(checkpoint):
        source = [tensors[name] for name in param.hf_names()]
        pieces = [param.to_mca(source, rank, size) for rank in range(size)]
        as_numpy = [param.to_mca([x.numpy() for x in source], rank, size) for rank in range(size)]
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(pieces, as_numpy, strict=True))
        for before, after in zip(source, param.to_hf(pieces), strict=True):
            own = before[param.expert] if param.stacked else before
            assert torch.equal(own, after), param.mca_name()


def test_config_survives_both_ways(checkpoint: Path) -> None:
    hf = tiny_hf.read_config(checkpoint)
    config = config_from_hf(hf)
    assert config_to_hf(config) == hf
    read = McaModelConfig.from_json(config.to_json())
    assert read == config and McaModelConfig.from_json(read.to_json()).to_json() == read.to_json()
    assert McaModelConfig.from_fields(**config.to_fields()) == config


def test_a_config_json_made_from_scratch_means_the_same(checkpoint: Path) -> None:
    config = config_from_hf(tiny_hf.read_config(checkpoint))
    again = config_from_hf(config_to_hf(replace(config, hf_config={})))
    assert replace(again, hf_config={}) == replace(config, hf_config={})


def test_what_a_config_json_from_scratch_cannot_say_is_refused() -> None:
    config = config_from_hf({**tiny_hf.SIZE, "model_type": "llama"})
    with pytest.raises(McaError, match="cannot say that residual_multiplier"):
        config_to_hf(config.replace_fields(hf_config={}, residual_multiplier=0.5))


def test_unknown_fields_and_transformers_4_spelling_survive() -> None:
    hf = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": 8192},
        "torch_dtype": "bfloat16",
        "a_field_of_tomorrow": {"kept": [1, 2]},
    }
    config = config_from_hf(json.loads(json.dumps(hf)))
    assert (config.rope.rotary_base, config.dtype, config.attention.kv_channels) == (500000.0, "bfloat16", 16)
    assert config.rope.rope_scaling == {
        "rope_type": "linear",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    }
    assert config_to_hf(config) == hf


MUST_BE_SAID: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},  # transformers too needs it
    "dots1": {
        "num_experts_per_tok": 6,
        "n_routed_experts": 128,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
    "glm4_moe": {"head_dim": 128},  # transformers' own, 42, would rotate 21 dimensions
}


@pytest.mark.parametrize("kind", TEXT)
def test_absent_keys_mean_what_transformers_says(kind: str) -> None:
    beside = MUST_BE_SAID.get(kind, {})
    full = transformers.AutoConfig.for_model(kind, **beside).to_dict()
    needed = {field.hf for field in FAMILIES[kind].config.fields if field.default is REQUIRED}
    sizes = needed | beside.keys() | {"num_hidden_layers", "num_attention_heads"}
    least = {"model_type": kind} | {key: full[key] for key in sizes if key in full}
    written, guessed = config_from_hf(full), config_from_hf(least)
    same = {"hf_config": {}, "dtype": "float32"}
    assert replace(guessed, **same) == replace(written, **same)


ROUTED = {
    kind
    for kind in TEXT
    if kind in transformers.CONFIG_MAPPING
    and "router_aux_loss_coef" in dir(transformers.CONFIG_MAPPING[kind])
} - {"llama4_text"}
"""What transformers has a load-balancing loss for; Llama 4's keys are read by nothing."""


@pytest.mark.parametrize("kind", TEXT)
def test_a_load_balancing_loss_without_a_coefficient_has_transformers(kind: str) -> None:
    base = next(different for model_type, different in tiny_hf.ALL.values() if model_type == kind)
    hf = {**tiny_hf.SIZE, "num_experts_per_tok": 2, **base, "model_type": kind, "output_router_logits": True}
    config = config_from_hf(hf)
    if kind in ROUTED:
        theirs = transformers.CONFIG_MAPPING[kind]().router_aux_loss_coef
        assert (config.moe.moe_aux_loss_coeff, config.moe.moe_router_load_balancing_type) == (
            theirs,
            "aux_loss",
        )
    else:
        moe = config.moe
        assert moe is None or (moe.moe_aux_loss_coeff, moe.moe_router_load_balancing_type) == (0.0, "none")


@pytest.mark.parametrize("kind", TEXT)
def test_other_names_of_keys_win(kind: str) -> None:
    """Prefer the other names as transformers does, if a file has both."""
    its = transformers.CONFIG_MAPPING[kind] if kind in transformers.CONFIG_MAPPING else None
    full = transformers.AutoConfig.for_model(kind, **MUST_BE_SAID.get(kind, {})).to_dict() if its else {}
    for alias, name in (its.attribute_map if its else {}).items():
        if name not in full or alias == "layer_types":
            continue  # layer_types cannot be set in these families
        moved = {key: value for key, value in full.items() if key != name} | {alias: full[name]}
        other = not full[name] if isinstance(full[name], bool) else 2 * (full[name] or 1)
        for hf in (moved, {**moved, name: other}):
            found = config_from_hf(hf)
            assert replace(found, hf_config={}) == replace(config_from_hf(full), hf_config={}), alias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "'is_causal' is False; supported: True"),
        ({"is_causal": None}, "'is_causal' is None"),
        ({"model_type": "mpt"}, "model_type 'mpt' is not supported: learned relative position biases"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported: 'silu'"),
        ({"mlp_bias": True}, "'mlp_bias' is True"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"dtype": "int8"}, "'dtype' is 'int8'"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    hf = {**tiny_hf.SIZE, "model_type": "llama", **change}
    with pytest.raises(McaError, match=message):
        config_from_hf(hf)


def test_one_expert_of_a_sigmoid_is_refused() -> None:
    """transformers gives it the weight 1, Megatron its score; Llama 4 and scores as they are give the score too."""
    refused = set()
    for kind, different in tiny_hf.ALL.values():
        hf = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different}).to_dict()
        config = config_from_hf(hf)
        scored = config.moe is not None and config.moe.moe_router_score_function == "sigmoid"
        if scored and config.moe.moe_router_normalised and kind != "llama4_text":
            with pytest.raises(McaError, match="'num_experts_per_tok' is 1"):
                config_from_hf(hf | {"num_experts_per_tok": 1, "num_experts_per_token": 1})
            refused.add(kind)
    assert {"deepseek_v3", "flint", "nemotron_h"} < refused
    sigmoids = transformers.Cohere2MoeConfig(expert_selection_fn="sigmoid", num_experts_per_tok=1).to_dict()
    with pytest.raises(McaError, match="'num_experts_per_tok' is 1"):
        config_from_hf(sigmoids)


def test_sizes_of_full_layers_are_those_that_are_written() -> None:
    hf = transformers.AutoConfig.for_model(
        "gemma4_text", hidden_size_per_layer_input=0, head_dim=24, global_head_dim=24
    ).to_dict()
    assert hf["per_layer_config"] == {}  # nothing differs
    full = (config_from_hf(hf).layer_type_overrides or {})["full_attention"]
    assert (full["kv_channels"], full["num_query_groups"]) == (24, hf["num_key_value_heads"])
    del hf["head_dim"]
    full = (config_from_hf(hf).layer_type_overrides or {})["full_attention"]
    assert full["kv_channels"] == transformers.Gemma4TextConfig.__dataclass_fields__["head_dim"].default


def test_keys_that_no_layer_uses_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    kind, different = tiny_hf.ALL["gemma4_text-e2b"]
    hf = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different}).to_dict()
    config, family = config_from_hf(hf), FAMILIES[kind]
    names = family.hf_shapes(config).keys()
    unused = {f"model.layers.3.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")}
    assert not unused & names
    assert "hf_left_behind" not in family.with_checkpoint_names(config, names).extra
    assert family.ignored_hf(family.with_checkpoint_names(config, names | unused)) == unused
    assert "not read or exported: 3 tensors of keys and values" in caplog.text
    grown = config_to_hf(replace(config, vocab_size=80))
    assert grown["vocab_size"] == grown["vocab_size_per_layer_input"] == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vocab_size_per_layer_input": 80},
            "'vocab_size_per_layer_input' is 80; supported: the vocab_size 70",
        ),
        ({"hidden_size_per_layer_input": None}, "'hidden_size_per_layer_input' is None; supported: a number"),
        ({"enable_moe_block": True}, "'use_double_wide_mlp' is True"),
        ({"model_type": "gemma4_unified_text"}, "'hidden_size_per_layer_input' is 6"),
    ],
)
def test_what_embeddings_of_each_layers_own_cannot_be(change: dict[str, Any], message: str) -> None:
    kind, different = tiny_hf.ALL["gemma4_text-e2b"]
    ignored = {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": None}
    assert config_from_hf({**tiny_hf.SIZE, **different, **ignored}).per_layer_embedding is None
    with pytest.raises(McaError, match=message):
        config_from_hf({"model_type": kind, **tiny_hf.SIZE, **different, **change})


UNREAD = {
    "gpt_neox": ("gpt_neox.layers.3.attention.bias", "gpt_neox.layers.0.attention.masked_bias"),
    "gptj": ("transformer.h.3.attn.bias", "transformer.h.0.attn.masked_bias"),
    "stablelm": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
}


@pytest.mark.parametrize("case", UNREAD)
def test_published_tensors_that_transformers_passes_over(case: str, tmp_path: Path) -> None:
    directory = tiny_hf.save(case, tmp_path)
    tensors = load(directory)
    more = {name: torch.zeros(3) for name in UNREAD[case]}
    safetensors.torch.save_file({**tensors, **more}, directory / "model.safetensors", {"format": "pt"})
    transformers.AutoModelForCausalLM.from_pretrained(directory)
    known = {name for param in open_checkpoint(directory).params for name in param.hf_names()}
    assert known == tensors.keys()


CARRIED = {
    "ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"),
    "exaone_moe": ("mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"),
    "hy_v3": ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.expert_bias"),
    "longcat_flash": ("model.mtp.layers.0.eh_proj.weight", "model.mtp.norm.weight"),
    "mellum": ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.weight"),
    "mimo_v2_flash": ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.mlp.up_proj.weight"),
    "minimax_m3_vl_text": ("mtp.layers.0.eh_proj.weight", "model.mtp.norm.weight"),
    "nemotron_h": ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.gate.weight"),
    "olmo_hybrid": ("mtp.fc.weight", "mtp.norm.weight"),
    "bailing_hybrid": ("model.layers.4.attention.dense.weight", "model.layers.4.eh_proj.weight"),
}
"""Tensors of MTP layers, under names of published files; the tiny models have four layers."""


@pytest.mark.parametrize("case", CARRIED)
def test_prediction_layers_that_are_not_built_are_carried(case: str, tmp_path: Path, caplog: Any) -> None:
    directory = tiny_hf.save(case, tmp_path)
    tensors = load(directory)
    more = {name: torch.zeros(3, 2) for name in CARRIED[case]}
    safetensors.torch.save_file({**tensors, **more}, directory / "model.safetensors", {"format": "pt"})
    transformers.AutoModelForCausalLM.from_pretrained(directory)
    source = open_checkpoint(directory)
    shapes = {name: full_shape(param, source.config) for param in source.params for name in param.hf_names()}
    assert shapes.keys() == {**tensors, **more}.keys()
    assert all(shapes[name] == (3, 2) for name in more)
    assert f"2 tensors of MTP layers ({min(more)}, ...) are copied unchanged" in caplog.text
    counted = replace(source.config, hf_config={**source.config.hf_config, "num_nextn_predict_layers": 1})
    assert config_to_hf(counted)["num_nextn_predict_layers"] == 1
    built = without_passthrough(McaModelConfig.from_json(counted.to_json()))
    names = {name for param in get_family(built.model_type).params(built) for name in param.hf_names()}
    assert names == tensors.keys()
    assert config_to_hf(built) == {**config_to_hf(counted), "num_nextn_predict_layers": 0}


def test_every_family_that_carries_prediction_layers_is_here() -> None:
    found = set()
    for kind, different in tiny_hf.ALL.values():
        hf = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different}).to_dict()
        config, family = config_from_hf(hf), FAMILIES[kind]
        names = {*family.hf_shapes(config), "mtp.norm.weight"}
        if "hf_carried" in family.with_checkpoint_names(config, names, {"mtp.norm.weight": (2,)}).extra:
            found.add(kind)
    assert found == CARRIED.keys()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 0.0),
        ({"hidden_dropout": 0.1, "parallel_attn": False}, 0.1),
        ({"parallel_attn": False}, r"'attention_dropout' is 0\.1 and 'hidden_dropout' 0\.0"),
        ({"hidden_dropout": 0.2}, r"'hidden_dropout' is 0\.2; supported with parallel_attn: 0"),
        (
            {"hidden_dropout": 0.1, "parallel_attn": False, "new_decoder_architecture": True},
            "'parallel_attn' is false; supported with new_decoder_architecture: true",
        ),
        ({"num_ln_in_parallel_attn": 2}, "'num_ln_in_parallel_attn' is 2; supported without new_decoder"),
        ({"hidden_dropout": 0.1, "parallel_attn": False, "multi_query": False}, 0.1),
        ({"new_decoder_architecture": True, "num_kv_heads": 1}, 0.0),
    ],
)
def test_falcon_drops_behind_attention_and_mlp_and_no_scores(
    change: dict[str, Any], found: float | str
) -> None:
    hf = {**tiny_hf.SIZE, "model_type": "falcon", "attention_dropout": 0.1, **change}
    if isinstance(found, str):
        with pytest.raises(McaError, match=found):
            config_from_hf(hf)
        return
    config = config_from_hf(hf)
    assert (config.attention.attention_dropout, config.block.hidden_dropout) == (0.0, found)
    back = config_from_hf(config_to_hf(replace(config, hf_config={})))
    assert replace(back, hf_config={}) == replace(config, hf_config={})


def test_stacked_experts_and_doubled_tensors_are_noticed(tmp_path: Path) -> None:
    directory = tiny_hf.save("qwen3_moe", tmp_path)
    config = config_from_hf(tiny_hf.read_config(directory))
    family = get_family(config.model_type)
    found = family.with_checkpoint_names(config, {"model.layers.0.mlp.experts.gate_up_proj"})
    names = {name for param in family.params(found) for name in param.hf_names()}
    assert "model.layers.3.mlp.experts.down_proj" in names
    assert not any("experts.0." in name for name in names)


def test_prediction_layers_use_the_checkpoint_not_the_count(tmp_path: Path) -> None:
    directory = tiny_hf.save("deepseek_v3", tmp_path)
    config = config_from_hf(tiny_hf.read_config(directory))
    family = get_family(config.model_type)
    assert config.mtp_num_layers == 1
    assert family.with_checkpoint_names(config, set()).mtp_num_layers == 0
    names = {name for param in family.params(config) for name in param.hf_names()}
    found = family.with_checkpoint_names(config, names | {"model.layers.4.embed_tokens.weight"})
    assert found.mtp_num_layers == 1
    assert found.extra["hf_duplicates"] == ["model.layers.4.embed_tokens.weight"]
    prediction = [param for param in family.params(found) if param.mca_name().startswith("mtp.")]
    assert "model.layers.4.self_attn.kv_b_proj.weight" in {n for p in prediction for n in p.hf_names()}


@pytest.mark.parametrize(
    ("change", "new"),
    [
        ({}, False),
        ({"multi_query": False, "num_kv_heads": 2}, True),
        ({"new_decoder_architecture": True, "num_kv_heads": 1}, True),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, True),
        ({"parallel_attn": False, "multi_query": False}, False),
    ],
)
def test_falcon_has_the_new_architecture_only_where_it_needs_it(change: dict[str, Any], new: bool) -> None:
    config = config_from_hf({**tiny_hf.SIZE, "model_type": "falcon", **change})
    assert config_to_hf(replace(config, hf_config={}))["new_decoder_architecture"] is new
