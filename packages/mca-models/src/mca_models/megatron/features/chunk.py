"""Changes to a built chunk; changes to its spec are in `spec`."""

import torch
from torch.distributed import ProcessGroup

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.dual_rope import DualRope
from mca_models.megatron.features.features import active_features
from mca_models.megatron.features.settings import after_building
from mca_models.megatron.layers.mrope import MRope
from mca_models.megatron.layers.rope import rotary_module
from mca_models.megatron.types import GptModel


def finish(model: GptModel, config: McaModelConfig) -> None:
    """Apply the features of a model to a built chunk; runs before anything else hooks its logits."""
    for feature in active_features(config):
        feature.finish(model, config)
    after_building(config, model.config)


def positions(config: McaModelConfig) -> str:
    """Return Megatron's ``position_embedding_type``."""
    return (
        "learned_absolute"
        if config.embedding.learned_positions
        else "none"
        if config.attention.alibi
        else "rope"
    )


def rotary(config: McaModelConfig, cp_group: ProcessGroup) -> torch.nn.Module | None:
    """Return the model's rotary embedding; None without RoPE and with MLA, whose attention has its own."""
    if config.mla is not None or positions(config) != "rope":
        return None
    if config.rope.rotary_base_local is not None:
        return DualRope(config, cp_group)
    if config.mrope is not None:
        return MRope(config, cp_group)
    return rotary_module(config, cp_group)
