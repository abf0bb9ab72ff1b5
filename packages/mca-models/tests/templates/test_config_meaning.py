"""Meaning of ``config.json`` for RoPE and training, compared with transformers."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny_hf import ALL, SIZE
from tiny_newer import LATEST

from mca_config.errors import McaError
from mca_models.templates import FAMILIES, config_from_hf, config_to_hf
from mca_models.templates.config_table import ConfigTable

HALF = {"partial_rotary_factor": 0.5, "rope_theta": 1e4}


def described(case: str, **different: Any) -> dict[str, Any]:
    kind, base = ALL[case]
    return {**SIZE, "model_type": kind, "num_experts_per_tok": 2, **base, **different}


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gpt_oss", "exaone4", "deepseek_v3", "gemma2"])
def test_families_without_partial_rotary_rotate_all_of_a_head(case: str) -> None:
    assert (
        config_from_hf(described(case, rope_parameters={**HALF, "rope_type": "default"})).rope.rotary_percent
        == 1
    )
    assert config_from_hf(described(case, rope_parameters=None, **HALF)).rope.rotary_percent == 1


def test_a_partial_rotary_that_transformers_fails_with_is_refused() -> None:
    rope = {**HALF, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(McaError, match=r"'partial_rotary_factor' is 0.5 with rope_type 'linear'.*1\.0"):
        config_from_hf(described("llama", rope_parameters=rope))


@pytest.mark.parametrize("case", ["phi3", "minimax_m2", "glm4_moe", "qwen3_next", "qwen3_5_text"])
def test_families_with_partial_rotary_keep_it(case: str) -> None:
    rope = {**HALF, "rope_type": "default"}
    assert config_from_hf(described(case, rope_parameters=rope)).rope.rotary_percent == 0.5


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_gpt_oss_without_a_rope_has_its_own(key: str) -> None:
    found = config_from_hf(described("gpt_oss", **{key: None}))
    theirs = transformers.GptOssConfig.from_dict({key: None}).rope_parameters
    assert {"rope_theta": found.rope.rotary_base, **(found.rope.rope_scaling or {})} == theirs


LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD = {"type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SHARE = {"partial_rotary_factor": 0.334}
FOUR = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
INSIDE, BESIDE = {"original_max_position_embeddings": 16}, {"original_max_position_embeddings": 32}
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": YARN, **BESIDE}),
    ("llama", {"rope_scaling": {**YARN, **INSIDE}, **BESIDE}),
    ("llama", {"rope_scaling": {**LLAMA3, **INSIDE}, **BESIDE}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": LONG, **BESIDE}),
    ("llama", {"rope_scaling": LONG}),
    ("llama", {"rope_scaling": LINEAR, **BESIDE}),
    ("phi3", {"rope_scaling": {**LONG, **FOUR, **INSIDE}, **BESIDE}),
    ("phi3", {"rope_scaling": {**LONG, **FOUR, **INSIDE}}),
    ("apertus", {"rope_theta": 5e5, "rope_scaling": None}),
    ("apertus", {"rope_scaling": LINEAR}),
    ("apertus", {"rope_parameters": {}}),
    ("cwm", {"rope_theta": 5e5, "rope_scaling": None}),
    ("cwm", {"rope_scaling": LINEAR}),
    ("gpt_neox", {"rope_theta": 5e5, "partial_rotary_factor": 1.0, "rotary_pct": 0.5}),
    ("bamba", {"partial_rotary_factor": 1.0}),
    ("cohere2_moe", {"rope_scaling": LINEAR, "rope_theta": 5e5}),
    *((kind, {"rope_scaling": rope}) for kind in ("gemma3_text", "olmo3") for rope in (LINEAR, OLD)),
    *(
        (kind, {"rope_scaling": rope, "rope_parameters": NESTED})
        for kind in ("gemma3_text", "olmo3")
        for rope in (LINEAR, OLD)
    ),
]


@pytest.mark.parametrize(("case", "said"), ROPES, ids=lambda value: value if isinstance(value, str) else "")
def test_ropes_are_those_that_transformers_makes_of_a_file(case: str, said: dict[str, Any]) -> None:
    hf = {
        key: value for key, value in described(case).items() if key not in ("rope_parameters", "rope_theta")
    }
    hf |= copy.deepcopy(said)
    found = config_from_hf(copy.deepcopy(hf))
    described_so = transformers.AutoConfig.for_model(**hf)
    described_so.standardize_rope_params()  # as every rope does when it is built
    theirs = described_so.rope_parameters
    theirs = theirs.get("full_attention", theirs)
    kind = theirs["rope_type"]
    assert (found.rope.rotary_base, (found.rope.rope_scaling or {}).get("rope_type", "default")) == (
        theirs["rope_theta"],
        kind,
    )
    table = FAMILIES[found.model_type].config
    assert isinstance(table, ConfigTable)
    if table.partial_rotary:
        assert found.rope.rotary_percent == theirs.get("partial_rotary_factor", 1.0)
    if kind in ("yarn", "llama3", "longrope"):
        key = "original_max_position_embeddings"
        assert (found.rope.rope_scaling or {})[key] == theirs[key]


@pytest.mark.parametrize("case", ["mellum", "mimo_v2_flash", "gemma4_text"])
def test_a_scaling_for_all_layers_beside_ropes_by_kind_is_refused(case: str) -> None:
    """Raise an error where transformers fails."""
    with pytest.raises(McaError, match=r"'rope_scaling' is .*; supported: None"):
        config_from_hf(described(case, rope_scaling=LINEAR))


@pytest.mark.parametrize("case", ["mellum", "mimo_v2_flash", "gemma3_text", "olmo3"])
def test_a_range_that_is_not_rounded_in_ropes_by_kind_is_refused(case: str) -> None:
    """Raise an error where transformers does not read the key."""
    full = {**YARN, **INSIDE, "rope_theta": 1e5, "attention_factor": 1.0, "truncate": False}
    full |= SHARE if case == "mimo_v2_flash" else {}
    with pytest.raises(
        McaError, match=r"'rope_parameters.full_attention.truncate' is False; supported: True"
    ):
        config_from_hf(described(case, rope_parameters={**NESTED, "full_attention": full}))
    assert config_from_hf(
        described(case, rope_parameters={**NESTED, "full_attention": {**full, "truncate": True}})
    )


@pytest.mark.parametrize(
    ("full", "sliding", "reported"),
    [
        ({}, LINEAR, "'rope_parameters.sliding_attention' is .*'linear'.*partial_rotary_factor"),
        ({}, {"partial_rotary_factor": 0.5}, "'rope_parameters.sliding_attention'.* which is 0.334"),
        (
            {**YARN, **SHARE},
            {},
            "'rope_parameters.full_attention' is of rope_type 'yarn'; .* attention_factor of 1.0",
        ),
        ({**YARN, **SHARE, "attention_factor": 1.0}, {}, None),
        ({**LINEAR, **SHARE}, {}, None),
        (LINEAR, {}, "'rope_parameters.sliding_attention'.* which is 1.0"),
    ],
)
def test_ropes_of_kinds_that_differ_in_more_than_their_base_are_refused(
    full: dict[str, Any], sliding: dict[str, Any], reported: str | None
) -> None:
    ropes = {
        "full_attention": {"rope_theta": 1e6, **full},
        "sliding_attention": {"rope_theta": 1e4, **sliding},
    }
    hf = described("mimo_v2_flash", rope_parameters=ropes)
    if reported is None:
        assert (config_from_hf(hf).rope.rope_scaling or {})["rope_type"] == full["rope_type"]
        return
    with pytest.raises(McaError, match=reported):
        config_from_hf(hf)


def test_queries_grow_from_the_context_beside_the_rope() -> None:
    rope = {**YARN, **INSIDE, "llama_4_scaling_beta": 0.1}
    found = config_from_hf(
        described("ministral3", rope_parameters={**rope, "factor": 2.0}, rope_scaling=rope, **BESIDE)
    )
    assert (found.attention.attn_temperature or {})["length"] == 32
    assert (found.rope.rope_scaling or {})["factor"] == 4.0


@pytest.mark.parametrize(
    ("case", "embeddings", "layers"),
    [("starcoder2", "embedding_dropout", "residual_dropout"), ("phi", "embd_pdrop", "resid_pdrop")],
)
def test_dropout_of_embeddings_is_followed(case: str, embeddings: str, layers: str) -> None:
    found = config_from_hf(described(case, **{embeddings: 0.2, layers: 0.1}))
    assert (found.embedding.embedding_dropout, found.block.hidden_dropout) == (0.2, 0.1)
    with pytest.raises(McaError, match=rf"'{embeddings}' is 0\.2 and '{layers}' 0; supported: 0 both"):
        config_from_hf(described(case, **{embeddings: 0.2, layers: 0}))


def test_an_indexer_has_at_least_the_channels_that_are_rotated() -> None:
    kind, document = LATEST["minimax_m3_vl_text"]
    document = {**SIZE, **document, "model_type": kind, "head_dim": 16}
    sparse = config_from_hf(document | {"index_head_dim": 8}).block_sparse_attention
    assert sparse is not None and sparse.index_blocks["channels"] == 8
    with pytest.raises(McaError, match="'index_head_dim' is 7; supported: at least the 8 channels"):
        config_from_hf(document | {"index_head_dim": 7})


def test_dropout_behind_the_mlp_alone_is_refused() -> None:
    with pytest.raises(McaError, match=r"'hidden_dropout' is 0\.1.*behind the MLP alone"):
        config_from_hf(described("stablelm", hidden_dropout=0.1))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("ernie4_5_moe", {"moe_layer_end_index": 4, "num_hidden_layers": 4}),
        ("ernie4_5_moe", {"moe_layer_end_index": -1}),
        ("hy_v3", {"first_k_dense_replace": 2, "mlp_layer_types": None}),
        ("mellum", {"first_k_dense_replace": 2, "mlp_layer_types": None}),
        ("olmoe", {"decoder_sparse_step": 2, "mlp_only_layers": [0]}),
        ("llama4_text", {"interleave_moe_layer_step": 2}),
        ("llama4_text", {"interleave_moe_layer_step": 3}),
        ("llama4_text", {"interleave_moe_layer_step": 2, "moe_layers": [0, 3]}),
    ],
)
def test_layers_with_experts_are_those_that_transformers_makes(case: str, said: dict[str, Any]) -> None:
    hf = described(case, **said)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    sparse = [
        hasattr(getattr(layer, "feed_forward", None) or layer.mlp, "experts") for layer in model.model.layers
    ]
    config = config_from_hf(hf)
    assert [config.is_moe_layer(layer) for layer in range(config.num_layers)] == sparse


@pytest.mark.parametrize("full", [{}, {"rope_type": "proportional"}])
def test_a_named_rope_of_gemma4_rotates_all_of_a_head(full: dict[str, Any]) -> None:
    """Only a file that names none has the family's quarter."""
    hf = described(
        "gemma4_text", rope_parameters={"full_attention": {"rope_theta": 1e6, **full}} if full else None
    )
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(hf)).rope_parameters["full_attention"]
    found = config_from_hf(hf).rope.rope_scaling or {}
    assert (
        found["partial_rotary_factor"] == theirs.get("partial_rotary_factor", 1.0) == (1.0 if full else 0.25)
    )


