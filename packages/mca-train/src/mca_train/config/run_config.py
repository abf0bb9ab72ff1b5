"""`Settings`: the typed arguments of a run.

`mca_train.run.settings` reads them from the configuration file and the command line, `mca_train.run.rules` checks their
combination, and `mca_config.fields` converts values to the types of fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mca_config.errors import UsageError
from mca_config.types import JsonObject, Values
from mca_models.hub import Needed, is_hub_id, resolve_directory
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_DIRECTORIES: Mapping[str, Needed] = {
    "model_name_or_path": "all",
    "reference_model_name_or_path": "all",
    "adapter_name_or_path": "all",
    "tokenizer_name_or_path": "tokenizer",
}
"""Keys with a directory or the id of a Hub model, and the files of the model that they need."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a run.

    Args:
        training: HF's and Megatron's arguments.
        data: Model, tokenizer and files.
        launch: Local ranks.
        lora: The adapter.
        own: Arguments of the kind of run; None: it has none.
        values: Keys and values of the user, to construct ``training`` in another process.
        where: Name of the file, or of the file and the command line, for error messages.
    """

    training: "TrainingArguments"
    data: DataArguments
    launch: LaunchArguments
    lora: LoraArguments
    own: object
    values: Values
    where: str


def has_hub_ids(values: Values) -> bool:
    """Return True if a value is the id of a Hub model."""
    return any(isinstance(values.get(key), str) and is_hub_id(values[key]) for key in _DIRECTORIES)


def with_directories(values: Values, *, only: Needed = "all") -> JsonObject:
    """Return ``values`` with local directories for Hub ids.

    Args:
        values: Values of a configuration.
        only: Files of models to download; with ``config`` the ids of tokenizers are kept.

    Raises:
        UsageError: The Hub has no such model, denies access, or cannot be reached.
    """
    result = dict(values)
    for key, needed in _DIRECTORIES.items():
        name = values.get(key)
        if not isinstance(name, str) or not is_hub_id(name) or (only == "config" and needed == "tokenizer"):
            continue
        try:
            result[key] = str(resolve_directory(name, needed if only == "all" else only))
        except ValueError as error:
            raise UsageError(f"{key}: {error}") from error
    return result
