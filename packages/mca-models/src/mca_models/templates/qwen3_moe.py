"""Qwen 3 with experts: HF ``Qwen3MoeForCausalLM``."""

from functools import partial

from mca_config.types import Values
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens, is_moe_layer
from mca_models.templates.parts.moe import aux_loss, expert_fields, moe_params, write_aux_loss
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.qwen2 import write_window

NAMES = MoeNames()


def sparse_layers(hf: HfConfig) -> dict[str, object]:
    """Derive the layers with experts, and the router weights of the chosen ones."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    freq = tuple(int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"]))
    # weights normalised over the chosen experts are a softmax after the choice
    pre_softmax = not hf.get("norm_topk_prob", False)
    return {"moe_layer_freq": freq, "moe_router_pre_softmax": pre_softmax} | aux_loss(hf)


def derive(hf: HfConfig) -> dict[str, object]:
    """Derive ``sparse_layers``, and the sliding window, which all layers have or none."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return sparse_layers(hf) | {"window_size": window}


def write_sparse(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(values["num_layers"]) if not is_moe_layer(values, i)],
        "norm_topk_prob": not values["moe_router_pre_softmax"],
        **write_aux_loss(values),
        **write_window(values),
    }


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_experts", default=128)),
    defaults={"num_key_value_heads": 4},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    aliases={"num_experts": "num_local_experts"},
    facts=(Lens(derive, write_sparse),),
)


params = partial(moe_params, names=NAMES)

FAMILY = Family(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=CONFIG, params=params, moe=NAMES
)
