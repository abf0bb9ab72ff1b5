"""The weights and models of mca.

Exported names are imported on first use. ``AutoConfig``, ``config_from_hf`` and ``open_checkpoint`` need no torch; the
others need the extra ``megatron``.
"""

from typing import TYPE_CHECKING

from mca_config.lazy_names import make_lazy_getattr

if TYPE_CHECKING:
    from mca_models.checkpoint_kinds import AutoConfig, open_checkpoint
    from mca_models.megatron.auto import AutoModel
    from mca_models.megatron.log_probs.vocabulary import TokenValues
    from mca_models.megatron.peft.create import get_peft_model, load_adapter
    from mca_models.megatron.virtual_models import VirtualModels
    from mca_models.templates import config_from_hf

__all__ = [
    "AutoConfig",
    "AutoModel",
    "TokenValues",
    "VirtualModels",
    "config_from_hf",
    "get_peft_model",
    "load_adapter",
    "open_checkpoint",
]

_HOME = {
    "AutoConfig": "checkpoint_kinds",
    "AutoModel": "megatron.auto",
    "TokenValues": "megatron.log_probs.vocabulary",
    "VirtualModels": "megatron.virtual_models",
    "config_from_hf": "templates",
    "get_peft_model": "megatron.peft.create",
    "load_adapter": "megatron.peft.create",
    "open_checkpoint": "checkpoint_kinds",
}

__getattr__ = make_lazy_getattr(__name__, _HOME)
