"""Latent attention with uncompressed queries, which have no norm, on megatron-core 0.17 and later.

There ``qk_layernorm`` without ``q_lora_rank`` puts a norm before the query projection; HF's models have a norm
on the compressed keys and values only. Earlier versions build just that, and never ask this class.
"""

from functools import cache
from typing import Any


@cache
def with_plain_query(attention: type) -> type:
    """Megatron's ``MLASelfAttention`` with the modules of its spec taken as they are."""

    class PlainQuery(attention):  # type: ignore[misc]
        """Latent attention without a norm on its queries."""

        def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
            from megatron.core.transformer.identity_op import IdentityOp

            return {
                "linear_q_proj": submodules.linear_q_proj,
                "linear_q_up_proj": IdentityOp,
                "linear_kv_up_proj": submodules.linear_kv_up_proj,
                "q_layernorm": IdentityOp,
                "kv_layernorm": submodules.kv_layernorm or IdentityOp,
            }

    return PlainQuery
