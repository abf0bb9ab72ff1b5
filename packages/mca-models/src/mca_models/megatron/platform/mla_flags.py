"""Tell MLA that Transformer Engine is missing.

megatron-core 0.16.1 sets ``HAVE_TE = True`` in ``multi_latent_attention`` even if Transformer Engine is not installed
(the import succeeds with mock classes), and ``isinstance(x, MagicMock())`` raises TypeError.
"""

from mca_models.megatron.platform._patch import EVERYWHERE, Patch


def _needed() -> bool:
    import megatron.core.transformer.multi_latent_attention as mla

    return bool(mla.HAVE_TE) and not isinstance(mla.TELinear, type)


def _apply() -> None:
    import megatron.core.transformer.multi_latent_attention as mla

    mla.HAVE_TE = False


PATCH = Patch(
    name="mla-flags",
    why="MLA calls isinstance() with a mock instead of Transformer Engine's class",
    megatron="<0.17",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
