"""Composite ``config.json`` files, which hold the keys of a text model and others.

`vision_tower` implements the protocol for vision-language models.
"""

from typing import Protocol

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values

QUANTIZATION = "quantization_config"
"""Key of the quantisation of the stored weights, which all readers trust."""


def without_quantization(hf: Values) -> JsonObject:
    """A ``config.json`` of weights that are not quantised; transformers looks at its top and into its text part."""
    plain = {key: value for key, value in hf.items() if key != QUANTIZATION}
    text = plain.get("text_config")
    if isinstance(text, dict) and QUANTIZATION in text:
        plain["text_config"] = {key: value for key, value in text.items() if key != QUANTIZATION}
    return plain


class CompositeConfig(Protocol):
    """Layout of a ``config.json`` that holds the keys of a text model and others."""

    def text_config(self, hf: JsonObject) -> JsonObject:
        """Return the keys of the text model, as in a text-only file."""

    def other_fields(self, hf: JsonObject) -> Values:
        """Return the fields of ``McaModelConfig`` that the other keys give."""

    def update_text(self, hf: JsonObject, changes: Values) -> JsonObject:
        """Return ``hf`` with ``changes`` to its text keys."""

    def compose(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """Compose the file for ``config`` from the keys ``text`` of its text model."""


class TextOnlyConfig:
    """A ``config.json`` that describes a text model and nothing else."""

    def text_config(self, hf: JsonObject) -> JsonObject:
        """Return the keys that describe the text model."""
        return hf

    def other_fields(self, hf: JsonObject) -> Values:
        """Return the fields of ``McaModelConfig`` that the text keys do not give."""
        return {}

    def update_text(self, hf: JsonObject, changes: Values) -> JsonObject:
        """Return ``hf`` with ``changes`` to its text keys."""
        return {**hf, **changes}

    def compose(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """Compose the file for ``config`` from the keys ``text`` of its text model."""
        return text


TEXT_ONLY = TextOnlyConfig()
