"""What keeps a model from taking images, told before any is computed."""

from collections.abc import Iterator

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import pipeline_plan


def image_problems(config: McaModelConfig, layout: ParallelLayout, apply_rope_fusion: bool) -> list[str]:
    """Every reason why ``config`` on ``layout`` cannot take images; empty if it can."""
    return list(_problems(config, layout, apply_rope_fusion))


def _problems(config: McaModelConfig, layout: ParallelLayout, apply_rope_fusion: bool) -> Iterator[str]:
    if config.vision is None:
        yield f"a {config.model_type} model has no vision model; train it on text"
        return
    if "mm_tokens_per_image" in config.vision:
        yield f"images of {config.model_type} attend both ways, which is not computed here yet; train it on text"
    if config.mtp_num_layers:
        yield "prediction layers cannot be trained beside images; set mtp_num_layers to 0"
    if apply_rope_fusion and config.mrope_section:
        yield "apply_rope_fusion has one position for each token, images have three; remove it"
    first = len(pipeline_plan(layout, config.num_layers, config.mtp_num_layers).first.layers)
    if first < config.deepstack_layers:
        yield (
            f"the first pipeline stage has {first} layers; features of images enter after each of the first "
            f"{config.deepstack_layers}: give it more, or use fewer stages"
        )
