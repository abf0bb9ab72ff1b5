"""Shared KV: the last layers use the keys and values of earlier layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from mca_config.model.section import Layers, ModelSizes, Section


@dataclass(frozen=True, kw_only=True)
class SharedKv(Section):
    """Layers with shared KV."""

    num_kv_shared_layers: Layers
    """Number of last layers with shared KV: each uses the keys and values of the last earlier layer of its type that
    projects its own."""
    double_wide_mlp: bool = False
    """Layers with shared KV have an MLP of twice the width."""
    accepts_keys: bool = False
    """This is the configuration of a layer with shared KV (see ``layer_config``), which projects only queries."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield a layer type whose keys no earlier layer projects."""
        layers, shared = model.num_layers, self.num_kv_shared_layers
        first = max(layers - shared, 0)
        kinds = model.layer_types or ("attention",) * layers
        if missing := sorted({*kinds[first:]} - {*kinds[:first]}):
            yield (
                f"num_kv_shared_layers {shared} of {layers} leaves no layer of type {missing[0]} whose keys and values "
                "the last layers could share; lower it"
            )
