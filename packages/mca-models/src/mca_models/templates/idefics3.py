"""Idefics 3 and SmolVLM 2: HF ``Idefics3ForConditionalGeneration`` and ``SmolVLMForConditionalGeneration``.

SigLIP on square tiles, whose patches are shuffled into fewer for a linear, and Llama.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import siglip_tower
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import NestedTextConfig, Shapes, Spelling, VisionModel, linear
from mca_models.templates.parts.vision_values import vision_values

_TOWER, _CONNECTOR = "vision_model.", "connector."


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and connector."""
    about, vision = vision_values(config)
    tower = siglip_tower(vision, head=False, default_width=1152, default_patch=32)
    merged = vision.size("hidden_size", 1152) * about.size("scale_factor", 2) ** 2
    return {
        **{_TOWER + name: shape for name, shape in tower.items()},
        **linear(f"{_CONNECTOR}modality_projection.proj", config.hidden_size, merged, bias=False),
    }


def tokens_per_tile(config: McaModelConfig) -> int:
    """Return the features of a tile."""
    about, vision = vision_values(config)
    patches = (vision.size("image_size", 224) // vision.size("patch_size", 32)) ** 2
    return int(patches / about.size("scale_factor", 2) ** 2)


def _family(model_type: str, architecture: str) -> Family:
    modules = {part: f"model.{part}" for part in (_TOWER, _CONNECTOR)}
    return vision_language_family(
        model_type,
        architecture,
        {"llama": get_family("llama")},
        VisionModel(
            tensors=tensors,
            spellings=(Spelling("model.text_model.", "lm_head.", modules),),
            projector=(_CONNECTOR,),
            image_tokens="row_column_tiles",
            tokens_per_image=tokens_per_tile,
        ),
        NestedTextConfig(defaults={"image_token_id": 128257}),
    )


IDEFICS3 = _family("idefics3", "Idefics3ForConditionalGeneration")
SMOLVLM = _family("smolvlm", "SmolVLMForConditionalGeneration")

FAMILIES = by_type(IDEFICS3, SMOLVLM)
