"""Gemma 4 12B, the text model: HF ``Gemma4UnifiedForCausalLM``: Gemma 4 with another default window."""

from dataclasses import replace

from mca_models.templates import gemma4_text
from mca_models.templates.config_table import Fixed

CONFIG = replace(
    gemma4_text.CONFIG,
    fields=gemma4_text.FIELDS,
    fixed=(
        *gemma4_text.CONFIG.fixed,
        Fixed("hidden_size_per_layer_input", (0, False, None), "transformers ignores it in this family"),
    ),
    defaults={"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": 1024},
)

FAMILY = replace(
    gemma4_text.FAMILY,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    config=CONFIG,
)
