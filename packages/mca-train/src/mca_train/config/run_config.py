"""A run as the user wrote it: the configuration file and the command line, checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mca_config.errors import McaError, UsageError, list_problems
from mca_train.config.arguments import DataArguments, DpoArguments, LaunchArguments, LoraArguments
from mca_train.config.checks import contradictions, require_backend
from mca_train.config.fields import build
from mca_train.config.source import parse_overrides, read_yaml

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments


@dataclass(frozen=True)
class Settings:
    """What a run is made of.

    Args:
        training: HF's and Megatron's arguments.
        data: Model, tokenizer and files.
        launch: Local ranks.
        lora: The adapter.
        dpo: The loss on preferences.
        values: Keys and values as given, for making ``training`` again in another process.
    """

    training: "TrainingArguments"
    data: DataArguments
    launch: LaunchArguments
    lora: LoraArguments
    dpo: DpoArguments
    values: dict[str, Any]
    where: str


def given_values(config: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The file's values with the command line's over them, and what to call the two in an error."""
    values = read_yaml(config)
    words = parse_overrides(overrides)
    return values | words, f"{config}{' and the command line' if words else ''}"


def parse(values: dict[str, Any], where: str) -> Settings:
    """Checks ``values`` and makes the arguments.

    Raises:
        UsageError: A key or a value is wrong.
    """
    from mca_config.training import TrainingArguments

    try:
        require_backend(values.get("ddp_backend"))
        values = _with_device(values)
        classes = [TrainingArguments, DataArguments, LaunchArguments, LoraArguments, DpoArguments]
        training, data, launch, lora, dpo = build(classes, values, where=where, only=["output_dir"])
        _require_adapter_keys_used(values, lora)
        _require_format_of_adapters(training, lora)
        if error := list_problems(list(contradictions(values, training, data)), where):
            raise UsageError(str(error))
    except UsageError:
        raise
    except McaError as error:
        raise UsageError(f"{where}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{where}: {' '.join(str(error).split())}") from error
    return Settings(training, data, launch, lora, dpo, values, where)


def _require_adapter_keys_used(values: dict[str, Any], lora: LoraArguments) -> None:
    """Refuses keys of an adapter that is not made here: they would be taken and not followed."""
    given = [key for key in values if key in LoraArguments.__dataclass_fields__]
    needless = [key for key in given if key not in ("lora_rank", "adapter_name_or_path")]
    if needless and lora.lora_rank is None:
        why = "adapter_name_or_path has its own" if lora.adapter_name_or_path else "lora_rank is not set"
        raise McaError(f"{', '.join(needless)}: {why}; remove the key or set lora_rank")


def _require_format_of_adapters(training: "TrainingArguments", lora: LoraArguments) -> None:
    if lora.wanted and training.ckpt_format != "mca":
        raise McaError(
            f"an adapter is not written as {training.ckpt_format}; remove ckpt_format and async_save"
        )


def require_keys_of(kind: str, values: dict[str, Any]) -> None:
    """Refuses keys that say nothing for ``kind``.

    Raises:
        UsageError: There are some.
    """
    needless = keys_of_preferences(values)
    if kind in ("pretrain", "sft") and needless:
        raise UsageError(f"{', '.join(needless)}: for mca-train dpo, not {kind}; remove the key")


def keys_of_preferences(values: dict[str, Any]) -> list[str]:
    """Keys that only ``dpo`` looks at."""
    names = [*DpoArguments.__dataclass_fields__, "chosen_column", "rejected_column"]
    return [key for key in values if key in names]


def _with_device(values: dict[str, Any]) -> dict[str, Any]:
    """Without a GPU, ``use_cpu`` is on: otherwise every rank takes itself for the only one."""
    from mca_models.megatron import platform

    given = {key: value for key, value in values.items() if key != "ddp_backend"}  # the groups are Megatron's
    return {"report_to": "none"} | given | ({"use_cpu": True} if platform.device_type() == "cpu" else {})