def test_kinds_of_layers_follow_from_the_key_that_transformers_reads() -> None:
    hf = {**described("gemma3_text", _sliding_window_pattern=2), "layer_types": None}
    assert list(config_from_hf(hf).layer_types or ()) == transformers.AutoConfig.for_model(**hf).layer_types


def test_older_names_of_kinds_are_known() -> None:
    hf = described("olmo_hybrid")
    kinds = [{"full_attention": "attention"}.get(kind, kind) for kind in hf["layer_types"]]
    assert "attention" in kinds
    assert config_from_hf({**hf, "layer_types": kinds}).layer_types == config_from_hf(hf).layer_types


def test_residual_dropout_is_followed() -> None:
    assert config_from_hf(described("phi3", resid_pdrop=0.3)).block.hidden_dropout == 0.3
    assert config_from_hf(described("phi3")).block.hidden_dropout == 0.0
    assert (
        config_from_hf(described("seed_oss")).block.hidden_dropout
        == transformers.SeedOssConfig().residual_dropout
    )
    assert config_from_hf(described("seed_oss", residual_dropout=0.0)).block.hidden_dropout == 0.0


@pytest.mark.parametrize("case", ["mixtral", "minimax_m2"])
def test_router_jitter_is_refused(case: str) -> None:
    assert config_from_hf(described(case, router_jitter_noise=0.0))
    with pytest.raises(McaError, match=r"'router_jitter_noise' is 0\.2"):
        config_from_hf(described(case, router_jitter_noise=0.2))


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_more_experts_for_a_token_than_its_groups_have_are_refused(case: str) -> None:
    assert config_from_hf(described(case, num_experts_per_tok=3, topk_group=2))
    with pytest.raises(McaError, match=r"'num_experts_per_tok' is 3.* up to 2, or a larger 'topk_group'"):
        config_from_hf(described(case, num_experts_per_tok=3))


