"""How a ``config.json`` says more than what the text model is, such as what stands beside it.

The families that do have their own `Nesting` in their files.
"""

from typing import Protocol

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values

QUANTISATION = "quantization_config"
"""The key that says how weights are quantised, which readers take as the truth of the weights beside it."""


def without_quantisation(hf: Values) -> JsonObject:
    """A ``config.json`` of weights that are not quantised; transformers looks at its top and into its text part."""
    plain = {key: value for key, value in hf.items() if key != QUANTISATION}
    text = plain.get("text_config")
    if isinstance(text, dict) and QUANTISATION in text:
        plain["text_config"] = {key: value for key, value in text.items() if key != QUANTISATION}
    return plain


class Nesting(Protocol):
    """How a ``config.json`` says more than what the text model is."""

    def text(self, hf: JsonObject) -> JsonObject:
        """What it says of the text model, as a file of its own would."""

    def beside(self, hf: JsonObject) -> Values:
        """Fields of ``McaModelConfig`` that tell the rest."""

    def changed(self, hf: JsonObject, changes: Values) -> JsonObject:
        """``hf`` with what it says of the text model changed."""

    def whole(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """The file for ``config``, whose text model ``text`` describes."""


class Plain:
    """A ``config.json`` that describes a text model and nothing else."""

    def text(self, hf: JsonObject) -> JsonObject:
        """See ``Nesting``."""
        return hf

    def beside(self, hf: JsonObject) -> Values:
        """See ``Nesting``."""
        return {}

    def changed(self, hf: JsonObject, changes: Values) -> JsonObject:
        """See ``Nesting``."""
        return {**hf, **changes}

    def whole(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """See ``Nesting``."""
        return text


PLAIN = Plain()
