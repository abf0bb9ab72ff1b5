"""Text model and projector of Cohere's models with images: Cohere 2, and a gated MLP on merged SigLIP patches."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates.family import Family
from mca_models.templates.parts.clip_tower import siglip_tower
from mca_models.templates.parts.multipliers import LOGIT_SCALE
from mca_models.templates.parts.vision_tower import PROJECTOR, TOWER, Shapes, linear, norm
from mca_models.templates.parts.vision_values import vision_values


def without_logit_scale(text: Family) -> Family:
    """Return ``text`` without the scale of its logits, which transformers' classes with images do not apply."""
    facts = tuple(fact for fact in text.table.facts if fact is not LOGIT_SCALE)
    return replace(text, config=replace(text.table, facts=facts))


def cohere_tensors(config: McaModelConfig, default: int | None = None, *, normed: bool = False) -> Shapes:
    """Return every tensor of tower and projector.

    Args:
        config: Model configuration.
        default: ``alignment_intermediate_size`` that files leave out; None: the hidden size.
        normed: A LayerNorm is in front of the projector.
    """
    about, vision = vision_values(config)
    merged = vision.size("hidden_size", 768) * about.size("downsample_factor", 2) ** 2
    between = about.size("alignment_intermediate_size", default or config.hidden_size)
    return {
        **{TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        **(norm(f"{PROJECTOR}layernorm", merged) if normed else {}),
        **linear(f"{PROJECTOR}linear_1", between, merged),
        **linear(f"{PROJECTOR}linear_2", config.hidden_size, between // 2),
    }
