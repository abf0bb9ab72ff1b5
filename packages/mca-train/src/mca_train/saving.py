"""The model to and from directories that also hold other things (checkpoints, logs)."""

import logging
import shutil
from pathlib import Path
from typing import Any

from mca_config.errors import McaError
from mca_models.megatron.agreement import on_first

logger = logging.getLogger(__name__)

_LATEST = "latest_checkpointed_iteration.txt"  # readers begin here, so it comes last and goes first
HF_FOLDER = "hf"


class ModelWriting:
    """A model on its way into a directory that also holds other things; every method is collective.

    Args:
        model: `VirtualModels`.
        folder: Made if missing; an older model in it is replaced.
        processing_class: Tokenizer to save with it, or None.
        hf: Also write ``folder/hf``, the same as a Hugging Face checkpoint, before anything else.
        settings: Of ``save_pretrained``: format, in the background or not.
    """

    def __init__(
        self,
        model: Any,
        folder: Path,
        processing_class: Any,
        *,
        hf: bool = False,
        **settings: Any,
    ) -> None:
        self._folder, self._processing_class = folder, processing_class
        self._staged = folder / ".model"
        if hf:
            model.save_pretrained_as_hf(folder / HF_FOLDER, overwrite=True)
            on_first(lambda: self._save_tokenizer(folder / HF_FOLDER))
        self._pending = model.save_pretrained(self._staged, overwrite=True, **settings)

    def done(self) -> bool:
        """Whether all ranks have written their parts."""
        return self._pending is None or bool(self._pending.done())

    def finish(self) -> None:
        """Waits for them and puts the model in place."""
        if self._pending is not None:
            self._pending.finish()
        on_first(self._put_in_place)

    def _put_in_place(self) -> None:
        self._save_tokenizer(self._staged)
        _move_up(self._staged, self._folder)

    def _save_tokenizer(self, folder: Path) -> None:
        if self._processing_class is not None:
            self._processing_class.save_pretrained(folder)


def require_format(model: Any, ckpt_format: str) -> None:
    """Raises if checkpoints of ``model`` cannot be written in ``ckpt_format``."""
    from mca_models.megatron.peft import PeftModels

    if ckpt_format != "mca" and isinstance(model, PeftModels):
        raise McaError(f"an adapter is not written as {ckpt_format}; remove ckpt_format and async_save")


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
