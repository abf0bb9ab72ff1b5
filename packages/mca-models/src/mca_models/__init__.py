"""The weights and models of mca.

The base install has ``mca_models.weights``, ``templates`` and ``checkpoint``, none of which imports torch. With the
extra ``megatron`` there are ``AutoModel`` and ``VirtualModels``, imported when first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mca_models.megatron import AutoModel, VirtualModels

__all__ = ["AutoModel", "VirtualModels"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mca_models import megatron

    return getattr(megatron, name)
