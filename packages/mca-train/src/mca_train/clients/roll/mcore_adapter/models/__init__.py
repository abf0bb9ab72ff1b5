"""``AutoModel`` by ROLL's signature."""

from .auto import AutoModel

__all__ = ["AutoModel"]
