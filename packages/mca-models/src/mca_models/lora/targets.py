"""HF modules that can carry an adapter, with the Megatron linear of each.

Derived from the rules of the base model, so a new family needs nothing here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_tower import PREFIX
from mca_models.weights import Param, Stage
from mca_models.weights.layouts import Layout, Transposed

_LINEARS = frozenset(
    "linear_qkv linear_proj linear_fc1 linear_fc2 linear_q_proj linear_q_down_proj linear_q_up_proj "
    "linear_kv_down_proj linear_kv_up_proj linear_head_gate in_proj out_proj x_proj gates_down fade_up gate_up "
    "fc1_latent_proj fc2_latent_proj per_layer_gate per_layer_projection".split()
)
"""Megatron modules that are linears in HF models too."""
_RENAMED = (".shared_experts.", ".self_attention.")
"""Parts of the names of linears that files name differently from modules."""
UNSAVED = (Stage.MTP, Stage.VISION, Stage.PASSTHROUGH)
"""Whose parameters are not saved whole."""
_TABLES = ("pos_embed", "position_embedding", "embeddings_table")
"""Modules of vision models that are embeddings."""


@dataclass(frozen=True)
class Target:
    """One HF module (or stacked expert parameter) that can carry an adapter.

    Args:
        module: Its name in the HF model.
        base: The rule of the Megatron weight that it is part of.
        part: Which of ``base.hf`` it is.
        linear: Whether ``all-linear`` means it: not the output layer, and in transformers 5 neither routers nor
            routed experts, which are bare parameters there.
        stacked: A parameter with a leading expert axis, of which this is entry ``base.expert``.
    """

    module: str
    base: Param
    part: int
    linear: bool = True
    stacked: bool = False

    @property
    def label(self) -> str:
        """The last word of its HF name: which part of the fused linear it is."""
        return self.module.rpartition(".")[2]

    @property
    def is_unfused(self) -> bool:
        """Return whether the Megatron weight has no other part."""
        return len(self.base.hf) == 1

    @property
    def is_vision(self) -> bool:
        """Return whether it belongs to the vision model: HF's own module, replicated on each tensor rank."""
        return self.base.stage is Stage.VISION

    @property
    def is_router(self) -> bool:
        """Return whether it is a router, which is no linear in most HF models."""
        return self.base.mca.endswith(".router.weight")

    @property
    def transposed(self) -> bool:
        """Return whether the HF tensor is ``[in, out]``."""
        return isinstance(self.base.hf_layout, Transposed)

    @property
    def row_layout(self) -> Layout:
        """Layout of the rows of PEFT's lora_B in those of the Megatron weight."""
        layout = self.base.hf_layout
        return layout.inside if isinstance(layout, Transposed) else layout


def linear_targets(config: McaModelConfig) -> list[Target]:
    """All modules of the HF model that can be named in ``target_modules``, in checkpoint order.

    Each routed expert appears as its own modules, as files and transformers 4 name them.
    MTP layers are not part of HF models.
    """
    params = get_family(config.model_type).params
    loaded = {param.mca_name(): param for param in params(_with_experts(config, fused=True))}
    shared = (
        loaded[param.mca_name()] if any(place in param.mca for place in _RENAMED) else param
        for param in params(_with_experts(config, fused=False))
    )
    return [
        target
        for param in shared
        for target in (*_linear_module_targets(param), *_vision_targets(param, config))
    ]


def stacked_targets(config: McaModelConfig) -> list[Target]:
    """The stacked expert parameters that can be named in ``target_parameters``, expert by expert."""
    family = get_family(config.model_type)
    config = _with_experts(config, fused=True)
    return [
        _stacked(param)
        for param in family.params(config)
        if param.stacked and param.stage is not Stage.MTP and param.mca.endswith(".weight{expert}")
    ]


def _with_experts(config: McaModelConfig, *, fused: bool) -> McaModelConfig:
    config = get_family(config.model_type).with_module_names(config)
    if bool(config.extra.get("fused_experts")) == fused:
        return config
    return replace(config, extra={**config.extra, "fused_experts": fused})


def _linear_module_targets(param: Param) -> Iterator[Target]:
    owner, _, leaf = param.mca.rpartition(".")
    kind = owner.rpartition(".")[2]
    head, router, gate = kind == "output_layer", kind == "router", leaf == "gate_weight"
    weight = leaf in ("weight", "weight{expert}") and (kind in _LINEARS or head or router)
    if param.stage in UNSAVED or param.alias_of or param.stacked or not (weight or gate):
        return
    for part, name in enumerate(param.hf_names()):
        linear = not (head or router or param.expert is not None)
        yield Target(name.removesuffix(".weight"), param, part, linear)


def _vision_targets(param: Param, config: McaModelConfig) -> Iterator[Target]:
    """A linear of the vision model: what has a weight of two axes and is no table."""
    vision = get_family(config.model_type).vision
    if vision is None or param.stage is not Stage.VISION or len(param.shape or ()) != 2 or len(param.hf) > 1:
        return
    owner, _, leaf = param.mca.rpartition(".")
    if (
        leaf == "weight"
        and not owner.endswith(_TABLES)
        and vision.component(f"{owner.removeprefix(PREFIX)}.", config) != "unused"
    ):
        yield Target(param.hf_names()[0].removesuffix(".weight"), param, 0)


def named_params(config: McaModelConfig) -> list[Param]:
    """Return the parameters of the model, by the names that its modules have."""
    family = get_family(config.model_type)
    return family.params(family.with_module_names(config))


def unused_modules(config: McaModelConfig) -> frozenset[str]:
    """Return PEFT's names of the tower's linears on which no feature depends, such as a last layer of LLaVA."""
    if (vision := get_family(config.model_type).vision) is None:
        return frozenset()
    return frozenset(
        param.hf_names()[0].removesuffix(".weight")
        for param in named_params(config)
        if param.stage is Stage.VISION
        and len(param.shape or ()) == 2
        and vision.component(param.mca.removeprefix(PREFIX), config) == "unused"
    )


def _stacked(param: Param) -> Target:
    return Target(param.hf_names()[0], param, 0, linear=False, stacked=True)
