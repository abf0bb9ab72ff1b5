"""The model to and from directories that also hold other things (checkpoints, logs)."""

import logging
import shutil
from pathlib import Path
from typing import Any

from mca_train import groups

logger = logging.getLogger(__name__)

_LATEST = "latest_checkpointed_iteration.txt"  # readers begin here, so it comes last and goes first
HF_FOLDER = "hf"


def save_model(model: Any, folder: Path, processing_class: Any, *, first: bool, hf: bool = False) -> None:
    """Writes an MCA checkpoint into ``folder`` beside what is there; collective.

    Args:
        model: `VirtualModels`.
        folder: Made if missing; an older model in it is replaced.
        processing_class: Tokenizer to save with it, or None.
        first: Whether this is the rank that moves files and saves the tokenizer.
        hf: Also write ``folder/hf``, the same as a Hugging Face checkpoint.
    """
    staged = folder / ".model"
    model.save_pretrained(staged, overwrite=True)
    if first:
        if processing_class is not None:
            processing_class.save_pretrained(staged)
        _move_up(staged, folder)
    groups.barrier()
    if hf:
        model.save_pretrained_as_hf(folder / HF_FOLDER, overwrite=True)
        if first and processing_class is not None:
            processing_class.save_pretrained(folder / HF_FOLDER)
        groups.barrier()


def _move_up(staged: Path, folder: Path) -> None:
    (folder / _LATEST).unlink(missing_ok=True)
    for old in folder.glob("iter_*"):
        shutil.rmtree(old)
    for entry in sorted(staged.iterdir(), key=lambda path: path.name == _LATEST):
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)
    staged.rmdir()


def load_weights(model: Any, directory: Path) -> None:
    """Fills ``model`` in place from an MCA (or Hugging Face) directory; every rank reads its own slices."""
    from mca_models.checkpoint import open_checkpoint
    from mca_models.megatron import fill
    from mca_models.megatron.peft import PeftModels

    if isinstance(model, PeftModels):
        model.load_pretrained(directory)
        return
    fill.from_source(open_checkpoint(directory), model.held(), model.place.layout, model.place.at)
