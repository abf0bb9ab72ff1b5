"""LFM2-VL: HF ``Lfm2VlForConditionalGeneration``: SigLIP 2 on tiles, whose patches are merged into fewer, and LFM2."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, siglip2_tower
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    norm,
)
from mca_models.templates.parts.vision_values import vision_values


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    merged = vision.size("hidden_size", 768) * about.size("downsample_factor", 2) ** 2
    between = about.size("projector_hidden_size", 2560)
    biased, normed = about.flag("projector_bias", True), about.flag("projector_use_layernorm", True)
    return {
        **{TOWER + name: shape for name, shape in siglip2_tower(vision).items()},
        **(norm(f"{PROJECTOR}layer_norm", merged) if normed else {}),
        **linear(f"{PROJECTOR}linear_1", between, merged, bias=biased),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between, bias=biased),
    }


def tokens_of_size(config: McaModelConfig, rows: int, columns: int) -> int:
    """Return the features of a tile of ``rows`` times ``columns`` patches."""
    factor = vision_values(config)[0].size("downsample_factor", 2)
    return int(rows // factor) * int(columns // factor)


FAMILY = vision_language_family(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    {"lfm2": get_family("lfm2")},
    VisionModel(
        tensors=tensors,
        spellings=CLIP_SPELLINGS[2:],
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="thumbnail_tiles",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_id": 396}),
)
