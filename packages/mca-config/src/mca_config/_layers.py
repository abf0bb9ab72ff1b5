"""Decoder layers of models whose layers differ: attention kind, shared KV, MLP width."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layer-dependent fields of a model's architecture."""

    num_layers: int
    """Decoder layers, multi-token-prediction layers not counted."""
    ffn_hidden_size: int
    """Width of the dense MLP (of one gate or up half)."""
    layer_types: tuple[str, ...] | None = None
    """HF's type of each decoder layer (``full_``, ``sliding_``, ``chunked_``, ``sparse_`` or ``linear_attention``), or
    ``mamba``; with ``single_blocks`` also ``mlp`` and ``moe``; None: all layers are equal (sliding if
    ``window_size``)."""
    of_kind: JsonObject | None = None
    """Overrides of fields by layer type (see ``layer_types``); None: there are none."""
    single_blocks: bool = False
    """Each decoder layer is attention alone, or an MLP alone, after one norm."""
    num_kv_shared_layers: int = 0
    """Number of last layers with shared KV: each uses the keys and values of the last earlier layer of its type that
    projects its own."""
    double_wide_mlp: bool = False
    """Layers with shared KV have an MLP of twice the width."""
    takes_keys: bool = False
    """This is the configuration of a layer with shared KV (see :meth:`layer_config`), which projects only queries."""

    def layer_config(self, layer: int) -> Self:
        """Return this configuration with the fields of decoder ``layer``."""
        kind = self._kind(layer), self.kv_source_layer(layer) is not None
        if kind not in self._by_kind:
            self._by_kind[kind] = self._make_layer_config(*kind)
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> dict[tuple[str | None, bool], Self]:
        """Cache of :meth:`layer_config`, which runs for every parameter and whose results check all fields."""
        return {}

    def _make_layer_config(self, kind: str | None, takes_keys: bool) -> Self:
        changes = {**((self.of_kind or {}).get(kind or "") or {})}
        if takes_keys:
            changes |= {"takes_keys": True, "double_wide_mlp": False}
            changes |= {"ffn_hidden_size": self.ffn_hidden_size * (2 if self.double_wide_mlp else 1)}
        return replace(self, of_kind=None, **changes) if changes else self

    def kinds(self) -> list[Self]:
        """Return one configuration for each distinct kind of layer."""
        if not (self.of_kind and self.layer_types) and not self.num_kv_shared_layers:
            return [self]
        first: dict[tuple[str | None, bool], int] = {}
        for layer in range(self.num_layers):
            first.setdefault((self._kind(layer), self.kv_source_layer(layer) is not None), layer)
        return [self.layer_config(layer) for layer in first.values()]

    def kv_source_layer(self, layer: int) -> int | None:
        """Return the decoder layer whose keys and values ``layer`` shares; None: it projects its own."""
        first_shared = self.num_layers - self.num_kv_shared_layers
        if layer < first_shared:
            return None
        return max(other for other in range(first_shared) if self._kind(other) == self._kind(layer))

    def is_linear_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has linear attention (a gated delta net)."""
        return self._kind(layer) == "linear_attention"

    def is_mamba_layer(self, layer: int) -> bool:
        """Return whether decoder ``layer`` is a Mamba layer."""
        return self._kind(layer) == "mamba"

    def has_attention(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has attention, or a replacement for it (linear attention, Mamba)."""
        return not self.single_blocks or self._kind(layer) not in ("mlp", "moe")

    def has_mlp(self, layer: int) -> bool:
        """Return whether decoder ``layer`` has an MLP, dense or MoE."""
        return not self.single_blocks or not self.has_attention(layer)

    def _kind(self, layer: int) -> str | None:
        return self.layer_types[layer] if self.layer_types else None
