"""Vision tower with a patch merger (Qwen 2 VL), and the keys of its ``config.json``."""

from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    Spelling,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import VisionValues

VISUAL = "visual."


SPELLINGS = (Spelling("model.", "lm_head.", {VISUAL: VISUAL}), module_spelling(VISUAL))


MERGERS = (f"{VISUAL}merger.",)


INSIDE = NestedTextConfig(text_model_type="", text_ties="too", rope=((16, 24, 24), False))


def merger(name: str, width: int, merged: int, out: int, *, bias: bool) -> Shapes:
    """Return the patch merger, which makes one token of several patches."""
    return {
        **norm(f"{name}.ln_q", width, bias=bias),
        **linear(f"{name}.mlp.0", merged, merged),
        **linear(f"{name}.mlp.2", out, merged),
    }


def patches(vision: VisionValues, width: int, default: int = 14) -> tuple[int, int, int, int, int]:
    """The shape of the convolution that makes patches, which are so large by ``default``."""
    size = vision.size("patch_size", default)
    return width, vision.size("in_channels", 3), vision.size("temporal_patch_size", 2), size, size
