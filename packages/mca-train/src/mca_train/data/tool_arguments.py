"""Removal of nulls in tool-call arguments that come from keys of other rows.

In a column of Arrow structs, every row has the keys of all rows, null where the row lacks them. JSON columns keep the
original nulls.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mca_config.types import JsonObject, Typed, Values

if TYPE_CHECKING:
    import datasets

_ARGUMENTS = "arguments"


def json_features(features: "datasets.Features | None") -> "datasets.Features | None":
    """Return ``features`` with arguments as JSON; None: no change is needed, or `datasets` does not support it."""
    import datasets

    if features is None or not hasattr(datasets, "Json") or not _struct_columns(features):
        return None
    return datasets.Features({name: _as_json(feature) for name, feature in features.items()})


def null_filter(features: Mapping[str, Typed] | None) -> Callable[[Values], JsonObject] | None:
    """Return the function that removes nulls of other rows' keys from arguments; None: there are no such columns."""
    columns = _struct_columns(features or {})

    def drop_nulls(row: Values) -> JsonObject:
        return {
            **row,
            **{name: _drop_nulls(row[name], columns[name]) for name in columns.keys() & row.keys()},
        }

    return drop_nulls if columns else None


def _struct_columns(features: Mapping[str, Typed]) -> dict[str, Typed]:
    """Return the columns with arguments as structs."""
    return {name: feature for name, feature in features.items() if _has_structs(feature)}


def _has_structs(feature: Typed) -> bool:
    if isinstance(feature, dict):
        return isinstance(feature.get(_ARGUMENTS), dict) or any(map(_has_structs, feature.values()))
    return (item := _item(feature)) is not None and _has_structs(item)


def _item(feature: Typed) -> Typed | None:
    """Return the feature of a list's items; None: the feature is not a list."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _as_json(feature: Typed) -> Typed:
    import datasets

    if isinstance(feature, dict):
        return {
            key: datasets.Json() if key == _ARGUMENTS and isinstance(value, dict) else _as_json(value)
            for key, value in feature.items()
        }
    item = _item(feature) if _has_structs(feature) else None
    return feature if item is None else datasets.List(_as_json(item))


def _drop_nulls(value: Typed, feature: Typed, *, inside: bool = False) -> Typed:
    if isinstance(value, list) and (item := _item(feature)) is not None:
        return [_drop_nulls(each, item, inside=inside) for each in value]
    if not isinstance(value, dict) or not isinstance(feature, dict):
        return value
    return {
        key: _drop_nulls(each, feature.get(key), inside=inside or key == _ARGUMENTS)
        for key, each in value.items()
        if not (inside and each is None)
    }
