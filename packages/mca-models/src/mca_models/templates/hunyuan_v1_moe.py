"""Hunyuan with experts: HF ``HunYuanMoEV1ForCausalLM``: Hunyuan's attention, experts in every layer."""

from mca_config.errors import HfConfigError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import hunyuan_v1_dense
from mca_models.templates.common import renamed
from mca_models.templates.config_table import ConfigTable, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.moe import moe_params
from mca_models.templates.names import MoeNames
from mca_models.weights import Param

NAMES = MoeNames(router="mlp.gate.wg.weight", shared="mlp.shared_mlp.")


def derive(hf: HfConfig) -> JsonObject:
    """The rope, and experts; files may list the same number for each layer."""
    width = hf["intermediate_size"]
    return {
        **hunyuan_v1_dense.derive_rope(hf),
        "num_moe_experts": single_value(hf, "num_experts"),
        "moe_router_topk": single_value(hf, "moe_topk"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
    }


def single_value(hf: HfConfig, key: str) -> int:
    """The number under ``key``, which is the same for all layers."""
    value = hf.get(key, 1)
    numbers = set(value) if isinstance(value, list) else {value}
    if len(numbers) != 1:
        raise HfConfigError(
            f"config.json: '{key}' is {value!r:.80}; supported: the same number for all layers"
        )
    number: int = numbers.pop()
    return number


def restore(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {"num_experts": given(config.moe).num_moe_experts, "moe_topk": given(config.moe).moe_router_topk}


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults=hunyuan_v1_dense.CONFIG.defaults,
    constants=hunyuan_v1_dense.CONFIG.constants,
    fixed=(
        *hunyuan_v1_dense.CONFIG.fixed,
        Fixed("use_cla", (False,), "transformers ignores it"),
        Fixed("use_mixed_mlp_moe", (True,), "transformers ignores it"),
    ),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    derive=derive,
    restore=restore,
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(moe_params(config, NAMES), hunyuan_v1_dense.QK_NORMS)


FAMILY = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
)
