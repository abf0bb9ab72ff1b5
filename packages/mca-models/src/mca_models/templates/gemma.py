"""Gemma 1: HF ``GemmaForCausalLM``: zero-centred norms, scaled embeddings."""

from mca_config.types import JsonObject
from mca_models.templates.config_table import NO_ATTENTION_BIAS, ConfigTable, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import GELU, NO_BIDIRECTIONAL
from mca_models.templates.parts.common import dense_layers


def derive(hf: HfConfig) -> JsonObject:
    """The factor on embeddings, which HF computes from the size."""
    return {"embedding_multiplier": hf["hidden_size"] ** 0.5}


CONFIG = ConfigTable(
    fields=dense_fields(tied=True),
    defaults={"head_dim": 256, "pad_token_id": 0, "hidden_act": GELU},
    constants={"hidden_act": GELU, "layernorm_zero_centered_gamma": True},
    # transformers reads the old name as the new one
    fixed=(NO_ATTENTION_BIAS, Fixed("hidden_act", (GELU, "gelu"), "Gemma's gated MLP"), NO_BIDIRECTIONAL),
    facts=(Lens(derive),),
)

FAMILY = Family(model_type="gemma", architecture="GemmaForCausalLM", config=CONFIG, params=dense_layers)
