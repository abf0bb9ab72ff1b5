"""Replacement of Hub ids in a configuration by local directories."""

from collections.abc import Mapping

from mca_config.errors import UsageError
from mca_config.types import JsonObject, Values
from mca_models.hub import Needed, is_hub_id, resolve_directory

_KEYS: Mapping[str, Needed] = {
    "model_name_or_path": "all",
    "reference_model_name_or_path": "all",
    "adapter_name_or_path": "all",
    "tokenizer_name_or_path": "tokenizer",
}


def has_hub_ids(values: Values) -> bool:
    """Return whether a value is the id of a Hub model."""
    return any(isinstance(values.get(key), str) and is_hub_id(values[key]) for key in _KEYS)


def with_directories(values: Values, *, only: Needed = "all") -> JsonObject:
    """Return ``values`` with local directories for Hub ids.

    Args:
        values: Values of a configuration.
        only: Files of models to download; with ``config`` the ids of tokenizers are kept.

    Raises:
        UsageError: The Hub has no such model, denies access, or cannot be reached.
    """
    result = dict(values)
    for key, needed in _KEYS.items():
        name = values.get(key)
        if not isinstance(name, str) or not is_hub_id(name) or (only == "config" and needed == "tokenizer"):
            continue
        try:
            result[key] = str(resolve_directory(name, needed if only == "all" else only))
        except ValueError as error:
            raise UsageError(f"{key}: {error}") from error
    return result
