"""Families with Llama's layers, that differ in ``config.json``: keys, defaults, constants, and a few parameters."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    BOTH,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    RELU2,
    RELU2_MLP,
    SILU,
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    norm_epsilon,
    read_rope,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.common import dense_layers, inner, renamed
from mca_models.templates.parts.rope import FULL, LLAMA3, SLIDING, write_layer_types
from mca_models.templates.parts.sliding_window import write_window
from mca_models.weights import SEPARATE, Layout, Param, Shaped, expand_rules


def _llama_like(model_type: str, architecture: str, config: ConfigTable) -> Family:
    return Family(model_type=model_type, architecture=architecture, config=config, params=dense_layers)


def _smollm3_derive(hf: HfConfig) -> JsonObject:
    """Layers without rope (HF lists those *with* it under ``no_rope_layers``), which may have a window."""
    step = hf.get("no_rope_layer_interval", 4)
    rotated = hf.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(hf["num_hidden_layers"])]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types") or ["full_attention" if yes else "sliding_attention" for yes in rotated]
    return {
        "no_rope_freq": tuple(1 - int(yes) for yes in rotated),
        "window_size": window,
        "layer_types": tuple(kinds) if window else None,
    }


def _smollm3_write(values: Values) -> HfConfig:
    rotated = [1 - skip for skip in values["no_rope_freq"] or (0,) * values["num_layers"]]
    return {"no_rope_layers": rotated, **write_window(values)}


_APERTUS_ROPE = {**LLAMA3, "rope_theta": 12e6, "factor": 8.0}
_CWM_ROPE = {**LLAMA3, "rope_theta": 1e6, "factor": 16.0}


def _own_rope(hf: HfConfig, rope: JsonObject) -> JsonObject:
    """Return the family's ``rope`` if the file names none."""
    named = any(hf.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    return {} if named else read_rope({"rope_parameters": rope})


def _cwm_derive(hf: HfConfig) -> JsonObject:
    """Derive each layer's kind, and the rope."""
    pattern = [SLIDING if i % 4 else FULL for i in range(hf["num_hidden_layers"])]
    window = hf.get("sliding_window", 8192) or None
    kinds = tuple(hf.get("layer_types") or pattern) if window else None
    return {"window_size": window, "layer_types": kinds, **_own_rope(hf, _CWM_ROPE)}


def _cwm_write(values: Values) -> HfConfig:
    return {"sliding_window": values["window_size"] or 0, **write_layer_types(values)}


_XIELU: dict[str, Layout] = {
    "alpha_p": SEPARATE,
    "alpha_n": SEPARATE,
    "beta": Shaped(()),
    "eps": Shaped(()),
}
"""Weights of Apertus' activation."""


def _apertus_params(config: McaModelConfig) -> list[Param]:
    norms = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    weights = [
        inner(f"mlp.activation_func.{part}", f"mlp.act_fn.{part}", hf_layout=layout)
        for part, layout in _XIELU.items()
    ]
    return [*renamed(dense_layers(config), norms), *expand_rules(weights, layers=range(config.num_layers))]


def _nanochat_params(config: McaModelConfig) -> list[Param]:
    return renamed(dense_layers(config), {"up_proj": "fc1", "down_proj": "fc2"})


FAMILIES = by_type(
    # Llama 2 and 3.
    _llama_like(
        "llama",
        "LlamaForCausalLM",
        ConfigTable(fields=dense_fields(), fixed=(SILU, NO_ATTENTION_BIAS, NO_MLP_BIAS)),
    ),
    # InternLM 3: Llama under its own `model_type`.
    _llama_like(
        "internlm3",
        "LlamaForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-5),
            defaults={"num_key_value_heads": 2, "head_dim": 128, "pad_token_id": 2},
            aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
            fixed=(
                *SWIGLU_WITHOUT_BIASES,
                *(Fixed(key, (False,), "the published models have none") for key in ("qkv_bias", "bias")),
            ),
        ),
    ),
    # IQuest-Coder: Llama under its own `model_type`.
    _llama_like(
        "iquestcoder",
        "LlamaForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-5),
            defaults={"num_key_value_heads": 8, "head_dim": 128},
            fixed=(
                *SWIGLU_WITHOUT_BIASES,
                Fixed("clip_qkv", (None,), "Megatron does not clip q, k and v"),
                Fixed("use_sliding_window", (False,), "no published model has one"),
            ),
        ),
    ),
    # Seed-OSS: Llama's weights with biases on q, k and v.
    _llama_like(
        "seed_oss",
        "SeedOssForCausalLM",
        ConfigTable(
            fields=(
                *dense_fields(),
                Field("add_qkv_bias", "attention_bias", True),
                Field("hidden_dropout", "residual_dropout", 0.1),
            ),
            defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_dropout": 0.1, "pad_token_id": 1},
            fixed=(
                SILU,
                Fixed("attention_out_bias", (False,), "Megatron has no bias on the output projection alone"),
                NO_MLP_BIAS,
            ),
        ),
    ),
    # Helium: Llama's weights; RoPE turns neighbouring channels.
    _llama_like(
        "helium",
        "HeliumForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-8),
            defaults={"num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5, "pad_token_id": 3},
            constants={"rotary_interleaved": True},
            fixed=SWIGLU_WITHOUT_BIASES,
        ),
    ),
    # ERNIE 4.5, dense: Llama's weights; RoPE turns neighbouring channels.
    _llama_like(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        ConfigTable(
            fields=dense_fields(tied=True, eps=1e-5),
            defaults={"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 5e5, "pad_token_id": 0},
            constants={"rotary_interleaved": True},
            fixed=(SILU, Fixed("use_bias", (False, None), "no published model has biases")),
        ),
    ),
    # Arcee AFM: Llama with an MLP of squared ReLU, without a gate.
    _llama_like(
        "arcee",
        "ArceeForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-5), constants=RELU2_MLP, fixed=(RELU2, NO_ATTENTION_BIAS, NO_MLP_BIAS)
        ),
    ),
    # Nemotron 3 and 4, Minitron: zero-centered LayerNorms, squared ReLU, partial RoPE.
    _llama_like(
        "nemotron",
        "NemotronForCausalLM",
        ConfigTable(
            fields=norm_epsilon(dense_fields(eps=1e-5), "norm_eps"),
            defaults={"partial_rotary_factor": 0.5, "initializer_range": 0.0134},
            constants={**RELU2_MLP, "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True},
            fixed=(RELU2, NO_ATTENTION_BIAS, NO_MLP_BIAS),
            partial_rotary=True,
        ),
    ),
    # Jais 2: LayerNorms, biases everywhere, squared ReLU.
    _llama_like(
        "jais2",
        "Jais2ForCausalLM",
        ConfigTable(
            fields=norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps"),
            constants={**RELU2_MLP, "normalization": "LayerNorm", "add_bias_linear": True},
            fixed=(RELU2, Fixed("attention_bias", (True,), BOTH), Fixed("mlp_bias", (True,), BOTH)),
        ),
    ),
    # StableLM: LayerNorms, a quarter of each head is rotated.
    _llama_like(
        "stablelm",
        "StableLmForCausalLM",
        ConfigTable(
            fields=(
                *norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps"),
                Field("add_qkv_bias", "use_qkv_bias", False),
            ),
            defaults={"num_key_value_heads": 32, "partial_rotary_factor": 0.25},
            constants={"normalization": "LayerNorm"},
            fixed=(
                SILU,
                Fixed(
                    "use_parallel_residual",
                    (False,),
                    "Megatron's attention and MLP stand one after the other",
                ),
                Fixed("hidden_dropout", (0.0,), "transformers drops behind the MLP alone"),
                Fixed("qk_layernorm", (False,), "each head would have its own norm"),
            ),
            partial_rotary=True,
        ),
    ),
    # SmolLM 3: every fourth layer is NoPE.
    _llama_like(
        "smollm3",
        "SmolLM3ForCausalLM",
        ConfigTable(
            fields=dense_fields(tied=True),
            defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "pad_token_id": 128004},
            fixed=SWIGLU_WITHOUT_BIASES,
            facts=(Lens(_smollm3_derive, _smollm3_write),),
        ),
    ),
    # Code World Model: three of four layers have a sliding window.
    _llama_like(
        "cwm",
        "CwmForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-5),
            defaults={"num_key_value_heads": 8, "rope_theta": _CWM_ROPE["rope_theta"]},
            fixed=SWIGLU_WITHOUT_BIASES,
            facts=(Lens(_cwm_derive, _cwm_write),),
        ),
    ),
    # Apertus: an activation with weights, no gate, QK-norm for each head.
    replace(
        _llama_like(
            "apertus",
            "ApertusForCausalLM",
            ConfigTable(
                fields=dense_fields(eps=1e-5),
                defaults={"pad_token_id": 3, "rope_theta": _APERTUS_ROPE["rope_theta"]},
                constants={"hidden_act": "xielu", "gated_linear_unit": False, "qk_layernorm": True},
                fixed=(NO_ATTENTION_BIAS, Fixed("hidden_act", ("xielu",), "this family's MLP")),
                facts=(Lens(lambda hf: _own_rope(hf, _APERTUS_ROPE)),),
            ),
        ),
        params=_apertus_params,
    ),
    # nanochat: norms without weights, of embeddings too; squared ReLU, capped logits.
    replace(
        _llama_like(
            "nanochat",
            "NanoChatForCausalLM",
            ConfigTable(
                fields=(*dense_fields(), Field("final_logit_softcapping", "final_logit_softcapping", None)),
                defaults={"pad_token_id": 1, "final_logit_softcapping": 15.0},
                constants={
                    **RELU2_MLP,
                    "norm_weight": False,
                    "embedding_norm": True,
                    "qk_layernorm": True,
                    "qk_layernorm_after_rope": True,
                    "qk_layernorm_weight": False,
                    "rotary_backwards": True,
                },
                fixed=(RELU2, NO_ATTENTION_BIAS),
            ),
        ),
        params=_nanochat_params,
    ),
)
