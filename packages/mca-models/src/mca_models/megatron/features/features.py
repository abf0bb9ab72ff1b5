"""All features, in the order in which they apply, and loops over them; layer specs are in `spec`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.attention import (
    ALIBI,
    ATTENTION,
    ATTENTION_BIASES,
    CHUNKED_ATTENTION,
    CLIPPED_QKV,
    QUERY_TEMPERATURE,
    SOFTCAP,
)
from mca_models.megatron.features.block import (
    LAYER_SCALARS,
    PARALLEL_BLOCK,
    RESIDUAL_MULTIPLIER,
    SINGLE_BLOCKS,
)
from mca_models.megatron.features.block_sparse_attention import BLOCK_SPARSE_ATTENTION
from mca_models.megatron.features.dsa import DSA
from mca_models.megatron.features.embedding import (
    EMBEDDING,
    EMBEDDING_LAYERNORM,
    EMBEDDING_MULTIPLIER,
    EMBEDDING_NORM,
    LEARNED_POSITIONS,
)
from mca_models.megatron.features.feature import Context, Feature
from mca_models.megatron.features.gated_delta_net import GATED_DELTA_NET
from mca_models.megatron.features.head import (
    CLASSIFICATION_HEAD,
    LOGITS_SCALE,
    OUTPUT_BIAS,
    PADDED_VOCABULARY,
)
from mca_models.megatron.features.heterogeneous_heads import (
    HETEROGENEOUS_HEADS,
    HETEROGENEOUS_LAYERS,
    HETEROGENEOUS_MLPS,
    NARROW_VALUES,
)
from mca_models.megatron.features.identity_experts import IDENTITY_EXPERTS
from mca_models.megatron.features.kimi_delta_attention import KIMI_DELTA_ATTENTION
from mca_models.megatron.features.lightning_attention import LIGHTNING_ATTENTION
from mca_models.megatron.features.mamba import MAMBA
from mca_models.megatron.features.media import IMAGES
from mca_models.megatron.features.mla import MLA
from mca_models.megatron.features.mlp import MLP, XIELU
from mca_models.megatron.features.moe import BIASED_EXPERTS, LATENT_MOE, MOE, MOE_POST_NORM
from mca_models.megatron.features.moe_with_dense_mlp import MOE_WITH_DENSE_MLP
from mca_models.megatron.features.mrope import MROPE
from mca_models.megatron.features.mtp import MTP, MTP_BEFORE_NORM, MTP_LOSS
from mca_models.megatron.features.normed_residual import NORMED_RESIDUAL
from mca_models.megatron.features.norms import (
    CUSTOM_NORMS,
    FULL_WIDTH_QK_NORMS,
    NORMS,
    NORMS_AFTER_ROPE,
    PER_HEAD_QK_NORMS,
    POST_NORMS,
)
from mca_models.megatron.features.per_layer_embedding import PER_LAYER_EMBEDDING
from mca_models.megatron.features.rope import DUAL_ROPE, ROPE
from mca_models.megatron.features.router_replay import ROUTER_REPLAY
from mca_models.megatron.features.routers import (
    BIASED_ROUTER,
    GROUP_ROUTER,
    SHARED_EXPERT_MEAN,
    SIGMOID_ROUTER,
)
from mca_models.megatron.features.selective_scan import SELECTIVE_SCAN
from mca_models.megatron.features.shared_kv import SHARED_KV
from mca_models.megatron.features.short_convolution import SHORT_CONVOLUTION
from mca_models.megatron.features.shortcut_moe import SHORTCUT_MOE
from mca_models.megatron.features.sparse_mixer import NOISY_EXPERTS, SPARSE_MIXER
from mca_models.megatron.features.vision_tower import VISION_TOWER
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import GptModel, MegatronConfig, Settings

FEATURES: tuple[Feature, ...] = (
    ATTENTION,
    NORMS,
    MLP,
    MTP,
    HETEROGENEOUS_LAYERS,
    ROPE,
    DUAL_ROPE,
    MROPE,
    LEARNED_POSITIONS,
    CUSTOM_NORMS,
    POST_NORMS,
    FULL_WIDTH_QK_NORMS,
    PER_HEAD_QK_NORMS,
    NORMS_AFTER_ROPE,
    PARALLEL_BLOCK,
    RESIDUAL_MULTIPLIER,
    NORMED_RESIDUAL,
    MOE,
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
    MOE_POST_NORM,
    IDENTITY_EXPERTS,
    SHORTCUT_MOE,
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    SHORT_CONVOLUTION,
    LIGHTNING_ATTENTION,
    SOFTCAP,
    QUERY_TEMPERATURE,
    CHUNKED_ATTENTION,
    ALIBI,
    NARROW_VALUES,
    HETEROGENEOUS_HEADS,
    BLOCK_SPARSE_ATTENTION,
    MLA,
    DSA,
    CLIPPED_QKV,
    ATTENTION_BIASES,
    MAMBA,
    SELECTIVE_SCAN,
    SINGLE_BLOCKS,
    XIELU,
    OUTPUT_BIAS,
    EMBEDDING_NORM,
    EMBEDDING_LAYERNORM,
    EMBEDDING_MULTIPLIER,
    LOGITS_SCALE,
    MTP_BEFORE_NORM,
    VISION_TOWER,
    IMAGES,
    PER_LAYER_EMBEDDING,
    HETEROGENEOUS_MLPS,
    SHARED_KV,
    LAYER_SCALARS,
    EMBEDDING,
    PADDED_VOCABULARY,
    CLASSIFICATION_HEAD,
    MTP_LOSS,
)


def active_features(config: McaModelConfig) -> tuple[Feature, ...]:
    """Return the features of a model, in the order in which they apply."""
    return tuple(feature for feature in FEATURES if feature.enabled(config))


def settings(config: McaModelConfig) -> Settings:
    """Return the settings of the architecture."""
    chosen: Settings = {}
    for feature in active_features(config):
        chosen |= feature.settings(config)
    return chosen


def positions(config: McaModelConfig) -> str:
    """Return Megatron's ``position_embedding_type``."""
    chosen = "rope"
    for feature in active_features(config):
        chosen = feature.position_embedding or chosen
    return chosen


@contextmanager
def building(
    config: McaModelConfig, megatron: MegatronConfig, implementation: Implementation
) -> Iterator[None]:
    """Prepare all features for Megatron's construction of a chunk, in this block."""
    with ExitStack() as stack:
        for feature in active_features(config):
            stack.enter_context(feature.prepare(Context(config, implementation), megatron))
        yield


def finish(model: GptModel, config: McaModelConfig) -> None:
    """Apply the features of a model to a built chunk; runs before anything else hooks its logits."""
    for feature in active_features(config):
        feature.finish(model, config)
