"""`Settings` are a run as the user wrote it: the configuration file and the command line, as typed arguments.

Whether the arguments make sense together is not decided here but in `mca_train.run.checks`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments
from mca_train.config.fields import build
from mca_train.config.renamed import RENAMED
from mca_train.config.source import parse_overrides, read_yaml

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of.

    Args:
        training: HF's and Megatron's arguments.
        data: Model, tokenizer and files.
        launch: Local ranks.
        lora: The adapter.
        own: What the kind of run alone understands; None: nothing.
        values: Keys and values as given, for making ``training`` again in another process.
        where: What to call the file, or the file and the command line, in an error.
    """

    training: "TrainingArguments"
    data: DataArguments
    launch: LaunchArguments
    lora: LoraArguments
    own: object
    values: Values
    where: str


def given_values(config: Path | None, overrides: list[str]) -> tuple[JsonObject, str]:
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
    """The arguments that ``values`` give.

    Args:
        values: Keys and values.
        where: What to call them in an error.
        kind: The word after ``mca-train``, whose help lists the keys.
        data: The class of model and files.
        own: The class of what the kind of run alone understands.
        elsewhere: What to say of the keys of other kinds; those of other programs are known.
        flags: Names of the command's flags that are no keys.

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
    """What Hugging Face's arguments are made of.

    The backend is left out, as the process groups are Megatron's. Without a GPU ``use_cpu`` is on: otherwise every
    rank takes itself for the only one.
    """
    from mca_models.megatron import platform

    given = {key: value for key, value in values.items() if key != "ddp_backend"}
    return given | ({"use_cpu": True} if platform.device_type() == "cpu" else {})
