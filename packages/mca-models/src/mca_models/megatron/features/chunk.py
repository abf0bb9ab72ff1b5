"""Settings of Megatron's ``TransformerConfig``, building and finishing of a chunk: loops over the model's features.

Common settings are in `factory.transformer_config`, layer specs in `spec`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mca_config.model_config import McaModelConfig
from mca_models.megatron.features.feature import Context
from mca_models.megatron.features.features import active_features
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import GptModel, MegatronConfig, Settings


def settings(config: McaModelConfig) -> Settings:
    """Return the settings of the architecture."""
    chosen: Settings = {}
    for feature in active_features(config):
        chosen |= feature.settings(config)
    return chosen


def positions(config: McaModelConfig) -> str:
    """Return Megatron's ``position_embedding_type``."""
    chosen = "rope"
    for feature in active_features(config):
        chosen = feature.position_embedding or chosen
    return chosen


@contextmanager
def building(
    config: McaModelConfig, megatron: MegatronConfig, implementation: Implementation
) -> Iterator[None]:
    """Prepare all features for Megatron's construction of a chunk, in this block."""
    with ExitStack() as stack:
        for feature in active_features(config):
            stack.enter_context(feature.prepare(Context(config, implementation), megatron))
        yield


def finish(model: GptModel, config: McaModelConfig) -> None:
    """Apply the features of a model to a built chunk; runs before anything else hooks its logits."""
    for feature in active_features(config):
        feature.finish(model, config)
