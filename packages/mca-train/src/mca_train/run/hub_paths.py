"""Keys that name models of the Hub become directories here, before a run or a plan looks at them."""

from mca_config.errors import UsageError
from mca_config.types import JsonObject, Values
from mca_models.hub import Needed, directory_of, is_id

_KEYS = {
    "model_name_or_path": "all",
    "reference_model_name_or_path": "all",
    "adapter_name_or_path": "all",
    "tokenizer_name_or_path": "tokenizer",
}


def named_on_the_hub(values: Values) -> bool:
    """Whether a key names a model of the Hub."""
    return any(isinstance(values.get(key), str) and is_id(values[key]) for key in _KEYS)


def with_directories(values: Values, *, config_only: bool = False) -> JsonObject:
    """``values`` with directories for ids.

    Args:
        values: Of a configuration.
        config_only: Fetch what says which model it is, no weights and no tokenizer.

    Raises:
        UsageError: The Hub has no such model, refuses it, or cannot be reached.
    """
    found = dict(values)
    for key, needed in _KEYS.items():
        name = values.get(key)
        if not isinstance(name, str) or not is_id(name) or (config_only and needed == "tokenizer"):
            continue
        try:
            found[key] = str(directory_of(name, "config" if config_only else _needed(needed)))
        except ValueError as error:
            raise UsageError(f"{key}: {error}") from error
    return found


def _needed(word: str) -> Needed:
    return "tokenizer" if word == "tokenizer" else "all"
