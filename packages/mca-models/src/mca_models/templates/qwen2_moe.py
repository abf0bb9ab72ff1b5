"""Qwen 1.5 and 2 with experts: HF ``Qwen2MoeForCausalLM``, with a gated shared expert."""

from functools import partial

from mca_models.templates.config_table import SILU, ConfigTable, Fixed, HfConfig, dense_fields
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts.moe import SHARED_WIDTH, SPARSE_LAYERS, expert_fields, moe_params
from mca_models.templates.parts.names import MoeNames
from mca_models.templates.parts.rope import FULL, SLIDING
from mca_models.templates.parts.sliding_window import window

NAMES = MoeNames(shared="mlp.shared_expert.")


def derive(hf: HfConfig) -> dict[str, object]:
    """Derive sliding windows: every other layer before ``max_window_layers`` unless listed."""
    last = hf.get("max_window_layers", 28)
    pattern = [FULL if i % 2 or i >= last else SLIDING for i in range(hf["num_hidden_layers"])]
    return window({**hf, "layer_types": hf.get("layer_types") or pattern})


CONFIG = ConfigTable(
    fields=(*dense_fields(), *expert_fields(count="num_experts", default=60), SHARED_WIDTH),
    defaults={"num_key_value_heads": 16},
    constants={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    fixed=(SILU, Fixed("qkv_bias", (True,), "all published models have it")),
    facts=(SPARSE_LAYERS, Lens(derive)),
)


params = partial(moe_params, names=NAMES)

FAMILY = Family(
    model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", config=CONFIG, params=params, moe=NAMES
)
