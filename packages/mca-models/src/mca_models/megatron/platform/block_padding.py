"""Pass the padding mask to layers that ``recompute_method: block`` does not recompute.

megatron-core 0.16 passes the mask only to layers that it recomputes: in the others the experts' losses and biases count
padding.
"""

import functools
import inspect
from typing import Any

from mca_models.megatron.platform._patch import EVERYWHERE, Patch

_NAME = "_checkpointed_forward"


def _needed() -> bool:
    from megatron.core.transformer.transformer_block import TransformerBlock

    forward = getattr(TransformerBlock, _NAME, None)  # since 0.18 there is none
    if forward is None or hasattr(forward, "__wrapped__"):
        return False
    return "attention_mask, context, context_mask, rotary_pos_emb\n" in inspect.getsource(forward)


def _apply() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    forward = getattr(TransformerBlock, _NAME, None)
    if forward is None:
        return

    @functools.wraps(forward)
    def with_mask(self: Any, *args: Any, padding_mask: Any = None, **options: Any) -> Any:
        def pass_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"padding_mask": padding_mask}

        hooks = [layer.register_forward_pre_hook(pass_mask, with_kwargs=True) for layer in self.layers]
        try:
            return forward(self, *args, padding_mask=padding_mask, **options)
        finally:
            for hook in hooks:
                hook.remove()

    setattr(TransformerBlock, _NAME, with_mask)


PATCH = Patch(
    name="block-padding",
    why="layers that recompute_method block leaves out count padding",
    megatron=">=0.16.1,<0.18",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
