"""Features: each changes Megatron's model where the configuration asks for it."""

from collections.abc import Callable
from dataclasses import dataclass

from mca_config.model_config import McaModelConfig
from mca_models.megatron.types import GptModel, Settings


def _no_settings(config: McaModelConfig) -> Settings:
    return {}


def _nothing(model: GptModel, config: McaModelConfig) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A change of Megatron's model that a section or a field of the configuration asks for.

    Args:
        name: Name for people.
        enabled: Whether the model has the feature.
        settings: Values of Megatron's ``TransformerConfig``.
        finish: Changes to a built chunk.
    """

    name: str
    enabled: Callable[[McaModelConfig], bool]
    settings: Callable[[McaModelConfig], Settings] = _no_settings
    finish: Callable[[GptModel, McaModelConfig], None] = _nothing
