"""Changes to a built chunk; changes to its spec are in `spec`."""

import torch
from torch.distributed import ProcessGroup

from mca_config.model_config import McaModelConfig
from mca_models.megatron.families.biased_experts import fix_expert_biases
from mca_models.megatron.families.dual_rope import DualRope
from mca_models.megatron.families.embedding import (
    add_embedding_norm,
    normalise_embedding,
    train_embedding_like_hf,
)
from mca_models.megatron.families.images import accept_images
from mca_models.megatron.families.kimi_delta_attention import set_no_rope
from mca_models.megatron.families.mla import set_mla_norm_epsilon, set_mla_rope, set_yarn_ramp
from mca_models.megatron.families.mtp import predict_before_norm
from mca_models.megatron.families.norms import add_post_norms, normalise_after_rope
from mca_models.megatron.families.parallel_block import connect_parallel_blocks
from mca_models.megatron.families.per_layer_embedding import add_per_layer_embeddings
from mca_models.megatron.families.scales import add_layer_scalars, add_output_bias, add_scales
from mca_models.megatron.families.settings import after_building
from mca_models.megatron.families.shared_kv import share_kv
from mca_models.megatron.families.vision_tower import add_vision_tower
from mca_models.megatron.families.xielu import use_xielu
from mca_models.megatron.layers.mrope import MRope
from mca_models.megatron.layers.rope import rotary_module
from mca_models.megatron.types import GptModel


def finish(model: GptModel, config: McaModelConfig) -> None:
    """Add norms and factors to a chunk, fix its experts and norms; runs before anything else hooks its logits."""
    add_post_norms(model, config)
    if config.attention.qk_layernorm_after_rope:
        normalise_after_rope(model, config.rope.no_rope_freq)
    if config.block.parallel_block != "none":
        connect_parallel_blocks(model)
    if config.num_experts and config.mlp.add_bias_linear:
        fix_expert_biases(model)
    if config.mla is not None:
        set_mla_norm_epsilon(model)
        set_yarn_ramp(model, config.rope.rope_scaling)
        set_mla_rope(model, config)
        set_no_rope(model, config)
    if config.mlp.hidden_act == "xielu":
        use_xielu(model)
    if config.head.output_bias and config.head.num_labels is None:
        add_output_bias(model)
    if config.embedding.embedding_norm:
        normalise_embedding(model, config.norm.layernorm_epsilon)
    if config.embedding.embedding_layernorm:
        add_embedding_norm(model)
    add_scales(model, config)
    if config.mtp.mtp_before_final_norm:
        predict_before_norm(model)
    _add_to_layers(model, config)
    train_embedding_like_hf(model, config)
    add_vision_tower(model, config)
    accept_images(model, config)
    after_building(config, model.config)


def _add_to_layers(model: GptModel, config: McaModelConfig) -> None:
    """Add per-layer inputs and outputs to the layers of a chunk, in the order in which they apply."""
    if config.per_layer_embedding is not None:
        add_per_layer_embeddings(model, config)
    if config.shared_kv is not None:
        share_kv(model, config)
    if config.block.layer_scalar:
        add_layer_scalars(model)


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
