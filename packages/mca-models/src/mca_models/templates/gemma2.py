"""Gemma 2: HF ``Gemma2ForCausalLM``: soft-capped scores and logits, pre- and post-norms, alternating windows."""

from mca_models.templates.config_table import NO_ATTENTION_BIAS, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.parts.activations import GELU_ONLY, GELU_SANDWICH, NO_BIDIRECTIONAL
from mca_models.templates.parts.common import dense_layers
from mca_models.templates.parts.multipliers import QUERY_SCALE
from mca_models.templates.parts.rope import layer_types

CONFIG = ConfigTable(
    fields=(
        *dense_fields(tied=True),
        Field("window_size", "sliding_window", 4096),
        Field("attn_logit_softcapping", "attn_logit_softcapping", None),
        Field("final_logit_softcapping", "final_logit_softcapping", None),
    ),
    defaults={
        **{"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    constants=GELU_SANDWICH,
    fixed=(NO_ATTENTION_BIAS, GELU_ONLY, NO_BIDIRECTIONAL),
    facts=(layer_types(lambda layer: layer % 2 == 1), QUERY_SCALE),
)

FAMILY = Family(model_type="gemma2", architecture="Gemma2ForCausalLM", config=CONFIG, params=dense_layers)
