"""All features, in the order in which they apply."""

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.attention import ATTENTION_BIASES, CLIPPED_QKV
from mca_models.megatron.features.biased_experts import BIASED_EXPERTS
from mca_models.megatron.features.biased_router import BIASED_ROUTER
from mca_models.megatron.features.block import SINGLE_BLOCKS
from mca_models.megatron.features.block_sparse_attention import BLOCK_SPARSE_ATTENTION
from mca_models.megatron.features.dsa import DSA
from mca_models.megatron.features.dual_rope import DUAL_ROPE
from mca_models.megatron.features.embedding import EMBEDDING, EMBEDDING_LAYERNORM, EMBEDDING_NORM
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.gated_delta_net import GATED_DELTA_NET
from mca_models.megatron.features.group_router import GROUP_ROUTER
from mca_models.megatron.features.heterogeneous_heads import HETEROGENEOUS_HEADS, HETEROGENEOUS_MLPS
from mca_models.megatron.features.identity_experts import IDENTITY_EXPERTS
from mca_models.megatron.features.images import IMAGES
from mca_models.megatron.features.kimi_delta_attention import KIMI_DELTA_ATTENTION
from mca_models.megatron.features.latent_moe import LATENT_MOE
from mca_models.megatron.features.mamba import MAMBA
from mca_models.megatron.features.mla import MLA
from mca_models.megatron.features.moe_with_dense_mlp import MOE_WITH_DENSE_MLP
from mca_models.megatron.features.mtp import MTP_BEFORE_NORM
from mca_models.megatron.features.norms import (
    CUSTOM_NORMS,
    FULL_WIDTH_QK_NORMS,
    NORMS_AFTER_ROPE,
    PER_HEAD_QK_NORMS,
    POST_NORMS,
)
from mca_models.megatron.features.parallel_block import PARALLEL_BLOCK
from mca_models.megatron.features.per_layer_embedding import PER_LAYER_EMBEDDING
from mca_models.megatron.features.router_replay import ROUTER_REPLAY
from mca_models.megatron.features.scales import LAYER_SCALARS, OUTPUT_BIAS, RESIDUAL_MULTIPLIER, SCALES
from mca_models.megatron.features.shared_kv import SHARED_KV
from mca_models.megatron.features.short_convolution import SHORT_CONVOLUTION
from mca_models.megatron.features.shortcut_moe import SHORTCUT_MOE
from mca_models.megatron.features.sigmoid_router import SHARED_EXPERT_MEAN, SIGMOID_ROUTER
from mca_models.megatron.features.sparse_mixer import NOISY_EXPERTS, SPARSE_MIXER
from mca_models.megatron.features.vision_tower import VISION_TOWER
from mca_models.megatron.features.xielu import XIELU

FEATURES: tuple[Feature, ...] = (
    CUSTOM_NORMS,
    POST_NORMS,
    FULL_WIDTH_QK_NORMS,
    PER_HEAD_QK_NORMS,
    NORMS_AFTER_ROPE,
    PARALLEL_BLOCK,
    RESIDUAL_MULTIPLIER,
    BIASED_EXPERTS,
    LATENT_MOE,
    SIGMOID_ROUTER,
    SPARSE_MIXER,
    GROUP_ROUTER,
    BIASED_ROUTER,
    ROUTER_REPLAY,
    NOISY_EXPERTS,
    SHARED_EXPERT_MEAN,
    MOE_WITH_DENSE_MLP,
    IDENTITY_EXPERTS,
    SHORTCUT_MOE,
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    SHORT_CONVOLUTION,
    MLA,
    DSA,
    DUAL_ROPE,
    HETEROGENEOUS_HEADS,
    BLOCK_SPARSE_ATTENTION,
    CLIPPED_QKV,
    ATTENTION_BIASES,
    MAMBA,
    SINGLE_BLOCKS,
    XIELU,
    OUTPUT_BIAS,
    EMBEDDING_NORM,
    EMBEDDING_LAYERNORM,
    SCALES,
    MTP_BEFORE_NORM,
    PER_LAYER_EMBEDDING,
    HETEROGENEOUS_MLPS,
    SHARED_KV,
    LAYER_SCALARS,
    EMBEDDING,
    VISION_TOWER,
    IMAGES,
)


def active_features(config: McaModelConfig) -> tuple[Feature, ...]:
    """Return the features of a model, in the order in which they apply."""
    return tuple(feature for feature in FEATURES if feature.enabled(config))
