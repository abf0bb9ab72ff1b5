"""Kinds of checkpoint directories, one function that opens any of them, and the configurations in them.

How each kind is read is known to `checkpoint` and `torch_checkpoint`.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import has_entry
from mca_config.model_config import McaModelConfig
from mca_models.checkpoint.hf_directory import (
    INDEX,
    PICKLED,
    PICKLED_INDEX,
    SINGLE,
    HfSource,
    StoredTensor,
    named_config_errors,
    read_config,
)
from mca_models.checkpoint.mca_directory import (
    McaSource,
    is_mca,
    iteration_name,
    latest_iteration,
    load_config,
)
from mca_models.hub import resolve_directory
from mca_models.storage.manifest import FILE_NAME as MANIFEST
from mca_models.storage.source import ModelSource
from mca_models.templates import config_from_hf

_SAFE, _PICKLED = (SINGLE, INDEX), (PICKLED, PICKLED_INDEX)
_MEGATRON = ("latest_checkpointed_iteration.txt", ".metadata", "dist_model")


class CheckpointKind(Enum):
    """Kind of a checkpoint directory."""

    HF = "Hugging Face checkpoint"
    MCA = "MCA checkpoint"
    ROLL = "ROLL mcore_adapter checkpoint"
    TORCH_DIST = "Megatron torch_dist checkpoint"
    PEFT = "PEFT LoRA adapter"
    MCA_ADAPTER = "MCA LoRA adapter"

    @property
    def is_adapter(self) -> bool:
        """Return whether it holds a LoRA adapter alone."""
        return self in (CheckpointKind.PEFT, CheckpointKind.MCA_ADAPTER)

    @property
    def is_megatron(self) -> bool:
        """Return whether its weights have Megatron's layout."""
        return self in (CheckpointKind.MCA, CheckpointKind.ROLL, CheckpointKind.TORCH_DIST)


def checkpoint_kind(path: Path) -> CheckpointKind:
    """Return the kind of directory ``path``; damaged ones are found when they are opened.

    Raises:
        McaError: There is no such directory.
    """
    if not path.is_dir():
        raise McaError(f"{path}: {_why_no_directory(path)}")
    if has_entry(path, "adapter_config.json"):
        return CheckpointKind.MCA_ADAPTER if is_mca(path) else CheckpointKind.PEFT
    if is_mca(path) and _has_manifest(path):
        return CheckpointKind.MCA
    if is_mca(path.resolve().parent) and (path / MANIFEST).is_file():
        raise McaError(
            f"{path}: one iteration of a checkpoint; name the checkpoint itself, {path.resolve().parent}"
        )
    if not any(has_entry(path, name) for name in _MEGATRON):
        return CheckpointKind.MCA if is_mca(path) else CheckpointKind.HF
    from mca_models.torch_checkpoint.roll import is_roll
    from mca_models.torch_checkpoint.torch_dist import find_torch_dist

    if is_roll(path):
        return CheckpointKind.ROLL
    if find_torch_dist(path) is not None:
        return CheckpointKind.TORCH_DIST
    return CheckpointKind.MCA if is_mca(path) else CheckpointKind.HF


def _why_no_directory(path: Path) -> str:
    if path.exists():
        return f"is a file; name the checkpoint's directory, {path.parent}"
    return "no such directory; expected a checkpoint directory (Hugging Face, MCA, Megatron)"


def _has_manifest(path: Path) -> bool:
    try:
        return (path / iteration_name(latest_iteration(path)) / MANIFEST).is_file()
    except McaError:
        return False


def _pickled(path: Path) -> Sequence[StoredTensor] | None:
    """The tensors of a Hugging Face directory that keeps them in files of torch.save alone; None: it does not."""
    safe, pickled = (any(has_entry(path, name) for name in names) for names in (_SAFE, _PICKLED))
    if safe or not pickled:
        return None
    from mca_models.torch_checkpoint.torch_file import pickled_tensors

    return pickled_tensors(path)


def _adapter_targets(path: Path, kind: CheckpointKind) -> str:
    """Return the flags of mca-convert that take an adapter."""
    merged = f"for one merged model: --checkpoint_path BASE --adapter_path {path} --merge"
    if kind is CheckpointKind.MCA_ADAPTER:
        return f"{merged}; for a PEFT adapter: --adapter_path {path} without --checkpoint_path"
    return f"{merged}; for an MCA adapter: --checkpoint_path BASE --adapter_path {path}"


def open_checkpoint(path: str | Path, dtype: str | None = None) -> ModelSource:
    """Open a checkpoint of any kind: Hugging Face, MCA, ROLL or Megatron ``torch_dist``. No weight is read yet.

    Args:
        path: The directory.
        dtype: Safetensors code (``BF16``, ``F16``, ``F32``) that quantised weights are read as; None: what
            ``config.json`` says.

    Returns:
        The source: ``config`` (`mca_config.McaModelConfig`), ``params`` (one rule for each Megatron parameter, with its
        names), ``full_shape(param)`` and ``tensors()``, the stored tensors with ``name``, ``dtype``, ``shape`` and
        ``array()``, which maps the elements from the file.

    Raises:
        McaError: It is incomplete or damaged, or an adapter.

    Example:
        ```python
        source = open_checkpoint("Qwen3-8B")
        for tensor in source.tensors():
            print(tensor.name, tensor.dtype, tensor.array().mean(dtype="float32"))
        ```
    """
    path = Path(path)
    kind = checkpoint_kind(path)
    if kind.is_adapter:
        raise McaError(f"{path}: an adapter, not a whole model; {_adapter_targets(path, kind)}")
    if kind is CheckpointKind.MCA:
        return McaSource(path)
    if kind is CheckpointKind.HF:
        return HfSource(path, dtype, _pickled(path))
    from mca_models.torch_checkpoint.roll import open_roll
    from mca_models.torch_checkpoint.torch_dist import open_torch_dist

    return open_roll(path) if kind is CheckpointKind.ROLL else open_torch_dist(path)


def load_model_config(path: Path) -> McaModelConfig:
    """Load the model of a HF or MCA checkpoint directory; only its configuration need be there."""
    if is_mca(path):
        return load_config(path)
    with named_config_errors(path):
        return config_from_hf(read_config(path))


class AutoConfig:
    """Factory of `mca_config.McaModelConfig`; it needs no torch and reads no weights."""

    @staticmethod
    def from_pretrained(path: str | Path) -> McaModelConfig:
        """Return the configuration of a model.

        Args:
            path: A Hugging Face or MCA directory, in which only the configuration must be present, or a model of the
                Hub.

        Raises:
            McaError: There is no configuration, or a model of its type or with its settings is not supported.

        Example:
            ```python
            config = AutoConfig.from_pretrained("Qwen/Qwen3-8B")
            print(config.num_layers, config.hidden_size)
            ```
        """
        return load_model_config(resolve_directory(path, "config"))
