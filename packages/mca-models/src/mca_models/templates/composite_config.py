"""How a ``config.json`` says more than what the text model is, such as what stands beside it.

The families that do have their own `CompositeConfig` in their files.
"""

from typing import Protocol

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values

QUANTIZATION = "quantization_config"
"""The key that says how weights are quantised, which readers take as the truth of the weights beside it."""


def without_quantization(hf: Values) -> JsonObject:
    """A ``config.json`` of weights that are not quantised; transformers looks at its top and into its text part."""
    plain = {key: value for key, value in hf.items() if key != QUANTIZATION}
    text = plain.get("text_config")
    if isinstance(text, dict) and QUANTIZATION in text:
        plain["text_config"] = {key: value for key, value in text.items() if key != QUANTIZATION}
    return plain


class CompositeConfig(Protocol):
    """How a ``config.json`` says more than what the text model is."""

    def text_config(self, hf: JsonObject) -> JsonObject:
        """What it says of the text model, as a file of its own would."""

    def other_fields(self, hf: JsonObject) -> Values:
        """Fields of ``McaModelConfig`` that tell the rest."""

    def update_text(self, hf: JsonObject, changes: Values) -> JsonObject:
        """``hf`` with what it says of the text model changed."""

    def compose(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """The file for ``config``, whose text model ``text`` describes."""


class TextOnlyConfig:
    """A ``config.json`` that describes a text model and nothing else."""

    def text_config(self, hf: JsonObject) -> JsonObject:
        """See ``CompositeConfig``."""
        return hf

    def other_fields(self, hf: JsonObject) -> Values:
        """See ``CompositeConfig``."""
        return {}

    def update_text(self, hf: JsonObject, changes: Values) -> JsonObject:
        """See ``CompositeConfig``."""
        return {**hf, **changes}

    def compose(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """See ``CompositeConfig``."""
        return text


TEXT_ONLY = TextOnlyConfig()
