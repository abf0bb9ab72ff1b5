"""Qwen 1.5 and 2 with experts: HF ``Qwen2MoeForCausalLM``, with a gated shared expert."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.common import attention, embedding, head
from mca_models.templates.config_table import SILU, ConfigTable, Field, Fixed, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.moe import expert_fields, mlp_layers
from mca_models.templates.names import MoeNames
from mca_models.templates.qwen3_moe import restore_sparse, sparse_layers
from mca_models.weights import Param, each

SHARED = Field("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
NAMES = MoeNames(shared="mlp.shared_expert.")

CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_experts"), SHARED),
    constants={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    fixed=(SILU, Fixed("qkv_bias", (True,), "all published models have it")),
    derive=sparse_layers,
    restore=restore_sparse,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = each(attention(config), layers=range(config.num_layers))
    return [embedding(), *layers, *mlp_layers(config, NAMES), *head(config)]


FAMILY = Family(
    model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", config=CONFIG, params=params, moe=NAMES
)
