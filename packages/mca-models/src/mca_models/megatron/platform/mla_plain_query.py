"""Latent attention without compressed queries has no norm on them.

With ``qk_layernorm`` and no ``q_lora_rank``, megatron-core 0.19 wants a norm fused into ``linear_q_proj`` (and stops
where there is no such module). DeepSeek's models, and 0.16, normalise the compressed keys and values only.
"""

from typing import Any

from mca_models.megatron.platform._patch import EVERYWHERE, Patch

_METHOD = "_resolve_mla_qk_layernorm"


def _resolver() -> Any:
    try:
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
    except ImportError:
        return None
    return QKNormConfigResolver


def _apply() -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    resolver = _resolver()
    original = getattr(resolver, _METHOD)

    def resolve(self: Any) -> Any:
        if self.has_q_lora:
            return original(self)
        norm = self.submodules.kv_layernorm or IdentityOp
        up = self._mla_fused_linear_or_default if self._is_trivial(norm) else self._non_fused_or_default
        return self._result(
            linear_q_proj=self.submodules.linear_q_proj or self.linear_impl,
            linear_q_up_proj=IdentityOp,
            linear_kv_up_proj=up(self.submodules.linear_kv_up_proj, "linear_kv_up_proj"),
            q_layernorm=IdentityOp,
            kv_layernorm=norm,
        )

    setattr(resolver, _METHOD, resolve)


PATCH = Patch(
    name="mla-plain-query",
    why="latent attention without q_lora_rank gets a norm on its queries that no checkpoint has",
    megatron=">=0.19",
    devices=EVERYWHERE,
    needed=lambda: _resolver() is not None,
    apply=_apply,
)
