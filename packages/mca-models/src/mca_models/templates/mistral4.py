"""Mistral 4: HF ``Mistral4ForCausalLM``: MLA, softmax routing, query temperature that grows with the position."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, Fixed
from mca_models.templates.lens import Lens
from mca_models.templates.parts.mla import INTERLEAVED, MLA
from mca_models.templates.parts.query_temperature import (
    YARN,
    derive_query_temperature,
    write_query_temperature,
)

DEEPSEEK_V3 = get_family("deepseek_v3")

ROPE = {**YARN, **{"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}}
"""Default of transformers where ``config.json`` has no rope."""


CONFIG = replace(
    DEEPSEEK_V3.table,
    defaults={"q_lora_rank": 1024, "n_shared_experts": 1, "n_routed_experts": 128, "pad_token_id": 11},
    constants={"qk_layernorm": True},
    fixed=(
        *(SILU, NO_ATTENTION_BIAS, INTERLEAVED),
        Fixed("norm_topk_prob", (True,), "the softmax is over the chosen experts"),
        Fixed(
            "n_group",
            (1, None),
            "groups are chosen by their two best experts, whose chances Megatron has not",
        ),
        Fixed("topk_group", (1, None), "there is one group of experts to choose from"),
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    facts=(
        MLA,
        Lens(
            lambda hf: {**derive_query_temperature(hf, ROPE), "rotary_percent": 1.0}, write_query_temperature
        ),
    ),
)

FAMILY = replace(DEEPSEEK_V3, model_type="mistral4", architecture="Mistral4ForCausalLM", config=CONFIG)
