"""The Megatron model factory: real megatron-core models from HF or MCA checkpoints, on any rank layout."""

from mca_models.megatron.auto import AutoModel
from mca_models.megatron.state.torch_dist import PendingSave
from mca_models.megatron.virtual_models import VirtualModels

__all__ = ["AutoModel", "PendingSave", "VirtualModels"]
