"""Hunyuan with experts: HF ``HunYuanMoEV1ForCausalLM``: Hunyuan's attention, experts in every layer."""

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import ConfigTable, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.common import renamed
from mca_models.templates.parts.moe import moe_params
from mca_models.templates.parts.names import QK_NORMS, MoeNames
from mca_models.templates.parts.rope import alpha_rope
from mca_models.weights import Param

HUNYUAN_V1_DENSE = get_family("hunyuan_v1_dense")

NAMES = MoeNames(router="mlp.gate.wg.weight", shared="mlp.shared_mlp.")


def derive(hf: HfConfig) -> JsonObject:
    """The rope, and experts; files may list the same number for each layer."""
    width = hf["intermediate_size"]
    return {
        **alpha_rope(hf),
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


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"num_experts": values["num_moe_experts"], "moe_topk": values["moe_router_topk"]}


CONFIG = ConfigTable(
    fields=dense_fields(eps=1e-5),
    defaults=HUNYUAN_V1_DENSE.table.defaults,
    constants=HUNYUAN_V1_DENSE.table.constants,
    fixed=(
        *HUNYUAN_V1_DENSE.table.fixed,
        Fixed("use_cla", (False,), "transformers ignores it"),
        Fixed("use_mixed_mlp_moe", (True,), "transformers ignores it"),
    ),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    facts=(Lens(derive, write),),
)


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    return renamed(moe_params(config, NAMES), QK_NORMS)


FAMILY = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    config=CONFIG,
    params=params,
    moe=NAMES,
)
