"""Rules of state space layers (Mamba 2), under the names of most HF files.

`mca_models.megatron.features` computes these layers.
"""

import math
from collections.abc import Iterable, Iterator

from mca_config.errors import HfConfigError
from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates.config_table import Field, Fixed, HfConfig
from mca_models.templates.parts.common import attention, inner
from mca_models.templates.parts.gated_delta_net import fused
from mca_models.templates.parts.layer_costs import CHUNK, SINGLE, LayerSizes, MixerCosts, SavedTensor
from mca_models.weights import COLUMN, ROW, Param, expand_rules

SILU = Fixed("mamba_hidden_act", ("silu",), "what is convolved is activated by SiLU")
PLAIN_STEPS = Fixed("mamba_proj_bias", (False,), "projections of state space layers have no biases")


def fields(*, heads: str, width: str, groups: str, state: str, conv: str, bias: str) -> tuple[Field, ...]:
    """The sizes of state space layers under HF's keys, with the defaults that its families share."""
    return (
        Field("mamba_num_heads", heads, 128),
        Field("mamba_head_dim", width, 64),
        Field("mamba_num_groups", groups, 8),
        Field("mamba_state_dim", state, 128),
        Field("mamba_conv_kernel_dim", conv, 4),
        Field("mamba_conv_bias", bias, True),
    )


def bamba_fields() -> tuple[Field, ...]:
    """Return the sizes under the keys of Bamba, which other families share."""
    return fields(
        heads="mamba_n_heads",
        width="mamba_d_head",
        groups="mamba_n_groups",
        state="mamba_d_state",
        conv="mamba_d_conv",
        bias="mamba_conv_bias",
    )


