"""Limits of models with images, checked before any is computed."""

from collections.abc import Iterator

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import pipeline_plan
from mca_config.printable import counted
from mca_models.megatron.types import MegatronConfig


def image_reach(config: McaModelConfig) -> int:
    """Return how many later tokens an image token attends to; 0 with causal attention."""
    tokens: int = (config.vision_fields or {}).get("mm_tokens_per_image", 1)
    return tokens - 1


def image_problems(config: McaModelConfig, layout: ParallelLayout, megatron: MegatronConfig) -> list[str]:
    """Return every reason why ``config`` on ``layout`` cannot take images; empty if it can."""
    return list(_problems(config, layout, megatron))


def _problems(config: McaModelConfig, layout: ParallelLayout, megatron: MegatronConfig) -> Iterator[str]:
    if config.vision is None:
        yield f"a {config.model_type} model has no vision model; train it on text"
        return
    if image_reach(config):
        yield from _bidirectional_problems(config, megatron)
    if config.mtp_num_layers:
        yield "MTP layers cannot be trained with images; set mtp_num_layers to 0"
    if megatron.apply_rope_fusion and config.mrope is not None:
        yield "apply_rope_fusion has one position for each token, images have three; remove it"
    first = len(pipeline_plan(layout, config.num_layers, config.mtp_num_layers).first.layers)
    if first < config.vision.deepstack_layers:
        yield (
            f"the first pipeline stage has {counted(first, 'layer')}; image features are added after each of the first "
            f"{config.vision.deepstack_layers}: give it more, or use fewer stages"
        )


def _bidirectional_problems(config: McaModelConfig, megatron: MegatronConfig) -> Iterator[str]:
    local = megatron.attention_backend is not None and megatron.attention_backend.name == "local"
    if megatron.transformer_impl == "transformer_engine" and not local:
        yield (
            f"images of {config.model_type} attend in both directions, which Transformer Engine's attention does "
            "not support; set attention_backend to local"
        )
    if config.attention.attn_logit_softcapping is not None:
        yield "attn_logit_softcapping cannot be combined with images that attend in both directions; train on text"