@pytest.mark.parametrize(
    ("case", "groups", "message"),
    [
        ("mistral4", 1, "'topk_group' is 3; supported: 1"),
        ("deepseek_v3", 2, "'topk_group' is 3, for 2 groups of experts; supported: up to 2"),
    ],
)
def test_more_groups_for_a_token_than_there_are_are_refused(case: str, groups: int, message: str) -> None:
    assert config_from_hf(described(case, n_group=groups, topk_group=groups))
    with pytest.raises(McaError, match=message):
        config_from_hf(described(case, n_group=groups, topk_group=3))


@pytest.mark.parametrize("case", ["phi", "persimmon", "glm4", "stablelm"])
def test_an_odd_number_of_rotated_dimensions_is_refused(case: str) -> None:
    width = config_from_hf(described(case)).attention.kv_channels

    def rotating(dimensions: int) -> Any:
        return described(case, partial_rotary_factor=dimensions / width)

    assert config_from_hf(rotating(4)).rope.rotary_percent == 4 / width
    with pytest.raises(
        McaError, match=f"'partial_rotary_factor' is .*, which rotates 3 of the {width} dimensions"
    ):
        config_from_hf(rotating(3))


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe", "nemotron_h"])
@pytest.mark.parametrize("said", [{}, {"topk_group": None}])
def test_a_token_is_sent_to_one_group_where_their_number_is_not_said(
    case: str, said: dict[str, None]
) -> None:
    groups = described(case, n_group=4, n_routed_experts=8, topk_group=1)
    unsaid = {key: value for key, value in groups.items() if key != "topk_group"} | said
    assert config_from_hf(groups).moe.moe_router_group_topk == 1
    # without the key transformers' default of the family stands
    assert config_from_hf(unsaid).moe.moe_router_group_topk == (
        4 if case == "deepseek_v3" and not said else 1
    )


