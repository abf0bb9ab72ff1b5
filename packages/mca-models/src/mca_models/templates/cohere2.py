"""Command A and R7B: HF ``Cohere2ForCausalLM``: Command R, RoPE only in sliding-window layers."""

from dataclasses import replace

from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import Field, HfConfig
from mca_models.templates.lens import Lens
from mca_models.templates.parts.multipliers import LOGIT_SCALE
from mca_models.templates.parts.rope import write_layer_types
from mca_models.templates.parts.sliding_window import rotated_windows, window_pattern

COHERE = get_family("cohere")


def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers."""
    return rotated_windows(hf.get("layer_types") or window_pattern(hf))


CONFIG = replace(
    COHERE.table,
    fields=(*COHERE.table.fields, Field("window_size", "sliding_window", 4096)),
    defaults={"pad_token_id": 0},
    facts=(LOGIT_SCALE, Lens(derive, write_layer_types)),
)

FAMILY = replace(COHERE, model_type="cohere2", architecture="Cohere2ForCausalLM", config=CONFIG)
