"""Attention with a state space model beside it (Falcon H1).

Both take the same normalised input, and what they give is added together.
"""

from torch import Tensor

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.mamba import mamba_spec
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import MegatronConfig, PackedSeqParams, WithBias


def with_parallel_mamba(attention: type, model: McaModelConfig, implementation: Implementation) -> type:
    """An attention class without biases, with such a model in it.

    Args:
        attention: Megatron's class.
        model: The model.
        implementation: Whose linears the state space model has.
    """
    factor = model.attention_out_multiplier

    class ParallelMamba(attention):  # type: ignore[misc]
        """Megatron's attention."""

        def __init__(self, config: MegatronConfig, *args: object, **kwargs: object) -> None:
            from megatron.core.transformer.spec_utils import build_module

            super().__init__(config, *args, **kwargs)
            spec = mamba_spec(implementation, model)
            self.mamba = build_module(spec, config=config, pg_collection=self.pg_collection)

        def forward(
            self,
            hidden_states: Tensor,
            *args: object,
            packed_seq_params: PackedSeqParams = None,
            **kwargs: object,
        ) -> WithBias:
            """``[s / cp, b, hidden]`` to the same."""
            packed = {"packed_seq_params": packed_seq_params}
            states, _ = self.mamba(hidden_states, **packed)
            attended, _ = super().forward(hidden_states, *args, **packed, **kwargs)
            return attended * factor + states, None

    return ParallelMamba
