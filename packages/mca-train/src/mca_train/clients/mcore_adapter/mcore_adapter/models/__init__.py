"""``AutoConfig`` and ``AutoModel`` by ``mcore_adapter``'s signatures."""

from .auto import AutoConfig, AutoModel

__all__ = ["AutoConfig", "AutoModel"]