BAMBA = {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_n_heads": 128, "mamba_expand": 2}
"""Defaults of absent keys."""


def derive_bamba(hf: HfConfig, inside: int | None = None) -> JsonObject:
    """Derive the head dimension, which need not be given, and the shortest time step.

    Args:
        hf: The configuration.
        inside: Channels of all heads; None: as ``mamba_expand`` says.
    """
    heads = hf["mamba_n_heads"]
    require_groups(heads, hf["mamba_n_groups"])
    channels = hf["mamba_expand"] * hf["hidden_size"] if inside is None else inside
    said = "mamba_expand times hidden_size" if inside is None else "mamba_d_ssm"
    if not isinstance(channels, int) or channels % heads:
        raise HfConfigError(
            f"config.json: {said} is {channels!r:.80}; supported: a multiple of mamba_n_heads, which is {heads}"
        )
    width = channels // heads
    if hf.get("mamba_d_head", "auto") not in ("auto", None, width):
        raise HfConfigError(
            f"config.json: 'mamba_d_head' is {hf['mamba_d_head']!r:.80}; supported: {width}, which is {said} divided "
            "by mamba_n_heads"
        )
    return {"mamba_head_dim": width, "mamba_least_step": least_step(hf)}


def least_step(hf: HfConfig) -> float:
    """Return the shortest time step of ``time_step_limit``, which has no upper end."""
    least, most = hf.get("time_step_limit") or (0.0, math.inf)
    if most not in (math.inf, {"__float__": "Infinity"}):
        raise HfConfigError(
            f"config.json: 'time_step_limit' ends at {most!r:.80}; supported: Infinity (steps in time have no upper "
            "limit here)"
        )
    return float(least)


def write_bamba(values: Values) -> HfConfig:
    """Write the HF keys."""
    heads = values["mamba_num_heads"]
    inside = heads * values["mamba_head_dim"] if heads else 0
    return {
        "mamba_expand": inside // values["hidden_size"],
        "time_step_limit": [values["mamba_least_step"], math.inf],
    }


def require_groups(heads: int, groups: int) -> None:
    """Reject heads that groups cannot share out evenly, which transformers cannot compute either."""
    if groups < 1 or heads % groups:
        raise HfConfigError(
            f"config.json: {heads} heads of state space layers cannot be shared out to {groups} groups; supported: "
            "a number of groups that divides the heads"
        )


def layer_types_from_hf(kinds: Iterable[str]) -> tuple[str, ...]:
    """HF's kinds of layers as ``layer_types`` has them, those of old files too."""
    ours = {"linear_attention": "mamba", "attention": "full_attention"}
    return tuple(ours.get(kind, kind) for kind in kinds)


def layer_types_to_hf(values: Values) -> list[str]:
    """The way back of ``layer_types_from_hf``."""
    return ["linear_attention" if kind == "mamba" else kind for kind in values["layer_types"] or ()]


def segments(config: FamilyConfig) -> tuple[int, int, int, int, int]:
    """Rows of the input projection's parts: gate, inputs, B, C (what goes into states, what reads them), steps."""
    inside = config.mamba.mamba_num_heads * config.mamba.mamba_head_dim
    states = config.mamba.mamba_num_groups * config.mamba.mamba_state_dim
    return inside, inside, states, states, config.mamba.mamba_num_heads


def mamba(config: McaModelConfig) -> list[Param]:
    """A state space layer with the norm before it."""
    before = inner("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight")
    return [before, *mamba_mixer(config, "self_attention.")]


def mamba_mixer(config: McaModelConfig, at: str) -> list[Param]:
    """Return the rules of a Mamba mixer; ``at`` is its position in Megatron's layer."""
    sizes = segments(config)
    cut = {
        **{
            "in_proj.weight": fused(sizes),
            "conv1d.weight": fused(sizes[1:4]),
            "conv1d.bias": fused(sizes[1:4]),
        },
        **dict.fromkeys(("dt_bias", "A_log", "D", "norm.weight"), COLUMN),
        "out_proj.weight": ROW,
    }
    absent = {
        "conv1d.bias": not given(config.mamba).mamba_conv_bias,
        "norm.weight": given(config.mamba).mamba_norm == "none",
    }
    return [
        inner(f"{at}{name}", f"mamba.{name}", shard=shard)
        for name, shard in cut.items()
        if not absent.get(name)
    ]


def mixed_layers(config: McaModelConfig) -> Iterator[Param]:
    """State space model or attention of every decoder layer."""
    layers = range(config.num_layers)
    yield from expand_rules(mamba(config), layers=[layer for layer in layers if config.is_mamba_layer(layer)])
    yield from expand_rules(
        attention(config), layers=[layer for layer in layers if not config.is_mamba_layer(layer)]
    )


FEED_FORWARD = {
    "mlp.": "feed_forward.",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm": "model.final_layernorm",
}


def saved_tensors(config: McaModelConfig, sizes: LayerSizes) -> list[SavedTensor]:
    """Return the saved tensors of a Mamba layer: B and C per group, all others per head, in fp32 chunks."""
    tp, tokens, width = sizes.layout.tp, sizes.tokens, sizes.width
    heads, state = given(config.mamba).mamba_num_heads / tp, given(config.mamba).mamba_state_dim
    inside = heads * given(config.mamba).mamba_head_dim
    groups = given(config.mamba).mamba_num_groups / tp
    states, local_states = max(groups, 1) * state, groups * state
    net = "mca_models/megatron/features/mamba.py: _sequence"
    space = "mca_models/megatron/features/mamba.py: state_space"
    projected = tokens * (inside + 4 * local_states + heads) * SINGLE if width == SINGLE else 0.0
    singles = 3 if given(config.mamba).mamba_norm == "none" else 5
    return [
        SavedTensor(
            "convolution: padded, and its output", tokens * (inside + 2 * local_states) * 2 * width, net
        ),
        SavedTensor("inputs, and inputs times steps", tokens * inside * 2 * SINGLE, net),
        SavedTensor("B, C and dt of the projection, without copies", projected, net),
        SavedTensor("gate, activated and not, and output", tokens * inside * (singles * SINGLE + width), net),
        SavedTensor("B and C", tokens * 2 * states * SINGLE, space),
        SavedTensor("token-by-token matrices of a chunk", tokens * heads * CHUNK * 2 * SINGLE, space),
        SavedTensor("decayed B and C", tokens * heads * 2 * state * SINGLE, space),
        SavedTensor("states", 2 * tokens / CHUNK * inside * state * SINGLE, space),
    ]


def num_heads(config: McaModelConfig) -> int:
    """Return the heads of a Mamba layer; 0: the model has none."""
    return 0 if config.mamba is None else config.mamba.mamba_num_heads


def _weights(config: McaModelConfig, sizes: LayerSizes) -> float:
    mamba = given(config.mamba)
    inside, states = (
        mamba.mamba_num_heads * mamba.mamba_head_dim,
        mamba.mamba_num_groups * mamba.mamba_state_dim,
    )
    return config.hidden_size * (3 * inside + 2 * states + mamba.mamba_num_heads) / sizes.layout.tp


def _flops(config: McaModelConfig, sizes: LayerSizes) -> float:
    mamba, tp = given(config.mamba), sizes.layout.tp
    inside, state = mamba.mamba_num_heads * mamba.mamba_head_dim, mamba.mamba_state_dim
    shared = max(
        mamba.mamba_num_groups * state, tp * state
    )  # ranks whose heads share a group repeat its computation
    return 2 * sizes.tokens * (CHUNK * (inside + shared) + 2 * inside * state) / tp


MAMBA_COSTS = MixerCosts(saved_tensors, _weights, _flops)
