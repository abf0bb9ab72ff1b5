"""Tensors of Pixtral towers with Mistral 3's projector, which merges patches."""

from functools import partial

from mca_config.model_config import McaModelConfig
from mca_models.templates.parts.vision_tower import Shapes, linear, norm, repeat_shapes
from mca_models.templates.parts.vision_values import vision_values

_norm, _linear = partial(norm, bias=False), partial(linear, bias=False)


def pixtral_tensors(config: McaModelConfig, *, tower: str, projector: str) -> Shapes:
    """Return every tensor of tower and projector.

    Args:
        config: The model.
        tower: Beginning of the names of the tower.
        projector: Beginning of the names of the projector.
    """
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1024), vision.size("intermediate_size", 4096)
    size, merge = vision.size("patch_size", 16), about.size("spatial_merge_size", 2)
    layer = {
        **_norm("attention_norm", width),
        **_norm("ffn_norm", width),
        **_linear("attention.q_proj", width, width),
        **_linear("attention.k_proj", width, width),
        **_linear("attention.v_proj", width, width),
        **_linear("attention.o_proj", width, width),
        **_linear("feed_forward.gate_proj", inner, width),
        **_linear("feed_forward.up_proj", inner, width),
        **_linear("feed_forward.down_proj", width, inner),
    }
    biased = about.flag("multimodal_projector_bias", False)
    taken = width * len(about.index_or_more("vision_feature_layer", -1))
    return {
        f"{tower}patch_conv.weight": (width, vision.size("num_channels", 3), size, size),
        **_norm(f"{tower}ln_pre", width),
        **repeat_shapes(f"{tower}transformer.layers", vision.layers("num_hidden_layers", 24), layer),
        **_norm(f"{projector}norm", width),
        **_linear(f"{projector}patch_merger.merging_layer", width, width * merge**2),
        **linear(f"{projector}linear_1", config.hidden_size, taken, bias=biased),
        **linear(f"{projector}linear_2", config.hidden_size, config.hidden_size, bias=biased),
    }


def tokens_of_size(config: McaModelConfig, height: int, width: int) -> int:
    """Return the features of an image of ``height`` times ``width`` pixels."""
    about, vision = vision_values(config)
    side = vision.size("patch_size", 16) * about.size("spatial_merge_size", 2)
    return int(height // side) * int(width // side)
