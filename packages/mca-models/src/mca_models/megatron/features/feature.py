"""Features: each changes Megatron's model where the configuration asks for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mca_config.model_config import McaModelConfig
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import GptModel, Settings, Spec

SpecChange = Callable[[Spec], Spec]
ClassChange = Callable[[type], type]


@dataclass(frozen=True)
class Context:
    """Model that is being built.

    Args:
        config: Its configuration.
        implementation: Layer implementation.
    """

    config: McaModelConfig
    implementation: Implementation


@dataclass(frozen=True, kw_only=True)
class LayerContext(Context):
    """Layer that is being built.

    Args:
        layer: Its configuration.
        number: Number of a decoder layer, from 0; None: an MTP layer.
    """

    layer: McaModelConfig
    number: int | None

    @property
    def kind(self) -> str | None:
        """HF's layer type of a decoder layer."""
        kinds = self.config.layer_types
        return kinds[self.number] if kinds and self.number is not None else None


@dataclass(frozen=True)
class SpecChanges:
    """Changes of Megatron's layer spec.

    Args:
        fields: Changes of named fields, wherever they are in the spec.
        classes: Changes of module classes in other fields.
    """

    fields: Mapping[str, SpecChange] = field(default_factory=dict)
    classes: Mapping[type, ClassChange] = field(default_factory=dict)


def _no_settings(config: McaModelConfig) -> Settings:
    return {}


def _no_changes(context: Context) -> SpecChanges:
    return SpecChanges()


def _nothing(model: GptModel, config: McaModelConfig) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A change of Megatron's model that a section or a field of the configuration asks for.

    Args:
        name: Name for people.
        enabled: Whether the model has the feature.
        settings: Values of Megatron's ``TransformerConfig``.
        spec: Changes to the spec of all layers.
        layer: Changes to the spec of one layer, after those of all layers.
        router: Change to the class of the MoE router.
        finish: Changes to a built chunk.
    """

    name: str
    enabled: Callable[[McaModelConfig], bool]
    settings: Callable[[McaModelConfig], Settings] = _no_settings
    spec: Callable[[Context], SpecChanges] = _no_changes
    layer: Callable[[LayerContext], SpecChanges] = _no_changes
    router: Callable[[type, McaModelConfig], type] | None = None
    finish: Callable[[GptModel, McaModelConfig], None] = _nothing


def remove_module(module: Spec) -> Spec:
    """Return Megatron's module that passes its input on, in place of ``module``."""
    from megatron.core.transformer.identity_op import IdentityOp

    return IdentityOp


def change_self_attention(change: ClassChange) -> SpecChanges:
    """Return the ``change`` of Megatron's self-attention class."""
    from megatron.core.transformer.attention import SelfAttention

    return SpecChanges(classes={SelfAttention: change})


def change_moe_layer(change: ClassChange) -> SpecChanges:
    """Return the ``change`` of Megatron's MoE layer class."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return SpecChanges(classes={MoELayer: change})
