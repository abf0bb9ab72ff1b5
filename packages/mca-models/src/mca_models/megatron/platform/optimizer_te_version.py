"""Support the precision-aware optimizer of optimizer offloading without Transformer Engine.

``OptimizerConfig`` compares Transformer Engine's version, ``None``, with a number (TypeError). Later versions of
megatron-core treat it as 0.0.0.
"""

from mca_models.megatron.platform._patch import EVERYWHERE, Patch


def _needed() -> bool:
    from megatron.core.optimizer import optimizer_config
    from megatron.core.utils import get_te_version

    return get_te_version() is None and optimizer_config.is_te_min_version is not _is_none


def _is_none(version: str, check_equality: bool = True) -> bool:
    return False


def _apply() -> None:
    from megatron.core.optimizer import optimizer_config

    optimizer_config.is_te_min_version = _is_none


PATCH = Patch(
    name="optimizer-te-version",
    why="a precision-aware optimizer compares the version of Transformer Engine, None without it, with a number",
    megatron=">=0.16.1,<0.17",
    devices=EVERYWHERE,
    needed=_needed,
    apply=_apply,
)
