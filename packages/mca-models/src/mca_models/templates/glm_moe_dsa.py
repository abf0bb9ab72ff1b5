"""GLM 5: HF ``GlmMoeDsaForCausalLM``: DeepSeek V3.2's layers; its indexer rotates pairs of neighbours."""

from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.types import JsonObject
from mca_models.templates import deepseek_v32
from mca_models.templates.config_table import HfConfig
from mca_models.templates.lens import Lens


def derive(hf: HfConfig) -> JsonObject:
    """Derive as DeepSeek V3.2; every layer must have its own indexer."""
    pattern = hf.get("indexer_types") or hf.get("index_topk_pattern") or "F"
    if set(pattern) - {"F", "full"} or ((hf.get("index_topk_freq") or 1) > 1 and not hf.get("indexer_types")):
        raise HfConfigError(
            "config.json: 'indexer_types' (or 'index_topk_freq') has layers that take the keys chosen in an "
            "earlier layer; supported: an indexer in every layer"
        )
    return deepseek_v32.derive(hf)


CONFIG = replace(
    deepseek_v32.CONFIG,
    defaults={
        **{"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
        **{"q_lora_rank": 2048, "index_n_heads": 32},
    },
    constants={**deepseek_v32.CONFIG.constants, "index_rotary_interleaved": True},
    facts=(Lens(derive, deepseek_v32.write),),
)

FAMILY = replace(
    deepseek_v32.FAMILY,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    config=CONFIG,
)
