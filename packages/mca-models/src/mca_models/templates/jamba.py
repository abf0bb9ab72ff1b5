"""Jamba: HF ``JambaForCausalLM``: Mamba 1 in most layers, attention without RoPE, experts in every other layer."""

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import SILU, ConfigTable, Field, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens, is_moe_layer
from mca_models.templates.parts.common import embedding, head, renamed
from mca_models.templates.parts.mamba import FEED_FORWARD, PLAIN_STEPS
from mca_models.templates.parts.moe import AUX_LOSS, mlp_layers
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.selective_scan import CHANNELS, FIELDS, KIND, scanned_or_attended, step_rank
from mca_models.weights import Param

NAMES = MoeNames(router="mlp.router.weight")


def read(hf: HfConfig) -> JsonObject:
    """Derive the layers with attention and those with experts, which come in periods."""
    for kind in ("attn", "expert"):
        offset, period = hf[f"{kind}_layer_offset"], hf[f"{kind}_layer_period"]
        if not 0 <= offset < period:
            raise HfConfigError(
                f"config.json: '{kind}_layer_offset' is {offset}; expected 0 to {period - 1}, less than "
                f"'{kind}_layer_period'"
            )
    layers = range(hf["num_hidden_layers"])
    attended = [i % hf["attn_layer_period"] == hf["attn_layer_offset"] for i in layers]
    sparse = [i % hf["expert_layer_period"] == hf["expert_layer_offset"] for i in layers]
    experts = hf["num_experts"] if hf["num_experts"] > 1 and any(sparse) else None
    return {
        "layer_types": tuple("full_attention" if full else KIND for full in attended),
        **{"no_rope_freq": (1,) * len(layers), "rope_scaling": None},  # transformers has no RoPE here
        **{"num_moe_experts": experts, "moe_layer_freq": tuple(map(int, sparse)) if experts else None},
        "moe_ffn_hidden_size": hf["intermediate_size"] if experts else None,
    }


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """Return after how many layers one of ``layers`` comes again, and the first; of none, one after the last."""
    first, *more = layers or [count]
    return (more[0] - first if more else count + 1), first


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    count = values["num_layers"]
    attended = [layer for layer in range(count) if values["layer_types"][layer] != KIND]
    sparse = [layer for layer in range(count) if is_moe_layer(values, layer)]
    keys: HfConfig = {"num_experts": values["num_moe_experts"] or 1}
    for name, layers in (("attn", attended), ("expert", sparse)):
        keys[f"{name}_layer_period"], keys[f"{name}_layer_offset"] = _period(layers, count)
    return keys


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    rules = [embedding(), *scanned_or_attended(config), *mlp_layers(config, NAMES), *head(config)]
    return renamed(rules, FEED_FORWARD)


FAMILY = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(), *FIELDS, Field("moe_router_topk", "num_experts_per_tok", 2)),
        defaults={
            **{"num_key_value_heads": 8, "num_experts": 16, "expert_layer_period": 2, "pad_token_id": 0},
            **{"expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4},
            "max_position_embeddings": 1 << 18,
        },
        constants={"moe_router_pre_softmax": True},
        fixed=(SILU, PLAIN_STEPS),
        aliases={"num_local_experts": "num_experts"},
        facts=(Lens(read, write), CHANNELS, step_rank("mamba_dt_rank"), AUX_LOSS),
    ),
    params=params,
    moe=NAMES,
    unadaptable=frozenset({"dt_proj"}),
)
