"""Qwen 3 with experts: HF ``Qwen3MoeForCausalLM``."""

from functools import partial

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_models.templates.config_table import NO_ATTENTION_BIAS, SILU, ConfigTable, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.moe import aux_loss, expert_fields, moe_params, restore_aux_loss
from mca_models.templates.names import MoeNames
from mca_models.templates.qwen2 import restore_window

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


def restore_sparse(config: McaModelConfig) -> HfConfig:
    """Restore HF keys, as ``ConfigTable.restore``."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if not config.is_moe_layer(i)],
        "norm_topk_prob": not given(config.moe).moe_router_pre_softmax,
        **restore_aux_loss(config),
        **restore_window(config),
    }


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_experts", default=128)),
    defaults={"num_key_value_heads": 4},
    constants={"qk_layernorm": True},
    fixed=(SILU, NO_ATTENTION_BIAS),
    aliases={"num_experts": "num_local_experts"},
    derive=derive,
    restore=restore_sparse,
)


params = partial(moe_params, names=NAMES)

FAMILY = Family(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=CONFIG, params=params, moe=NAMES
)
