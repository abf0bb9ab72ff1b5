"""Lenses between ``config.json`` and the fields of ``McaModelConfig``: one value reads and writes a fact.

A fact that is one key is a `config_table.Field`. A lens has facts that need several keys, or computation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mca_config.types import JsonObject, Values

HfConfig = JsonObject


def _write_nothing(values: Values) -> HfConfig:
    return {}


@dataclass(frozen=True)
class Lens:
    """A fact of ``config.json``, or several that depend on each other, in both directions.

    Args:
        read: Return the fields of ``McaModelConfig`` for the keys of ``config.json``.
        write: Return the keys for the fields by name; by default the other keys determine the fields.
    """

    read: Callable[[HfConfig], JsonObject]
    write: Callable[[Values], HfConfig] = _write_nothing


def is_moe_layer(values: Values, layer: int) -> bool:
    """Return whether decoder ``layer`` has experts."""
    flags = values["moe_layer_freq"]
    return values["num_moe_experts"] is not None and (flags is None or bool(flags[layer]))


def is_mamba_layer(values: Values, layer: int) -> bool:
    """Return whether decoder ``layer`` is a Mamba layer."""
    return bool(values["layer_types"] and values["layer_types"][layer] == "mamba")
