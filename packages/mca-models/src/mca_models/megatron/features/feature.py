"""Features: each changes Megatron's model where the configuration asks for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.megatron import platform
from mca_models.megatron.layers.attention import CoreAttention
from mca_models.megatron.names import Implementation
from mca_models.megatron.types import GptModel, MegatronConfig, Settings, Spec

SpecChange = Callable[[Spec], Spec]
ClassChange = Callable[[type], type]
CoreChange = Callable[[type[CoreAttention], McaModelConfig], type[CoreAttention]]
RouterChange = Callable[[type, McaModelConfig], type]
Start = Callable[[str, tuple[int, ...], int], Tensor | None]
Version = tuple[int, ...]
FIXED_IN_0_17: Version = (0, 17)


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


Prepare = Callable[[Context, MegatronConfig], AbstractContextManager[None]]


@dataclass(frozen=True)
class SpecChanges:
    """Changes of Megatron's layer spec.

    Args:
        fields: Changes of named fields, wherever they are in the spec.
        classes: Changes of module classes in other fields.
    """

    fields: Mapping[str, SpecChange] = field(default_factory=dict)
    classes: Mapping[type, ClassChange] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, settings and machine, which are checked before anything is built.

    Args:
        config: The model.
        features: Its features.
        layout: The parallel sizes.
        settings: Arguments of Megatron's ``TransformerConfig``.
        implementation: Layer implementation.
        device: ``cpu`` or ``cuda``.
        version: Version of megatron-core.
        engine: Version of Transformer Engine; None: not installed.
        packed: Whether rows have several sequences.
    """

    config: McaModelConfig
    features: Sequence["Feature"]
    layout: ParallelLayout
    settings: Values
    implementation: Implementation
    device: str = field(default_factory=lambda: platform.device_type())
    version: Version = field(default_factory=lambda: platform.megatron_version())
    engine: Version | None = field(default_factory=lambda: platform.engine_version())
    packed: bool = False

    @property
    def custom_attention(self) -> bool:
        """No kernel computes the model's attention."""
        return any(feature.core_attention is not None for feature in self.features)

    @property
    def mca_attention(self) -> bool:
        """Layers, arguments or the model choose mca's core attention."""
        backend = self.settings.get("attention_backend")
        chosen = backend is not None and getattr(backend, "name", backend) == "local"
        return chosen or self.implementation == "local" or self.custom_attention

    @property
    def custom_router(self) -> bool:
        """The router differs from Megatron's."""
        return any(feature.router is not None for feature in self.features)

    def recomputes(self, module: str) -> bool:
        """Return whether ``module`` alone is recomputed."""
        modules = self.settings.get("recompute_modules") or ["core_attn"]
        return self.settings.get("recompute_granularity") == "selective" and module in modules


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A change of Megatron's model that a section or a field of the configuration asks for.

    Args:
        name: Name for people.
        enabled: Whether the model has the feature.
        settings: Values of Megatron's ``TransformerConfig``.
        sequence_parallel: Whether the model needs sequence parallelism at tp above 1, always or to be trained.
        problems: Reasons why a setup with the feature is computed wrongly or not at all.
        spec: Changes to the spec of all layers.
        layer: Changes to the spec of one layer, after those of all layers.
        core_attention: Change to the class of mca's core attention, which then computes attention for both layer
            implementations; None: the model needs none.
        router: Change to the class of the MoE router; None: the model needs none.
        position_embedding: Megatron's ``position_embedding_type`` of the model; None: RoPE.
        prepare: Context in which Megatron builds a chunk.
        finish: Changes to a built chunk.
        start: Initial values of a parameter, by its name, its full shape and the seed; None: as for other parameters.
    """

    name: str
    enabled: Callable[[McaModelConfig], bool]
    settings: Callable[[McaModelConfig], Settings] = field(default=lambda config: {})
    sequence_parallel: Literal["always", "trained"] | None = None
    problems: Callable[[Setup], Iterator[str]] = field(default=lambda setup: iter(()))
    spec: Callable[[Context], SpecChanges] = field(default=lambda context: SpecChanges())
    layer: Callable[[LayerContext], SpecChanges] = field(default=lambda context: SpecChanges())
    core_attention: CoreChange | None = None
    router: RouterChange | None = None
    position_embedding: str | None = None
    prepare: Prepare = field(default=lambda context, megatron: nullcontext())
    finish: Callable[[GptModel, McaModelConfig], None] = field(default=lambda model, config: None)
    start: Start | None = None


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


def norm_recompute_problems(setup: Setup) -> Iterator[str]:
    """Report recomputation of norms before parallel blocks, whose input is another block's."""
    if setup.recomputes("layernorm"):
        yield (
            "norms cannot be recomputed alone if attention and MLP, or MLP and experts, are parallel; "
            "remove layernorm from recompute_modules, or set recompute_granularity to full"
        )


def shared_expert_overlap_problems(setup: Setup) -> Iterator[str]:
    """Report overlap of an MLP that is parallel to experts, for which Megatron takes it for shared experts."""
    if setup.settings.get("moe_shared_expert_overlap"):
        yield (
            "moe_shared_expert_overlap skips the norms of an MLP parallel to experts, or adds both outputs at once; "
            "remove moe_shared_expert_overlap"
        )
