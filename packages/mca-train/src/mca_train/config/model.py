"""The architecture of a run's model, its layout and its number of ranks, without reading weights."""

import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.arguments import MegatronArguments
from mca_config.errors import McaError, UsageError, list_problems, raise_problems
from mca_config.layout import ParallelLayout
from mca_config.model.head import HeadKind
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.hf_directory import dequantized_config, named_config_errors, read_config
from mca_models.checkpoint.mca_directory import is_mca, load_config
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind, open_checkpoint
from mca_models.lora import AdapterConfig, load_adapter_rules, rules_for_training
from mca_models.lora.peft_names import complete_peft_config
from mca_models.templates import config_from_hf
from mca_models.templates.classification_head import Head, with_head
from mca_models.templates.parts.passthrough import without_passthrough
from mca_train.config.arguments import LaunchArguments, LoraArguments

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments
    from mca_models.lora import AdapterRules

_PEFT_TASKS: dict[HeadKind, str] = {
    "causal_lm": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}


def model_config(path: str) -> McaModelConfig:
    """Return the architecture of a checkpoint directory, with the dtype in which a run reads it.

    Weights may be absent, except in Megatron's own checkpoints, whose tensors decide the dtype.

    Raises:
        McaError: The directory or its configuration is missing or not supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise McaError(
            f"model_name_or_path: directory {path} does not exist"
            "; set a directory with a model, or a model of the Hub (org/name)"
        )
    if checkpoint_kind(folder) in (CheckpointKind.ROLL, CheckpointKind.TORCH_DIST):
        return open_checkpoint(folder).config
    if is_mca(folder):
        return without_passthrough(load_config(folder))
    document = read_config(folder)
    with named_config_errors(folder):
        return without_passthrough(config_from_hf(dequantized_config(document)))


def trained_model(stored: McaModelConfig, head: Head | None, kind: str) -> McaModelConfig:
    """Return the architecture of the model that a run trains.

    Args:
        stored: Architecture of the checkpoint.
        head: Classification head of the kind of run; None: it trains language models.
        kind: Name of the kind of run.

    Raises:
        UsageError: The checkpoint has a head that ``kind`` does not train.
    """
    if head is not None:
        return with_head(stored, head)
    if stored.head.num_labels is not None:
        raise UsageError(
            f"model_name_or_path: the model has a head for {stored.head.head_kind}, mca-train {kind} trains "
            "language models; use mca-train reward or classify, or name another model"
        )
    return stored


def local_world_size(launch: LaunchArguments, layout: ParallelLayout) -> int:
    """Return the number of ranks to start here: ``nproc_per_node``, else one for each GPU, else the minimum.

    Raises:
        McaError: ``nproc_per_node`` is above the number of GPUs.
    """
    import torch

    from mca_models.megatron import platform

    gpus = torch.cuda.device_count() if platform.device_type() == "cuda" else 0
    if launch.nproc_per_node and 0 < gpus < launch.nproc_per_node:
        raise McaError(
            f"nproc_per_node {launch.nproc_per_node} is above {gpus}, the number of visible GPUs; lower it"
        )
    return launch.nproc_per_node or gpus or smallest_world(layout)


def planned_ranks(launch: LaunchArguments, layout: ParallelLayout) -> int:
    """Return the number of ranks to plan for, independent of this machine: ``nproc_per_node``, else the minimum."""
    return launch.nproc_per_node or smallest_world(layout)


def launcher_world_size(launch: LaunchArguments, layout: ParallelLayout) -> int:
    """Return the number of ranks that a launcher has started."""
    return int(os.environ["WORLD_SIZE"])


def smallest_world(layout: ParallelLayout) -> int:
    """Return the minimum number of ranks of ``layout``."""
    return layout.pp * math.lcm(layout.tp * layout.cp, layout.etp * layout.ep)


def resolve_layout(arguments: MegatronArguments, config: McaModelConfig) -> ParallelLayout:
    """Return the requested layout; unset sizes come from the layout of an MCA checkpoint."""
    return arguments.layout(config.layout)


def samples_per_step(training: "TrainingArguments", layout: ParallelLayout, world_size: int) -> int:
    """Return the number of samples of a training step on ``world_size`` ranks, of at least one replica."""
    replicas = max(world_size // layout.model_parallel_size, 1)
    samples: int = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return samples * replicas


def batch_unit(training: "TrainingArguments") -> str:
    """Return the unit in which a global batch is counted: ``pack`` with sequence packing, else ``sample``."""
    return "pack" if training.sequence_packing else "sample"


def peft_task(config: McaModelConfig) -> str:
    """Return PEFT's task type of a model."""
    return _PEFT_TASKS[config.head.head_kind]


def make_adapter(
    lora: LoraArguments, config: McaModelConfig, parts: Collection[str]
) -> "tuple[AdapterConfig, AdapterRules] | None":
    """Return the configuration and tensor rules of the trained adapter; None for full fine-tuning.

    Args:
        lora: Arguments of the adapter.
        config: Configuration of the model, with its layout.
        parts: Trained parts of a vision-language model.

    Raises:
        McaError: The adapter's directory or arguments cannot be used.
    """
    if lora.adapter_name_or_path is not None:
        return load_adapter_rules(Path(lora.adapter_name_or_path), config)
    if not lora.is_enabled:
        return None
    document = {**lora.config(peft_task(config))}
    try:
        complete_peft_config(document, config, parts)
        adapter = AdapterConfig.from_dict(document, "LoraConfig")
        return adapter, rules_for_training(config, adapter)
    except McaError as error:
        raise_problems(map(_with_lora_keys, list_problems(error)), "LoRA adapter")
        raise


def _with_lora_keys(problem: str) -> str:
    """Return ``problem`` with the run's keys instead of PEFT's names of them."""
    return re.sub(r"\b(target_modules|target_parameters|modules_to_save)\b", r"lora_\1", problem)


def adapter_problems(
    lora: LoraArguments, config: McaModelConfig, parts: Collection[str], *, new_head: bool
) -> Iterator[str]:
    """Yield the problems of the adapter with the model, including a new head that a continued adapter does not train.

    Args:
        lora: Arguments of the adapter.
        config: Configuration of the trained model, with its layout.
        parts: Trained parts of a multimodal model.
        new_head: The checkpoint has no head of the trained kind.
    """
    path = lora.adapter_name_or_path
    if path is not None and not Path(path).is_dir():
        return  # reported with the other directories
    try:
        adapter = make_adapter(lora, config, parts)
    except McaError as error:
        yield from list_problems(error)
        return
    if adapter is None or path is None or not new_head:
        return
    if not any(param.mca.startswith("output_layer.") for param in adapter[1].full_params):
        yield (
            f"adapter_name_or_path: the adapter in {path} does not train the new head, score; merge it into its base "
            "model (mca-convert --merge), name the result in model_name_or_path, and set lora_rank for a new one"
        )
