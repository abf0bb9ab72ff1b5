"""Parts that Qwen 2.5 Omni and Qwen 3 Omni share: names in files, and a ``config.json`` with more than the thinker.

The thinker is the model that reads text, images, videos and audio. A complete checkpoint holds a talker and a vocoder
too, which `passthrough` copies.
"""

from dataclasses import dataclass, replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import HfConfig
from mca_models.templates.family import Family
from mca_models.templates.parts.passthrough import with_passthrough
from mca_models.templates.parts.patch_merger import VISUAL
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    AUDIO_TOWER,
    NestedTextConfig,
    Spelling,
    as_object,
    module_spelling,
)

THINKER, THINKER_CONFIG = "thinker.", "thinker_config"
_TOWERS = {VISUAL: VISUAL, AUDIO_TOWER: AUDIO_TOWER}
SPELLINGS = (Spelling("model.", "lm_head.", _TOWERS), module_spelling(VISUAL, AUDIO_TOWER))


@dataclass(frozen=True, kw_only=True)
class ThinkerConfig(NestedTextConfig):
    """``config.json`` of a complete checkpoint, with that of the thinker in ``thinker_config``."""

    def text_config(self, hf: HfConfig) -> HfConfig:
        """Return the keys that describe the text model."""
        return super().text_config(thinker_config(hf))

    def other_fields(self, hf: HfConfig) -> Values:
        """Return the fields of ``McaModelConfig`` that the text keys do not give."""
        return super().other_fields(thinker_config(hf))

    def update_text(self, hf: HfConfig, changes: Values) -> HfConfig:
        """Return ``hf`` with ``changes`` to its text keys."""
        return {**hf, THINKER_CONFIG: super().update_text(hf[THINKER_CONFIG], changes)}

    def compose(self, text: HfConfig, config: McaModelConfig) -> HfConfig:
        """Compose the file for ``config``, without a talker, from the keys ``text`` of its text model."""
        thinker = super().compose(text, config)
        outside = {key: thinker.pop(key) for key in ("architectures", "dtype", "model_type")}
        return {**outside, "enable_audio_output": False, THINKER_CONFIG: thinker}


def thinker_config(hf: HfConfig) -> JsonObject:
    """Return ``config.json`` of the thinker, in the dtype of the complete checkpoint."""
    dtype: JsonObject = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    return {"model_type": hf["model_type"], **as_object(hf, THINKER_CONFIG), **dtype}


def whole_family(
    thinker: Family, inside: NestedTextConfig, kind: str, architecture: str, spoken: tuple[str, ...]
) -> Family:
    """Return the family of complete checkpoints.

    Args:
        thinker: The family of the thinker.
        inside: How the thinker's ``config.json`` holds that of the text part.
        kind: HF's name of the family.
        architecture: The HF class.
        spoken: Beginnings of the names of what is not the thinker.
    """
    assert thinker.vision is not None, "a thinker has towers"
    spellings = tuple(
        Spelling(
            THINKER + each.text, THINKER + each.head, {own: THINKER + its for own, its in each.vision.items()}
        )
        for each in thinker.vision.spellings
    )
    settings = {name: getattr(inside, name) for name in inside.__dataclass_fields__}
    vision = replace(thinker.vision, spellings=spellings)
    whole = vision_language_family(kind, architecture, thinker.texts, vision, ThinkerConfig(**settings))

    def built(config: McaModelConfig) -> McaModelConfig:
        named = {"architectures": [thinker.architecture], "model_type": thinker.model_type}
        hf = {**thinker_config(config.hf_config), **named} if config.hf_config else {}
        return replace(config, model_type=thinker.model_type, hf_config=hf)

    return with_passthrough(whole, spoken, built)
