"""DeepSeek V3.2: HF ``DeepseekV32ForCausalLM``: DeepSeek V3 with an indexer that chooses the keys of each query."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import deepseek_v3, glm4_moe_lite
from mca_models.templates.common import inner
from mca_models.templates.config_table import Field, HfConfig
from mca_models.templates.moe import derive_moe_layers, moe_params
from mca_models.weights import Param

INDEX_FIELDS = (
    Field("index_topk", "index_topk", 2048),
    Field("index_num_heads", "index_n_heads", 64),
    Field("index_head_dim", "index_head_dim", 128),
)
NAMES = {
    **{"wq_b": "wq_b.weight", "wk": "wk.weight", "weights_proj": "weights_proj.weight"},
    **{"k_norm_weight": "k_norm.weight", "k_norm_bias": "k_norm.bias"},
}


def derive(hf: HfConfig) -> JsonObject:
    """Derive as DeepSeek V3, and the layers with experts."""
    return {**deepseek_v3.derive(hf), **derive_moe_layers({"first_k_dense_replace": 3, **hf})}


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return glm4_moe_lite.restore(config)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    mca, hf = "self_attention.core_attention.indexer.", "self_attn.indexer."
    indexer = [inner(mca + own, hf + its) for own, its in NAMES.items()]
    return moe_params(config, deepseek_v3.NAMES, [*deepseek_v3.latent_attention(config), *indexer])


CONFIG = replace(
    deepseek_v3.CONFIG,
    fields=(*deepseek_v3.MLA_FIELDS, *INDEX_FIELDS),
    fixed=tuple(fixed for fixed in deepseek_v3.CONFIG.fixed if fixed is not deepseek_v3.INTERLEAVED),
    aliases=dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts"),
    derive=derive,
    restore=restore,
)

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    config=CONFIG,
    params=params,
)
