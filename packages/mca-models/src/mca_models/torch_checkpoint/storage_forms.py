"""Names and shapes under which a parameter may be stored in a checkpoint of Megatron, or named in its live modules.

Tensors have global shapes, independent of the ranks that wrote them: [gate, up] of a gated MLP is one gate and one up
over all tensor ranks, the vocabulary is padded, a tied output layer is not stored. One parameter has
several possible names, according to how Megatron was configured when it saved:

- ``decoder.layers.7.X``, or ``decoder.layers.X`` with a leading axis of layers (all layers alike);
- experts: ``mlp.experts.experts.linear_fc1.weight`` with a leading axis of experts (after that of layers),
  or ``mlp.experts.experts.3.linear_fc1.weight``;
- gated MLPs: one tensor, or its halves ``weight_w`` (gate) and ``weight_v`` (up);
- gated delta net: the projections' parts, ``in_proj.weight.query``, ``.key``, ``.value``, ``.z``, ..., of Kimi's
  the first three and ``.beta``, or ``.write``, ``.decay`` and ``.gate``;
  state space layers: ``in_proj.weight.z``, ``.x``, ``.B``, ``.C``, ``.dt``;
- norms: Transformer Engine's spelling; but the local spec calls the norm before any MLP
  ``mlp.linear_fc1.layer_norm_weight`` and that before any attention ``...linear_qkv.layer_norm_weight``,
  experts and gated delta net included.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.storage.lazy_tensor import Shape
from mca_models.templates.live_names import (
    LOCAL_NORMS,
    SEQUENTIAL_EXPERTS,
    is_in_chunk,
    live_name,
    local_experts,
    renamed_mtp_layer,
)
from mca_models.weights import Param, Stage

_SPELLINGS = {
    **LOCAL_NORMS,
    **SEQUENTIAL_EXPERTS,
    **renamed_mtp_layer("mtp_model_layer"),  # megatron-core 0.17 and later; the checkpoints kept the old name
}

_GROUPED = {
    "mlp.experts.linear_fc1.weight{expert}": "mlp.experts.weight1",
    "mlp.experts.linear_fc2.weight{expert}": "mlp.experts.weight2",
}


class NameVariant(NamedTuple):
    """One name that a parameter may have in a file."""

    name: str
    expert: int | None = None
    """Index of the expert, from 0, if one tensor holds all experts of a rank."""


@dataclass(frozen=True)
class NamedParam:
    """A parameter that a chunk's file holds.

    Args:
        param: Its rule, with global layer and expert.
        names: What it may be called.
        optional: A second copy of a parameter; it may be missing.
    """

    param: Param
    names: tuple[NameVariant, ...]
    optional: bool = False


def named_params(
    params: list[Param], config: McaModelConfig, chunk: PipelineChunk, ep: int
) -> Iterator[NamedParam]:
    """Yield the parameters of ``chunk`` on expert rank ``ep``, as every tensor rank names them."""
    mine = local_experts(config, config.layout, ep)
    for param in params:
        if param.expert is not None and param.expert not in mine:
            continue
        copy = _is_copy(param, chunk)
        if copy or (param.alias_of is None and is_in_chunk(param, config, chunk)):
            yield NamedParam(param, tuple(_names(param, chunk, mine)), optional=copy)


def _is_copy(param: Param, chunk: PipelineChunk) -> bool:
    """Return whether ``chunk`` may hold a copy of ``param``: an embedding for MTP layers, or a tied head."""
    if param.stage is Stage.FIRST:
        return not chunk.has_embedding and (bool(chunk.mtp_layers) or chunk.has_loss)
    return param.alias_of is not None and chunk.has_loss


def name_variants(mca: str) -> list[str]:
    """The canonical name template ``mca`` and every other spelling of it, the canonical one first."""
    found = [mca]
    for canonical, other in _SPELLINGS.items():
        found += [name.replace(canonical, other) for name in found if canonical in name]
    return found


def _names(param: Param, chunk: PipelineChunk, experts: range) -> Iterator[NameVariant]:
    for template in name_variants(param.mca):
        yield NameVariant(live_name(param, template, chunk, experts))
    for canonical, other in _GROUPED.items():
        if canonical in param.mca and param.expert is not None:
            for template in name_variants(param.mca.replace(canonical, other)):
                yield NameVariant(live_name(param, template, chunk, experts), param.expert - experts.start)


_FUSED_NORMS = (
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
)

_EXPERT_FORMS = (
    (".mlp.experts.linear_fc{n}.{kind}{{expert}}", ".mlp.experts.experts.linear_fc{n}.{kind}", True),
    (
        ".mlp.experts.linear_fc{n}.{kind}{{expert}}",
        ".mlp.experts.experts.{{expert}}.linear_fc{n}.{kind}",
        False,
    ),
)

_LAYERS = "decoder.layers.{layer}."

_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (".in_proj.weight", (".query", ".key", ".value", ".z", ".beta", ".alpha")),
    (".conv1d.weight", (".query", ".key", ".value")),
    (".in_proj.weight", (".query", ".key", ".value", ".beta")),
    (".in_proj.weight", (".query", ".key", ".value", ".write", ".decay", ".gate")),
    (".in_proj.weight", (".gate_in", ".gate_out", ".inputs")),
    (".in_proj.weight", (".qkv", ".gate")),
    (".in_proj.weight", (".scanned", ".gate")),
    (".in_proj.weight", (".z", ".x", ".B", ".C", ".dt")),
    *((f".conv1d.{kind}", (".x", ".B", ".C")) for kind in ("weight", "bias")),
)

Index = tuple[int, ...]


@dataclass(frozen=True)
class StorageForm:
    """One way in which a parameter may be stored.

    Args:
        keys: The tensors that make it up, one below the other.
        index: Its entry in their leading axes.
        sizes: Which sizes these axes must have.
    """

    keys: tuple[str, ...]
    index: Index
    sizes: Shape


def storage_forms(param: Param, config: McaModelConfig) -> Iterator[StorageForm]:
    """Every way in which ``param`` may be stored."""
    layer, expert = param.layer, param.expert
    for templates, layer_axis, expert_axis in _templates(param.mca, expert is not None, param.shard.segments):
        keys = tuple(template.format(layer=layer, expert=expert) for template in templates)
        axes: list[tuple[int | None, int | None]] = [(layer, config.num_layers)] if layer_axis else []
        axes += [(expert, config.num_experts)] if expert_axis else []
        found = [(at, size) for at, size in axes if at is not None and size is not None]
        yield StorageForm(keys, tuple(at for at, _ in found), tuple(size for _, size in found))


@lru_cache(maxsize=1024)
def _templates(
    mca: str, is_expert: bool, segments: tuple[int, ...]
) -> tuple[tuple[tuple[str, ...], bool, bool], ...]:
    """The forms of a rule's name: tensors, whether all layers are in one, whether all experts are."""
    return tuple(
        (tuple(template + part for part in parts), layer_axis, expert_axis)
        for name in global_spellings(mca)
        for of_expert, expert_axis in _expert_forms(name, is_expert)
        for template, layer_axis in _layer_forms(of_expert)
        for parts in _parts(mca, segments)
    )


