"""Recurrent layers (Mamba, gated delta net) on full sequences under context parallelism.

The computation of each sequence is in the modules of the layers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import conv1d, pad, silu

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.feature import LayerContext, SpecChanges
from mca_models.megatron.features.kernels import Kernel, find_kernel
from mca_models.megatron.layers.sharded import sharded_state
from mca_models.megatron.layers.zigzag import gather_full_sequences, rank_token_ranges
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import (
    MegatronConfig,
    MegatronModule,
    PackedSeqParams,
    Settings,
    ShardedState,
    Spec,
    WithBias,
)

_MAX_KERNEL_SIZE = 4
"""Maximum kernel size of ``causal_conv1d_fn``."""


def apply_to_full_sequences(
    compute: Callable[[Tensor], Tensor], x: Tensor, packed_seq_params: PackedSeqParams, group: ProcessGroup
) -> Tensor:
    """Apply ``compute`` to each full sequence and return this context rank's tokens.

    Args:
        compute: Function of one sequence ``[s, b, ...]`` that keeps the number of tokens.
        x: ``[s / cp, b, ...]``; packed sequences are concatenated.
        packed_seq_params: Boundaries of packed sequences.
        group: The context-parallel group, over which the sequences are gathered.
    """
    lengths = _lengths(packed_seq_params, x.shape[0] * group.size())
    outputs = [compute(sequence) for sequence in gather_full_sequences(x, lengths, group)]
    chunks = rank_token_ranges(lengths, group.rank(), group.size())
    local = [outputs[chunk.sequence].narrow(0, chunk.start, chunk.length) for chunk in chunks]
    return local[0] if len(local) == 1 else torch.cat(local)


def mixer_in_layers(kind: str, mixer: type, *, norm: bool = True) -> Callable[[LayerContext], SpecChanges]:
    """Return the change of a layer's spec that puts ``mixer`` in place of attention in layers of ``kind``."""
    return spec_in_layers(
        kind, lambda context: mixer_spec(mixer, context.config, context.implementation, norm=norm)
    )


def spec_in_layers(kind: str, spec: Callable[[LayerContext], Spec]) -> Callable[[LayerContext], SpecChanges]:
    """Return the change that puts ``spec`` in place of attention in layers of ``kind``, an entry of ``layer_types``."""

    def change(context: LayerContext) -> SpecChanges:
        if context.kind != kind:
            return SpecChanges()
        return SpecChanges({"self_attention": lambda _: spec(context)})

    return change


