"""DeepSeek VL: HF ``DeepseekVLForConditionalGeneration``: a SigLIP tower, an aligner, and Llama."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import siglip_tower
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
)
from mca_models.templates.parts.vision_values import vision_values

_TOWER, _ALIGNER = "vision_model.", "aligner."
_PUBLISHED = Spelling(  # by transformers 4
    "model.language_model.",
    "lm_head.",
    {_TOWER: f"model.{_TOWER}vision_model.", _ALIGNER: f"model.{_ALIGNER}"},
)


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and aligner."""
    _, vision = vision_values(config)
    return {
        **{_TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        **linear(f"{_ALIGNER}linear1", config.hidden_size, vision.size("hidden_size", 768)),
        **linear(f"{_ALIGNER}linear2", config.hidden_size, config.hidden_size),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the patches of an image."""
    _, vision = vision_values(config)
    return int(vision.size("image_size", 224) // vision.size("patch_size", 16)) ** 2


FAMILY = vision_language_family(
    "deepseek_vl",
    "DeepseekVLForConditionalGeneration",
    {"llama": get_family("llama")},
    VisionModel(
        tensors=tensors,
        spellings=(_PUBLISHED, module_spelling(_TOWER, _ALIGNER)),
        projector=(_ALIGNER,),
        unused=lambda config: (f"{_TOWER}head.",),
        image_tokens="plain",
        tokens_per_image=tokens_per_image,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"image_token_id": 100015}),
    assumed=True,
)
