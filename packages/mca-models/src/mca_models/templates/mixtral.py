"""Mixtral: HF ``MixtralForCausalLM``, every MLP a mixture of experts."""

from mca_config.model_config import McaModelConfig
from mca_models.templates.common import attention, embedding, head
from mca_models.templates.config_table import SILU, ConfigTable, Field, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.moe import aux_loss, expert_fields, mlp_layers, restore_aux_loss
from mca_models.templates.names import MoeNames
from mca_models.weights import Param, each

CONFIG = ConfigTable(
    fields=(
        *dense_fields(),
        *expert_fields(count="num_local_experts", ffn="intermediate_size"),
        Field("window_size", "sliding_window", None),
    ),
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    fixed=(SILU,),
    derive=aux_loss,
    restore=restore_aux_loss,
)
NAMES = MoeNames(
    router="block_sparse_moe.gate.weight",
    experts="block_sparse_moe.experts.",
    gate="w1.weight",
    up="w3.weight",
    down="w2.weight",
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    layers = each(attention(config), layers=range(config.num_layers))
    return [embedding(), *layers, *mlp_layers(config, NAMES), *head(config)]


FAMILY = Family(
    model_type="mixtral", architecture="MixtralForCausalLM", config=CONFIG, params=params, moe=NAMES
)
