"""DeepSeek V3.2: HF ``DeepseekV32ForCausalLM``: DeepSeek V3 with DSA (lightning indexer)."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.config_table import Field
from mca_models.templates.parts.common import inner
from mca_models.templates.parts.mla import INTERLEAVED, MLA_FIELDS, SIGMOID_MLA, latent_attention
from mca_models.templates.parts.moe import MOE_LAYERS, moe_params
from mca_models.templates.parts.names import MoeNames
from mca_models.weights import Param

DEEPSEEK_V3 = get_family("deepseek_v3")

INDEX_FIELDS = (
    Field("index_topk", "index_topk", 2048),
    Field("index_num_heads", "index_n_heads", 64),
    Field("index_head_dim", "index_head_dim", 128),
)
NAMES = {
    **{"wq_b": "wq_b.weight", "wk": "wk.weight", "weights_proj": "weights_proj.weight"},
    **{"k_norm_weight": "k_norm.weight", "k_norm_bias": "k_norm.bias"},
}


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    mca, hf = "self_attention.core_attention.indexer.", "self_attn.indexer."
    indexer = [inner(mca + own, hf + its) for own, its in NAMES.items()]
    return moe_params(config, MoeNames(), [*latent_attention(config), *indexer])


CONFIG = replace(
    DEEPSEEK_V3.table,
    fields=(*MLA_FIELDS, *INDEX_FIELDS),
    fixed=tuple(fixed for fixed in DEEPSEEK_V3.table.fixed if fixed is not INTERLEAVED),
    aliases=dict.fromkeys(("num_local_experts", "num_experts"), "n_routed_experts"),
    facts=(SIGMOID_MLA, MOE_LAYERS),
)

FAMILY = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    config=CONFIG,
    params=params,
)
