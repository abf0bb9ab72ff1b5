"""Tensors of the towers of CLIP and SigLIP, which differ in class token, norms and pooling head.

Names are those of transformers' modules below the tower.
"""

from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    Shapes,
    Spelling,
    linear,
    llava_spelling,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

_PUBLISHED = f"{TOWER}vision_model."
CLIP_SPELLINGS = (
    Spelling("language_model.model.", "language_model.lm_head.", {TOWER: _PUBLISHED, PROJECTOR: PROJECTOR}),
    llava_spelling(TOWER, PROJECTOR),
    Spelling(
        "model.language_model.", "lm_head.", {TOWER: f"model.{_PUBLISHED}", PROJECTOR: f"model.{PROJECTOR}"}
    ),
    module_spelling(TOWER, PROJECTOR),
)
"""Names of files with such a tower: those of transformers 4 have ``vision_model.`` in them."""


def encoder_layer(width: int, inner: int) -> Shapes:
    """Return the tensors of an encoder layer, which both towers share."""
    layer = {
        **norm("layer_norm1", width),
        **norm("layer_norm2", width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    for x in ("q", "k", "v", "out"):
        layer |= linear(f"self_attn.{x}_proj", width, width)
    return layer


def _encoder(vision: VisionValues, width: int) -> Shapes:
    """Return the encoder layers and the norm behind them."""
    layer = encoder_layer(width, vision.size("intermediate_size", 3072))
    layers = repeat_shapes("encoder.layers", vision.layers("num_hidden_layers", 12), layer)
    return {**layers, **norm("post_layernorm", width)}


def clip_tower(vision: VisionValues) -> Shapes:
    """Return the tensors of ``clip_vision_model``."""
    width, size = vision.size("hidden_size", 768), vision.size("patch_size", 32)
    patches = (vision.size("image_size", 224) // size) ** 2
    return {
        "embeddings.class_embedding": (width,),
        "embeddings.patch_embedding.weight": (width, vision.size("num_channels", 3), size, size),
        "embeddings.position_embedding.weight": (patches + 1, width),
        **norm("pre_layrnorm", width),
        **_encoder(vision, width),
    }


def siglip_tower(
    vision: VisionValues, *, head: bool = True, default_width: int = 768, default_patch: int = 16
) -> Shapes:
    """Return the tensors of ``siglip_vision_model``.

    Args:
        vision: Configuration of the tower.
        head: It has a pooling head, unless its file denies it.
        default_width: Hidden size if the file does not say.
        default_patch: Side of a patch if the file does not say.
    """
    width, size = vision.size("hidden_size", default_width), vision.size("patch_size", default_patch)
    return {
        "embeddings.patch_embedding.weight": (width, vision.size("num_channels", 3), size, size),
        "embeddings.patch_embedding.bias": (width,),
        "embeddings.position_embedding.weight": ((vision.size("image_size", 224) // size) ** 2, width),
        **_encoder(vision, width),
        **(_pooling_head(vision, width) if head else {}),
    }


def siglip2_tower(vision: VisionValues) -> Shapes:
    """Return the tensors of ``siglip2_vision_model``, which takes patches of images of any proportions."""
    width, values = vision.size("hidden_size", 768), vision.size("patch_size", 16) ** 2
    return {
        **linear("embeddings.patch_embedding", width, vision.size("num_channels", 3) * values),
        "embeddings.position_embedding.weight": (vision.size("num_patches", 256), width),
        **_encoder(vision, width),
        **_pooling_head(vision, width),
    }


def unused_states(config: McaModelConfig, default: int | tuple[int, ...]) -> tuple[str, ...]:
    """Return the parts of the tower behind the last layer whose states the projector gets.

    Args:
        config: The model.
        default: ``vision_feature_layer`` where the file does not say.
    """
    about, vision = vision_values(config)
    count = vision.layers("num_hidden_layers", 12)
    states = [state % (count + 1) for state in about.index_or_more("vision_feature_layer", default)]
    later = [f"{TOWER}encoder.layers.{layer}." for layer in range(max(states), count)]
    return (*later, f"{TOWER}post_layernorm.", f"{TOWER}head.")


def shuffled_tokens(config: McaModelConfig) -> int:
    """Return the features of a tile of SigLIP's patches, which Cohere's projectors shuffle into fewer."""
    about, vision = vision_values(config)
    side = vision.size("image_size", 224) // vision.size("patch_size", 16)
    return int(side // about.size("downsample_factor", 2)) ** 2


def _pooling_head(vision: VisionValues, width: int) -> Shapes:
    """Return the head that pools a picture into one vector, unless the file denies it; published files have none."""
    if not vision.flag("vision_use_head", True):
        return {}
    inner = vision.size("intermediate_size", 3072)
    return {
        "head.probe": (1, 1, width),
        "head.attention.in_proj_weight": (3 * width, width),
        "head.attention.in_proj_bias": (3 * width,),
        **linear("head.attention.out_proj", width, width),
        **norm("head.layernorm", width),
        **linear("head.mlp.fc1", inner, width),
        **linear("head.mlp.fc2", width, inner),
    }
