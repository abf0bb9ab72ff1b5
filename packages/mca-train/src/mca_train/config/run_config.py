"""`Settings`: the configuration file and the command line of a run, read once as typed arguments.

`values` reads them, `mca_train.run.rules` checks their combination.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from mca_config.types import JsonObject, Values
from mca_train.config.arguments import DataArguments, LaunchArguments, LoraArguments
from mca_train.config.renamed_options import RENAMED
from mca_train.config.values import build

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


def parse(
    values: Values,
    where: str,
    *,
    kind: str,
    data: type[DataArguments] = DataArguments,
    own: type | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    flags: Iterable[str] = (),
    early: bool = False,
) -> Settings:
    """Convert ``values`` to the arguments of a run.

    Args:
        values: Keys and values.
        where: Origin of the values for error messages.
        kind: The word after ``mca-train``, whose help lists the keys.
        data: The class of model and files.
        own: The class of the arguments of this kind of run.
        elsewhere: Messages about the keys of other kinds, in addition to those of other programs.
        flags: Names of the command's flags that are not keys.
        early: Read ``training`` as `EarlyArguments`, for checks before transformers is imported.

    Raises:
        UsageError: Keys or values are wrong.
    """
    classes: list[type] = [data, LaunchArguments, LoraArguments]
    training, files, launch, lora, *others = build(
        [_training_class(early=early), *classes, *([own] if own else [])],
        _without_backend(values) if early else _for_this_machine(values),
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

    return _without_backend(values) | ({"use_cpu": True} if platform.device_type() == "cpu" else {})


def _without_backend(values: Values) -> JsonObject:
    return {key: value for key, value in values.items() if key != "ddp_backend"}


def _training_class(*, early: bool) -> type:
    if early:
        from mca_train.config.early_arguments import early_arguments

        return early_arguments()
    from mca_config.training import TrainingArguments

    return TrainingArguments