def _parts(mca: str, segments: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the suffixes of the tensors that make up the name ``mca``."""
    yield ("",)
    if segments == (1, 1):
        yield "_w", "_v"
    for tail, parts in _PARTS:
        if mca.endswith(tail):
            yield parts


def global_spellings(mca: str) -> list[str]:
    """The canonical name ``mca`` and every other that a distributed checkpoint may have for it."""
    names = name_variants(mca)
    fused = [name.replace(own, other) for own, other in _FUSED_NORMS for name in names if own in name]
    return [*names, *(name for name in fused if name not in names)]


def _expert_forms(name: str, is_expert: bool) -> Iterator[tuple[str, bool]]:
    """Yield ``name`` as an expert's, and whether its tensor holds all experts."""
    if not is_expert:
        yield name, False
        return
    for (own, other, axis), number, kind in product(_EXPERT_FORMS, (1, 2), ("weight", "bias")):
        canonical = own.format(n=number, kind=kind)
        if name.endswith(canonical):
            yield name.replace(canonical, other.format(n=number, kind=kind)), axis


def _layer_forms(name: str) -> Iterator[tuple[str, bool]]:
    """Yield ``name`` as a layer's, and whether its tensor holds all layers."""
    yield name, False
    if name.startswith(_LAYERS):
        yield name.replace(_LAYERS, "decoder.layers."), True
