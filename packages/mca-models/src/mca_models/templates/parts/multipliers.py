"""Factors on embeddings, attention scores, residuals and logits."""

from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import Field, HfConfig
from mca_models.templates.lens import Lens
from mca_models.templates.parts.activations import GELU


def scales(hf: HfConfig) -> JsonObject:
    """The factors on scores and embeddings that HF computes from sizes."""
    return {
        "softmax_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
    }


def write_scale(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"hidden_activation": GELU, "query_pre_attn_scalar": round((values["softmax_scale"] or 1.0) ** -2)}


def read_logit_scale(hf: HfConfig) -> JsonObject:
    """The factor on logits, by which this family multiplies."""
    return {"logits_scaling": 1 / hf.get("logit_scale", 0.0625)}


FACTORS = (
    Field("embedding_multiplier", "embedding_multiplier", 1.0),
    Field("softmax_scale", "attention_multiplier", 1.0),
    Field("residual_multiplier", "residual_multiplier", 1.0),
    Field("logits_scaling", "logits_scaling", 1.0),
)


EMBEDDING_SCALE = Lens(lambda hf: {"embedding_multiplier": hf["hidden_size"] ** 0.5})
"""The factor on embeddings, which HF computes from the size."""


QUERY_SCALE = Lens(scales, write_scale)
LOGIT_SCALE = Lens(read_logit_scale, lambda values: {"logit_scale": 1 / values["logits_scaling"]})
