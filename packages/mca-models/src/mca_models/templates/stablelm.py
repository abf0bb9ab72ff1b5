"""StableLM: HF ``StableLmForCausalLM``: LayerNorms, a quarter of each head is rotated."""

from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, dense_fields, norm_epsilon
from mca_models.templates.family import Family
from mca_models.templates.parts.common import dense_layers

CONFIG = ConfigTable(
    fields=(
        *norm_epsilon(dense_fields(eps=1e-5), "layer_norm_eps"),
        Field("add_qkv_bias", "use_qkv_bias", False),
    ),
    defaults={"num_key_value_heads": 32, "partial_rotary_factor": 0.25},
    constants={"normalization": "LayerNorm"},
    fixed=(
        SILU,
        Fixed("use_parallel_residual", (False,), "Megatron's attention and MLP stand one after the other"),
        Fixed("hidden_dropout", (0.0,), "transformers drops behind the MLP alone"),
        Fixed("qk_layernorm", (False,), "each head would have its own norm"),
    ),
    partial_rotary=True,
)

FAMILY = Family(model_type="stablelm", architecture="StableLmForCausalLM", config=CONFIG, params=dense_layers)