@pytest.mark.parametrize("kind", sorted(kind for kind, family in FAMILIES.items() if family.vision is None))
def test_the_padding_token_that_is_not_named_is_transformers(kind: str) -> None:
    case = next(case for case, (model_type, _) in ALL.items() if model_type == kind)
    without = {key: value for key, value in described(case).items() if key != "pad_token_id"}
    theirs = transformers.AutoConfig.for_model(kind).pad_token_id
    if theirs is not None:  # some embeddings take a padding token for one like any other
        config = transformers.AutoConfig.for_model(**without, pad_token_id=theirs % 70)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        theirs = None if model.get_input_embeddings().padding_idx is None else theirs
    assert config_from_hf(without).embedding.pad_token_id == theirs
    assert config_from_hf({**without, "pad_token_id": None}).embedding.pad_token_id is None


@pytest.mark.parametrize(
    ("key", "value", "reported"),
    [
        ("ssm_in_multiplier", float("nan"), "'ssm_in_multiplier' is nan; supported: a number"),
        ("ssm_out_multiplier", None, "'ssm_out_multiplier' is None; supported: a number"),
        ("attention_in_multiplier", [1.0], r"'attention_in_multiplier' is \[1.0\]; supported: a number"),
        ("attention_out_multiplier", float("inf"), "'attention_out_multiplier' is inf; supported: a number"),
        ("key_multiplier", "x", "'key_multiplier' is 'x'; supported: a number"),
        ("lm_head_multiplier", None, "'lm_head_multiplier' is None; supported: a number"),
        ("lm_head_multiplier", 0, "'lm_head_multiplier' is 0.0; supported: a number above 0"),
        ("embedding_multiplier", float("nan"), "embedding_multiplier must be a finite number"),
        ("ssm_multipliers", [1.0] * 4, "'ssm_multipliers' is .*; supported: 5 numbers"),
        ("ssm_multipliers", 1.0, "'ssm_multipliers' is 1.0; supported: 5 numbers"),
        ("mamba_d_ssm", "x", "mamba_d_ssm is .x.; supported: a multiple of mamba_n_heads"),
        ("mamba_d_ssm", 50, "mamba_d_ssm is 50; supported: a multiple of mamba_n_heads, which is 8"),
    ],
)
def test_falcon_h1_is_refused_by_the_key_that_is_wrong(key: str, value: Any, reported: str) -> None:
    with pytest.raises(McaError, match=reported):
        config_from_hf(described("falcon_h1", **{"mamba_d_head": "auto", key: value}))


