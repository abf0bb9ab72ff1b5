"""What each decoder layer of a model is, where they are not all alike."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from mca_config.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The decoder layers of a model; of an architecture the part that says which is which."""

    num_layers: int
    """Decoder layers, multi-token-prediction layers not counted."""
    ffn_hidden_size: int
    """Width of the dense MLP (of one gate or up half)."""
    layer_types: tuple[str, ...] | None = None
    """HF's kind of each decoder layer (``full_``, ``sliding_``, ``chunked_``, ``sparse_`` or ``linear_attention``), or
    ``mamba``; of ``single_blocks`` also ``mlp`` and ``moe``; None: all alike (sliding if ``window_size``)."""
    of_kind: JsonObject | None = None
    """What layers of a kind (see ``layer_types``) have otherwise, by names of fields; None: nothing."""
    single_blocks: bool = False
    """A decoder layer is attention alone, or an MLP alone, after one norm."""
    num_kv_shared_layers: int = 0
    """So many last layers take the keys and values of the last layer of their kind before all of them."""
    double_wide_mlp: bool = False
    """Those have an MLP twice as wide."""
    takes_keys: bool = False
    """It is one of those layers (see :meth:`of_layer`): queries alone are projected."""

    def of_layer(self, layer: int) -> Self:
        """This model, as its decoder ``layer`` is."""
        kind = self._kind(layer), self.keys_from(layer) is not None
        if kind not in self._by_kind:
            self._by_kind[kind] = self._of_kind(*kind)
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> dict[tuple[str | None, bool], Self]:
        """What :meth:`of_layer` gave: it is asked for every parameter, and checks all fields of what it makes."""
        return {}

    def _of_kind(self, kind: str | None, takes_keys: bool) -> Self:
        own = {**((self.of_kind or {}).get(kind or "") or {})}
        if takes_keys:
            own |= {"takes_keys": True, "double_wide_mlp": False}
            own |= {"ffn_hidden_size": self.ffn_hidden_size * (2 if self.double_wide_mlp else 1)}
        return replace(self, of_kind=None, **own) if own else self

    def kinds(self) -> list[Self]:
        """This model as its layers of each kind are."""
        if not (self.of_kind and self.layer_types) and not self.num_kv_shared_layers:
            return [self]
        first: dict[tuple[str | None, bool], int] = {}
        for layer in range(self.num_layers):
            first.setdefault((self._kind(layer), self.keys_from(layer) is not None), layer)
        return [self.of_layer(layer) for layer in first.values()]

    def keys_from(self, layer: int) -> int | None:
        """The decoder layer whose keys and values ``layer`` takes; None: it has its own."""
        own = self.num_layers - self.num_kv_shared_layers
        if layer < own:
            return None
        return max(before for before in range(own) if self._kind(before) == self._kind(layer))

    def is_linear_layer(self, layer: int) -> bool:
        """Whether decoder ``layer`` has linear attention (a gated delta net)."""
        return self._kind(layer) == "linear_attention"

    def is_mamba_layer(self, layer: int) -> bool:
        """Whether decoder ``layer`` is a state space model."""
        return self._kind(layer) == "mamba"

    def has_attention(self, layer: int) -> bool:
        """Whether decoder ``layer`` has attention, or what stands in its place."""
        return not self.single_blocks or self._kind(layer) not in ("mlp", "moe")

    def has_mlp(self, layer: int) -> bool:
        """Whether decoder ``layer`` has an MLP, dense or of experts."""
        return not self.single_blocks or not self.has_attention(layer)

    def _kind(self, layer: int) -> str | None:
        return self.layer_types[layer] if self.layer_types else None
