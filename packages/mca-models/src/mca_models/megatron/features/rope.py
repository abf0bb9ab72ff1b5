"""RoPE of a chunk: one for all layers, or a second one for sliding-window layers (Gemma 3, OLMo 3).

Megatron computes one rotation for all layers and passes it through. Two rotations are concatenated on the last axis,
and each layer's attention takes its own.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import (
    FIXED_IN_0_17,
    Context,
    Feature,
    Setup,
    SpecChanges,
    change_self_attention,
)
from mca_models.megatron.layers.rope import attention_factor, rotary_dim, rotary_module
from mca_models.megatron.types import GptModel, MegatronConfig, MegatronModule, Settings

_SLIDING = "sliding_attention"


class DualRope(torch.nn.Module):
    """Rotations of full-attention and of sliding-window layers, ``[seq, 1, 1, channels of both]``."""

    def __init__(self, config: McaModelConfig, cp_group: ProcessGroup) -> None:
        super().__init__()
        full, sliding = _layer_kind_configs(config)
        self.full: MegatronModule = rotary_module(full, cp_group)
        self.local: MegatronModule = rotary_module(sliding, cp_group)

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        """Return the sequence length, as Megatron's ``RotaryEmbedding`` does."""
        length: int = self.full.get_rotary_seq_len(*args, **kwargs)
        return length

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return both rotations; arguments as for Megatron's ``RotaryEmbedding``."""
        return torch.cat([self.full(*args, **kwargs), self.local(*args, **kwargs)], -1)


def _layer_kind_configs(config: McaModelConfig) -> tuple[McaModelConfig, McaModelConfig]:
    """Return the configuration of full-attention layers and of sliding-window ones, which have an unscaled RoPE."""
    full, sliding = (
        config.replace_fields(layer_type_overrides=None, **(config.layer_type_overrides or {}).get(kind, {}))
        for kind in ("full_attention", _SLIDING)
    )
    return full, sliding.replace_fields(
        rotary_base=config.rope.rotary_base_local or config.rope.rotary_base, rope_scaling=None
    )


def rope_widths(config: McaModelConfig) -> tuple[int, int]:
    """Return the rotated channels of a head in full-attention and in sliding-window layers."""
    full, sliding = _layer_kind_configs(config)
    return rotary_dim(full), rotary_dim(sliding)


@cache
def with_layer_rope(attention: type, kinds: tuple[str, ...], factor: float, widths: tuple[int, int]) -> type:
    """Return an attention class whose layers take one of the two RoPEs.

    Args:
        attention: Megatron's class.
        kinds: HF's ``layer_types``.
        factor: Yarn's factor on cosine and sine in full-attention layers; scores grow by its square.
        widths: Rotated channels in full-attention and in sliding-window layers.
    """

    class LayerRope(attention):  # type: ignore[misc]
        """Attention that selects its RoPE by the layer's type."""

        def __init__(
            self, config: MegatronConfig, *args: object, layer_number: int, **kwargs: object
        ) -> None:
            before = config.softmax_scale
            if factor != 1.0 and kinds[layer_number - 1] != _SLIDING:
                config.softmax_scale = (before or config.kv_channels**-0.5) * factor**2
            super().__init__(config, *args, layer_number=layer_number, **kwargs)
            config.softmax_scale = before

        def forward(
            self, *args: object, rotary_pos_emb: Tensor | None = None, **kwargs: object
        ) -> MegatronModule:
            """Select the layer's rotation, then call Megatron's attention."""
            if rotary_pos_emb is not None:
                full, local = rotary_pos_emb.split(widths, -1)
                rotation = local if kinds[self.layer_number - 1] == _SLIDING else full
                rotary_pos_emb = rotation.contiguous()  # fused kernels read it without strides
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)

    return LayerRope


def _spec(context: Context) -> SpecChanges:
    config = context.config
    kinds, factor, widths = config.layer_types or (), attention_factor(config), rope_widths(config)
    return change_self_attention(lambda attention: with_layer_rope(attention, kinds, factor, widths))


def set_rotary(
    model: GptModel, config: McaModelConfig, make: Callable[[McaModelConfig, ProcessGroup], torch.nn.Module]
) -> None:
    """Replace a chunk's rotary module, if it has one: MLA has its own in every layer."""
    from megatron.core import parallel_state

    if hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb = make(config, parallel_state.get_context_parallel_group())


def _settings(config: McaModelConfig) -> Settings:
    rope = config.rope
    skips: Settings = {"no_rope_freq": list(rope.no_rope_freq)} if rope.no_rope_freq else {}
    return {"rotary_interleaved": rope.rotary_interleaved} | skips


def _problems(setup: Setup) -> Iterator[str]:
    """Yield problems of fused RoPE, to which Megatron passes fewer arguments for packed rows."""
    config = setup.config
    if not setup.settings.get("apply_rope_fusion"):
        return
    kind = (config.rope.rope_scaling or {}).get("rope_type", "yarn")
    if config.mla is None and attention_factor(config) != 1.0:
        yield f"apply_rope_fusion omits the factor of rope_type {kind} on packed rows; remove it"
    if config.rope.rotary_interleaved and setup.version < FIXED_IN_0_17:
        yield "apply_rope_fusion of megatron-core 0.16 does not interleave the channels of packed rows; remove it"


ROPE = Feature(
    name="RoPE",
    enabled=lambda config: True,
    settings=_settings,
    problems=_problems,
    finish=lambda model, config: set_rotary(model, config, rotary_module),
)
DUAL_ROPE = Feature(
    name="two RoPEs",
    enabled=lambda config: config.rope.rotary_base_local is not None,
    spec=_spec,
    finish=lambda model, config: set_rotary(model, config, DualRope),
)
