"""Gemma 4 12B, the text model: HF ``Gemma4UnifiedForCausalLM``: Gemma 4 with another default window."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.config_table import Fixed
from mca_models.templates.parts.gemma4_images import bidirectional_images

GEMMA4_TEXT = get_family("gemma4_text")

CONFIG = replace(
    GEMMA4_TEXT.table,
    fields=tuple(field for field in GEMMA4_TEXT.table.fields if not field.hf.endswith("per_layer_input")),
    fixed=(
        *GEMMA4_TEXT.table.fixed,
        Fixed("hidden_size_per_layer_input", (0, False, None), "transformers ignores it in this family"),
    ),
    facts=(*GEMMA4_TEXT.table.facts, bidirectional_images("vision")),
    defaults={"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": 1024},
)

FAMILY = replace(
    GEMMA4_TEXT, model_type="gemma4_unified_text", architecture="Gemma4UnifiedForCausalLM", config=CONFIG
)
