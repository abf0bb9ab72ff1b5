"""GLM 5: HF ``GlmMoeDsaForCausalLM``: DeepSeek V3.2's layers; its indexer uses interleaved RoPE."""

from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig
from mca_models.templates.lens import Lens

DEEPSEEK_V32 = get_family("deepseek_v32")


def require_indexers(hf: HfConfig) -> JsonObject:
    """Reject layers that take the keys that another layer chose."""
    pattern = hf.get("indexer_types") or hf.get("index_topk_pattern") or "F"
    if set(pattern) - {"F", "full"} or ((hf.get("index_topk_freq") or 1) > 1 and not hf.get("indexer_types")):
        raise HfConfigError(
            "config.json: 'indexer_types' (or 'index_topk_freq') has layers that take the keys chosen in an "
            "earlier layer; supported: an indexer in every layer"
        )
    return {}


CONFIG = replace(
    DEEPSEEK_V32.table,
    defaults={
        **{
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
        },
        **{"q_lora_rank": 2048, "index_n_heads": 32},
    },
    constants={**DEEPSEEK_V32.table.constants, "index_rotary_interleaved": True},
    facts=(Lens(require_indexers), *DEEPSEEK_V32.table.facts),
)

FAMILY = replace(DEEPSEEK_V32, model_type="glm_moe_dsa", architecture="GlmMoeDsaForCausalLM", config=CONFIG)
