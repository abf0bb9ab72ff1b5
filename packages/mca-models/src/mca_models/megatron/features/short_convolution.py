"""Gated short convolution in place of attention (LFM2), in plain torch or by the kernel of causal-conv1d.

    B, C, x = in_proj(u)        y = out_proj(C * conv(B * x))

The convolution is causal and depthwise. Tensor ranks hold channels; context parallelism gathers the projected tokens.
"""

from torch import Tensor

from mca_config.model.section import given
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.recurrent_layers import (
    CausalConvolution,
    SequenceMixer,
    mixer_in_layers,
    separate_layer_states,
)
from mca_models.megatron.types import MegatronConfig

_PARTS = ("gate_in", "gate_out", "inputs")
"""Parts of the input projection (B, C, x); names differ from those of Mamba's parts in ``torch_dist`` directories."""


class ShortConvolution(SequenceMixer):
    """Gated short convolution of one tensor rank's channels; `mixer_spec` mixes in ``MegatronModule``."""

    cut = ("conv1d.weight",)

    def __init__(
        self, config: MegatronConfig, model: McaModelConfig, column: Typed, row: Typed, **options: Typed
    ) -> None:
        super().__init__(config)
        self.groups = options["pg_collection"]
        hidden = model.hidden_size
        self.channels = hidden // self.groups.tp.size()
        self.in_proj, self.out_proj = self._projections(column, row, rows=len(_PARTS) * hidden, inside=hidden)
        width = given(model.short_convolution).short_conv_kernel_dim
        self.conv1d = CausalConvolution.build(self.channels, width, config)
        self.conv1d.activation = None
        self.fused = {"in_proj.weight": ([self.channels] * len(_PARTS), _PARTS)}

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Map projections ``[s, b, B C x]`` of one sequence to gated values ``[s, b, channels]``."""
        before, after, x = mixed.chunk(len(_PARTS), -1)
        convolved = self.conv1d((before * x).permute(1, 2, 0)).permute(2, 0, 1)
        gated: Tensor = after * convolved
        return gated


SHORT_CONVOLUTION = Feature(
    name="short convolution",
    enabled=lambda config: config.short_convolution is not None,
    settings=separate_layer_states,
    layer=mixer_in_layers("conv", ShortConvolution),
)
