"""`Settings`: the configuration file and the command line of a run, as typed arguments.

`mca_train.run.checks` checks their combination.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments
from mca_train.config.fields import build
from mca_train.config.renamed_options import RENAMED
from mca_train.config.source import parse_overrides, read_yaml

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


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


def load_values(config: Path | None, overrides: list[str]) -> tuple[JsonObject, str]:
    """Return the file's values, overridden by the command line's, and the name of the two in an error."""
    words = parse_overrides(overrides)
    if config is None:
        return words, "the command line"
    return read_yaml(config) | words, f"{config}{' and the command line' if words else ''}"


def parse(
    values: Values,
    where: str,
    *,
    kind: str,
    data: type[DataArguments] = DataArguments,
    own: type | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    flags: Iterable[str] = (),
) -> Settings:
    """Convert ``values`` to arguments.

    Args:
        values: Keys and values.
        where: Origin of the values for error messages.
        kind: The word after ``mca-train``, whose help lists the keys.
        data: The class of model and files.
        own: The class of the arguments of this kind of run.
        elsewhere: Messages about the keys of other kinds, in addition to those of other programs.
        flags: Names of the command's flags that are not keys.

    Raises:
        UsageError: Keys or values are wrong.
    """
    from mca_config.training import TrainingArguments

    classes: list[type] = [TrainingArguments, data, LaunchArguments, LoraArguments]
    training, files, launch, lora, *others = build(
        [*classes, *([own] if own else [])],
        _for_this_machine(values),
        where=where,
        otherwise=f"mca-train {kind} --help lists the keys",
        only=["output_dir"],
        elsewhere={**RENAMED, **elsewhere},
        flags=flags,
    )
    return Settings(
        training=training,
        data=files,
        launch=launch,
        lora=lora,
        own=others[0] if others else None,
        values=values,
        where=where,
    )


def _for_this_machine(values: Values) -> JsonObject:
    """Return the keys and values for Hugging Face's arguments on this machine.

    The backend is removed, because Megatron creates the process groups. Without a GPU ``use_cpu`` is on; otherwise
    Hugging Face treats every rank as the only process.
    """
    from mca_models.megatron import platform

    arguments = {key: value for key, value in values.items() if key != "ddp_backend"}
    return arguments | ({"use_cpu": True} if platform.device_type() == "cpu" else {})
