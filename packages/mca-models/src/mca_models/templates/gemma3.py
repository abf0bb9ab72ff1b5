"""Gemma 3: HF ``Gemma3ForConditionalGeneration``: a SigLIP tower and the text model."""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, siglip_tower
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, TOWER, NestedTextConfig, Shapes, VisionModel
from mca_models.templates.parts.vision_values import vision_values

GEMMA3_TEXT = get_family("gemma3_text")


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of tower and projector."""
    _, vision = vision_values(config)
    width = vision.size("hidden_size", 768)
    return {
        **{TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        f"{PROJECTOR}mm_input_projection_weight": (width, config.hidden_size),
        f"{PROJECTOR}mm_soft_emb_norm.weight": (width,),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the features of an image, which attend to each other in both directions."""
    return vision_values(config)[0].size("mm_tokens_per_image", 256)


_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
"""Keys that published files leave out."""

FAMILY = vision_language_family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    {"gemma3_text": GEMMA3_TEXT.with_defaults(_DEFAULTS)},
    VisionModel(
        tensors=tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="fixed",
        tokens_per_image=tokens_per_image,
        reach=lambda config: tokens_per_image(config) - 1,
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults={"mm_tokens_per_image": 256}),
)