def mixer_spec(mixer: type, config: McaModelConfig, implementation: Implementation, *, norm: bool) -> Spec:
    """Return the spec of a mixer of ``config``.

    Args:
        mixer: Module without its base class, Megatron's, which is imported when a layer is built.
        config: The model.
        implementation: Implementation of its linears.
        norm: Fuse the norm before it into its first linear if the implementation can.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    column, row = normed_linears(implementation, norm=norm)
    return ModuleSpec(module=_with_base(mixer), params={"model": config, "column": column, "row": row})


@cache
def _with_base(mixer: type) -> type:
    from megatron.core.transformer.module import MegatronModule

    return type(mixer.__name__, (mixer, MegatronModule), {})


def separate_layer_states(config: McaModelConfig) -> Settings:
    """Return the setting that layers with different tensors need: their states are not stacked."""
    return {"hetereogenous_dist_checkpoint": True}


def normed_linears(implementation: Implementation, *, norm: bool = True) -> tuple[type, type]:
    """Return the classes of the first linear, column-parallel, and of the last, row-parallel.

    Args:
        implementation: Layer implementation.
        norm: Fuse the norm into the first linear if the implementation can.
    """
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        return TELayerNormColumnParallelLinear if norm else TEColumnParallelLinear, TERowParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return ColumnParallelLinear, RowParallelLinear


class SequenceMixer(torch.nn.Module):
    """Base of a layer in place of attention that reads full sequences; subclasses mix in ``MegatronModule``.

    Attributes:
        in_proj: Input projection.
        out_proj: Output projection.
        groups: Process groups of the layer.
        cut: Names of the parameters, not of its modules, that tensor ranks share along the first dimension.
        fused: Rows on this rank and names of the parts of each fused tensor, along the first dimension.
    """

    cut: ClassVar[Sequence[str]] = ()
    fused: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {}
    in_proj: MegatronModule
    out_proj: MegatronModule
    groups: Typed
    config: MegatronConfig

    def _projections(
        self, column: Typed, row: Typed, *, rows: int, inside: int
    ) -> tuple[MegatronModule, MegatronModule]:
        """Return the input and the output projection.

        Args:
            column: Class of the first, column-parallel.
            row: Class of the second, row-parallel.
            rows: Channels that the first gives, over all ranks.
            inside: Channels that the second gets, over all ranks.
        """
        config = self.config
        both = {"config": config, "bias": False, "is_expert": False, "tp_group": self.groups.tp}
        in_proj: MegatronModule = column(
            config.hidden_size,
            rows,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **both,
        )
        out_proj: MegatronModule = row(
            inside,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **both,
        )
        return in_proj, out_proj

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        *,
        packed_seq_params: PackedSeqParams = None,
        **_: object,
    ) -> WithBias:
        """Map ``[s / cp, b, hidden]`` to the same shape; other arguments of an attention are ignored."""
        mixed = self._project(hidden_states)
        output: WithBias = self.out_proj(
            apply_to_full_sequences(self._sequence, mixed, packed_seq_params, self.groups.cp)
        )
        return output

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Map ``[s / cp, b, hidden]`` to the projections ``[s / cp, b, rows]`` that `_sequence` reads."""
        mixed: Tensor = self.in_proj(hidden_states)[0]
        return mixed

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Map projections of one sequence ``[s, b, rows]`` to the inputs of ``out_proj``."""
        raise NotImplementedError

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: Typed = None
    ) -> ShardedState:
        """Return the sharded state; fused tensors are split into their parts, independent of the layout."""
        from megatron.core.ssm.mamba_mixer import _split_tensor_factory

        state: ShardedState = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if self.cut:
            own = sharded_state(self, prefix, sharded_offsets, dict.fromkeys(self.cut, 0))
            state |= {key: value for key, value in own.items() if key.removeprefix(prefix) in self.cut}
        for name, (rows, parts) in self.fused.items():
            if (key := f"{prefix}{name}") in state:
                state[key] = _split_tensor_factory(state[key], list(rows), list(parts), 0)
        return state


class CausalConvolution(torch.nn.Conv1d):
    """Causal depthwise convolution, with SiLU unless ``activation`` is None.

    It is a module, because with ``overlap_param_gather`` Megatron waits for gathered parameters when the module that
    has them is called.
    """

    kernel: Kernel | None
    activation: Literal["silu"] | None = "silu"

    @classmethod
    def build(
        cls, channels: int, width: int, config: MegatronConfig, *, bias: bool = False
    ) -> "CausalConvolution":
        """Return one whose parameters are not filled."""
        module = cls(channels, channels, width, groups=channels, bias=bias, dtype=config.params_dtype)
        module.kernel = find_kernel("causal_conv1d_fn", config)
        return module

    @classmethod
    def from_conv1d(cls, convolution: torch.nn.Conv1d, kernel: Kernel | None) -> "CausalConvolution":
        """Return one with the parameters of ``convolution``; ``kernel`` is ``causal_conv1d_fn``, None: plain torch."""
        channels, (width,) = convolution.out_channels, convolution.kernel_size
        module = cls(channels, channels, width, groups=channels, bias=False, device="meta")
        module.weight, module.bias, module.kernel = convolution.weight, convolution.bias, kernel
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, channels, s]`` to the same shape."""
        width = self.weight.shape[-1]
        if self.kernel is not None and width <= _MAX_KERNEL_SIZE:
            mixed = self.kernel(x.contiguous(), self.weight.squeeze(1), self.bias, activation=self.activation)
            assert isinstance(mixed, Tensor)
            return mixed
        mixed = conv1d(pad(x, (width - 1, 0)), self.weight, self.bias, groups=x.shape[1])
        return mixed if self.activation is None else silu(mixed)


def _lengths(packed_seq_params: PackedSeqParams, rows: int) -> tuple[int, ...]:
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return (rows,)
    from mca_models.megatron.layers.attention import packed_lengths

    return packed_lengths(packed_seq_params, rows)


def linear_attention_settings(config: McaModelConfig) -> Settings:
    """Return Megatron's settings of linear attention."""
    own = given(config.linear_attention)
    return {
        # makes Megatron's distributed checkpoint expect different layers
        "linear_attention_freq": [int(config.is_linear_layer(layer)) for layer in range(config.num_layers)],
        "linear_conv_kernel_dim": own.linear_conv_kernel_dim,
        "linear_num_key_heads": own.linear_num_key_heads,
        "linear_num_value_heads": own.linear_num_value_heads,
        "linear_key_head_dim": own.linear_key_head_dim,
        "linear_value_head_dim": own.linear_value_head_dim,
    }
