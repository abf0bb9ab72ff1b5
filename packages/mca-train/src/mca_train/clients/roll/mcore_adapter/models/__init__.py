"""``AutoModel`` by ROLL's signature."""

from .model_factory import AutoModel

__all__ = ["AutoModel"]
