"""All features, in the order in which they apply."""

from mca_models.megatron.features.biased_experts import BIASED_EXPERTS
from mca_models.megatron.features.biased_router import BIASED_ROUTER
from mca_models.megatron.features.embedding import EMBEDDING, EMBEDDING_LAYERNORM, EMBEDDING_NORM
from mca_models.megatron.features.feature import Feature
from mca_models.megatron.features.group_router import GROUP_ROUTER
from mca_models.megatron.features.images import IMAGES
from mca_models.megatron.features.latent_moe import LATENT_MOE
from mca_models.megatron.features.mamba import MAMBA
from mca_models.megatron.features.mla import MLA
from mca_models.megatron.features.mtp import MTP_BEFORE_NORM
from mca_models.megatron.features.norms import NORMS_AFTER_ROPE, POST_NORMS
from mca_models.megatron.features.parallel_block import PARALLEL_BLOCK
from mca_models.megatron.features.per_layer_embedding import PER_LAYER_EMBEDDING
from mca_models.megatron.features.recurrent_layers import LINEAR_ATTENTION
from mca_models.megatron.features.router_replay import ROUTER_REPLAY
from mca_models.megatron.features.scales import LAYER_SCALARS, OUTPUT_BIAS, SCALES
from mca_models.megatron.features.shared_kv import SHARED_KV
from mca_models.megatron.features.short_convolution import SHORT_CONVOLUTION
from mca_models.megatron.features.vision_tower import VISION_TOWER
from mca_models.megatron.features.xielu import XIELU

FEATURES: tuple[Feature, ...] = (
    POST_NORMS,
    NORMS_AFTER_ROPE,
    PARALLEL_BLOCK,
    BIASED_EXPERTS,
    LATENT_MOE,
    GROUP_ROUTER,
    BIASED_ROUTER,
    ROUTER_REPLAY,
    LINEAR_ATTENTION,
    MAMBA,
    SHORT_CONVOLUTION,
    MLA,
    XIELU,
    OUTPUT_BIAS,
    EMBEDDING_NORM,
    EMBEDDING_LAYERNORM,
    SCALES,
    MTP_BEFORE_NORM,
    PER_LAYER_EMBEDDING,
    SHARED_KV,
    LAYER_SCALARS,
    EMBEDDING,
    VISION_TOWER,
    IMAGES,
)
