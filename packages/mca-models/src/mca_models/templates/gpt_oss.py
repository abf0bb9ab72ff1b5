"""GPT-OSS: HF ``GptOssForCausalLM``: attention sinks, alternating windows, biased experts."""

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    SILU,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
    read_rope,
)
from mca_models.templates.family import Family
from mca_models.templates.parts.common import MLP, attention, embedding, head, inner
from mca_models.templates.parts.moe import aux_loss, expert_fields, write_aux_loss
from mca_models.templates.parts.names import HF
from mca_models.weights import GATED, ROW, Concat, GroupedHeads, Param, Transposed, expand_rules

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def derive(hf: HfConfig) -> JsonObject:
    """Every other layer has a sliding window, unless listed; the load-balancing loss; the family's own yarn."""
    kinds = hf.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(hf["num_hidden_layers"])
    ]
    named = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = {} if named else read_rope({"rope_theta": hf.get("rope_theta"), "rope_parameters": YARN})
    return {"layer_types": tuple(kinds), **rope, **aux_loss(hf)}


def write(values: Values) -> HfConfig:
    """Write the HF keys."""
    kinds = list(values["layer_types"] or ())
    return {"hidden_act": "silu", "layer_types": kinds, **write_aux_loss(values)}


CONFIG = ConfigTable(
    fields=(
        *dense_fields(eps=1e-5),
        *expert_fields(count="num_local_experts", default=128, ffn="intermediate_size"),
        Field("window_size", "sliding_window", 128),
        Field("activation_func_clamp_value", "swiglu_limit", 7.0),
    ),
    defaults={"num_key_value_heads": 8, "head_dim": 64, "rope_theta": 150000.0},
    constants={
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "hidden_act": "quick_gelu",
        "glu_linear_offset": 1.0,
    },
    fixed=(
        SILU,
        Fixed("attention_bias", (True,), "all published models have it"),
        Fixed("swiglu_alpha", (1.702,), "Megatron's quick_gelu has it built in"),
    ),
    aliases={"num_experts": "num_local_experts"},
    facts=(Lens(derive, write),),
)

ALTERNATING = GroupedHeads((1, 1), 1)  # gate 0, up 0, gate 1, up 1, ...


def experts() -> list[Param]:
    """One expert's matrices, which HF stores as [in, out], and biases; all experts in one HF tensor."""
    fc1, fc2, hf = f"{MLP}experts.linear_fc1.", f"{MLP}experts.linear_fc2.", f"{HF}mlp.experts."
    halves = Concat((1, 1))
    turned, bias = Transposed(ALTERNATING), "bias{expert}"
    return [
        Param(
            mca=f"{fc1}weight{{expert}}",
            hf=(f"{hf}gate_up_proj",),
            hf_layout=turned,
            layout=halves,
            shard=GATED,
            stacked=True,
        ),
        Param(
            mca=fc1 + bias,
            hf=(f"{hf}gate_up_proj_bias",),
            hf_layout=ALTERNATING,
            layout=halves,
            shard=GATED,
            stacked=True,
        ),
        Param(
            mca=f"{fc2}weight{{expert}}",
            hf=(f"{hf}down_proj",),
            hf_layout=Transposed(),
            shard=ROW,
            stacked=True,
        ),
        Param(mca=fc2 + bias, hf=(f"{hf}down_proj_bias",), stacked=True),
    ]


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    router = [
        inner("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        inner("mlp.router.weight", "mlp.router.weight"),
        inner("mlp.router.bias", "mlp.router.bias"),
    ]
    layers = range(config.num_layers)
    own = expand_rules(experts(), layers=layers, experts=range(config.num_experts))
    return [embedding(), *expand_rules([*attention(config), *router], layers=layers), *own, *head(config)]


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    config=CONFIG,
    params=params,
    fp8_unsupported="its experts have biases, and their weights are stored as [in, out]",
)