def test_falcon_h1_divides_logits_by_the_inverse_of_their_factor() -> None:
    assert config_from_hf(described("falcon_h1", lm_head_multiplier=0.25)).head.logits_scaling == 4


def test_falcon_h1_without_state_factors_has_five_of_one() -> None:
    hf = described("falcon_h1-norm", ssm_multipliers=[1.0] * 5, ssm_out_multiplier=1.0)
    written = config_to_hf(replace(config_from_hf(hf), hf_config={}))
    assert [*written["ssm_multipliers"], written["ssm_out_multiplier"]] == [1.0] * 6


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_every_mtp_layer_may_repeat_the_embedding_and_the_head(case: str) -> None:
    config = config_from_hf(described(case, num_hidden_layers=3, num_nextn_predict_layers=2))
    repeated = {name: f"model.layers.{{layer}}.{name}" for name in ("embed_tokens", "shared_head.head")}
    found = FAMILIES[config.model_type].copies(config)
    assert set(found) == {
        f"{name.format(layer=layer)}.weight" for name in repeated.values() for layer in (3, 4)
    }


def test_blocks_of_an_indexer_that_fill_memory_are_refused() -> None:
    with pytest.raises(
        McaError, match=r"'index_block_size' is 10{12}; supported: whole numbers from 1 to 1048576"
    ):
        config_from_hf(described("minimax_m3_vl_text", index_block_size=10**12))


@pytest.mark.parametrize(
    ("key", "least"), [("index_block_size", 1), ("index_topk_blocks", 1), ("index_local_blocks", 0)]
)
def test_sizes_of_an_indexer_are_accepted_up_to_their_limits(key: str, least: int) -> None:
    most = 1 << 20
    for value in (least, most):
        others = {"index_topk_blocks": most} if key == "index_local_blocks" else {"index_local_blocks": 0}
        config_from_hf(described("minimax_m3_vl_text", **{**others, key: value}))
    for value in (least - 1, most + 1, float(most)):
        with pytest.raises(McaError, match=f"'{key}' is .*whole numbers from {least} to {most}"):
            config_from_hf(described("minimax_m3_vl_text", **{key: value}))


def test_ropes_of_granite_with_windows_are_scaled_if_all_layers_have_one() -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    one = described("granite_swa", layer_rope_theta=[1e4] * 4, rope_parameters=scaled)
    assert config_from_hf(one).rope.rope_scaling
    with pytest.raises(McaError, match="'layer_rope_theta' is"):
        config_from_hf(described("granite_swa", rope_parameters=scaled))


@pytest.mark.parametrize(("case", "percent"), [("llama", None), ("phi3", 0.5)])
def test_a_config_json_from_scratch_names_the_rotated_share_of_a_head_only_if_it_is_not_whole(
    case: str, percent: float | None
) -> None:
    rope = {**HALF, "rope_type": "default"}
    written = config_to_hf(replace(config_from_hf(described(case, rope_parameters=rope)), hf_config={}))
    named = {} if percent is None else {"partial_rotary_factor": percent}
    assert written["rope_parameters"] == {"rope_theta": 1e4, "rope_type": "default"} | named


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": None}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
    ],
)
def test_weights_have_the_dtype_of_config_json(keys: dict[str, Any], dtype: str) -> None:
    assert config_from_hf(described("llama", **keys)).dtype == dtype


def test_a_dtype_that_weights_cannot_have_is_refused() -> None:
    words = "config.json: 'dtype' is 'int8'; supported: 'float32', 'bfloat16', 'float16'"
    with pytest.raises(McaError, match=words):
        config_from_hf(described("llama", torch_dtype="int8"))
