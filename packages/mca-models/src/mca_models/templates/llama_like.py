"""Families that differ from Llama in values alone: keys, defaults and constants of ``config.json``."""

from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    SILU,
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    Fixed,
    dense_fields,
    norm_epsilon,
)
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import BOTH, GELU, NO_BIAS, NO_BIDIRECTIONAL, RELU2, RELU2_MLP
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.multipliers import EMBEDDING_SCALE, FACTORS
from mca_models.templates.parts.query_temperature import YARN, query_temperature
from mca_models.templates.parts.sliding_window import LISTED_WINDOWS, ROTATED_WINDOWS, SWITCHED_WINDOW


def _llama_like(model_type: str, architecture: str, config: ConfigTable) -> Family:
    return Family(model_type=model_type, architecture=architecture, config=config, params=dense_layers)


_ALL = (
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
    # Mistral 7B and its successors: Llama's weights with a sliding window.
    _llama_like(
        "mistral",
        "MistralForCausalLM",
        ConfigTable(
            fields=(*dense_fields(), Field("window_size", "sliding_window", None)),
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            fixed=(SILU,),
        ),
    ),
    # Ministral 8B: Mistral's weights with a window in the layers that are named.
    _llama_like(
        "ministral",
        "MinistralForCausalLM",
        ConfigTable(
            fields=(*dense_fields(), Field("window_size", "sliding_window", None)),
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            fixed=(SILU,),
            facts=(LISTED_WINDOWS,),
        ),
    ),
    # Ministral 3: Mistral, queries beyond the first context grow with their position.
    _llama_like(
        "ministral3",
        "Ministral3ForCausalLM",
        ConfigTable(
            fields=(*dense_fields(eps=1e-5), Field("window_size", "sliding_window", None)),
            defaults={"num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 11},
            fixed=(SILU,),
            facts=(query_temperature(YARN),),
        ),
    ),
    # Qwen 2 and 2.5: Llama's weights with biases on q, k and v.
    _llama_like(
        "qwen2",
        "Qwen2ForCausalLM",
        ConfigTable(
            fields=dense_fields(),
            defaults={"num_key_value_heads": 32},
            constants={"add_qkv_bias": True},
            fixed=(SILU,),
            facts=(SWITCHED_WINDOW,),
        ),
    ),
    # Qwen 3, dense: with QK-norm for each head.
    _llama_like(
        "qwen3",
        "Qwen3ForCausalLM",
        ConfigTable(
            fields=dense_fields(),
            defaults={"head_dim": 128, "num_key_value_heads": 32},
            constants={"qk_layernorm": True},
            fixed=(SILU, NO_ATTENTION_BIAS),
            facts=(SWITCHED_WINDOW,),
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
    # OLMo: LayerNorms without weights; q, k and v may be clipped.
    _llama_like(
        "olmo",
        "OlmoForCausalLM",
        ConfigTable(
            fields=(
                *(field for field in dense_fields() if field.mca != "layernorm_epsilon"),
                Field("clip_qkv", "clip_qkv", None),
            ),
            defaults={"pad_token_id": 1},
            constants={"normalization": "LayerNorm", "norm_weight": False, "layernorm_epsilon": 1e-5},
            fixed=(SILU, NO_ATTENTION_BIAS),
        ),
    ),
    # OLMo 2: post-norms, and over all heads of q and of k.
    _llama_like(
        "olmo2",
        "Olmo2ForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-5),
            defaults={"pad_token_id": 1},
            constants={"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_full_width": True},
            fixed=(SILU, NO_ATTENTION_BIAS),
        ),
    ),
    # EXAONE 4: post-norms; RoPE only in sliding-window layers.
    _llama_like(
        "exaone4",
        "Exaone4ForCausalLM",
        ConfigTable(
            fields=dense_fields(eps=1e-5),
            defaults={"num_key_value_heads": 32, "sliding_window": 4096},
            constants={"norm_placement": "post", "qk_layernorm": True},
            fixed=(SILU,),
            facts=(ROTATED_WINDOWS,),
        ),
    ),
    # Granite 3: Llama's weights with scaled embeddings, residuals and logits.
    _llama_like(
        "granite",
        "GraniteForCausalLM",
        ConfigTable(fields=(*dense_fields(), *FACTORS), fixed=SWIGLU_WITHOUT_BIASES),
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
            fixed=(SILU, NO_BIAS),
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
    # Gemma 1: zero-centered norms, scaled embeddings.
    _llama_like(
        "gemma",
        "GemmaForCausalLM",
        ConfigTable(
            fields=dense_fields(tied=True),
            defaults={"head_dim": 256, "num_key_value_heads": 16, "pad_token_id": 0, "hidden_act": GELU},
            constants={"hidden_act": GELU, "layernorm_zero_centered_gamma": True},
            fixed=(
                NO_ATTENTION_BIAS,
                Fixed("hidden_act", (GELU, "gelu"), "Gemma's gated MLP"),
                NO_BIDIRECTIONAL,
            ),
            facts=(EMBEDDING_SCALE,),
        ),
    ),
)

FAMILIES = {family.model_type: family for family in _ALL}
"""By HF's ``model_type``."""
