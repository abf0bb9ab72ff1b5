"""Checks and checkpoints for programs that train mca's chunks with their own loop."""

import shutil
from collections.abc import Callable
from pathlib import Path

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_models.megatron.layers.rope import length_dependent_ropes
from mca_models.megatron.virtual_models import VirtualModels

MODEL_FOLDER = "mca"
"""Folder of the model in a ROLL checkpoint."""

_STAGED = ".mca-staged"


def require_plain_loop(models: VirtualModels, *, media: bool = False) -> None:
    """Raise if another program's loop would compute something else than mca's: it passes tokens and labels only.

    Args:
        models: The model.
        media: The loop passes images too.

    Raises:
        McaError: The model has images, MTP layers, a classification head or RoPE that depends on the length.
    """
    config = models.config
    found = {
        "images": config.vision is not None and not media,
        "MTP layers (set mtp_num_layers to 0)": bool(config.mtp_num_layers),
        "a classification head": config.head.num_labels is not None,
        "RoPE that depends on the sequence length": bool(length_dependent_ropes(*models.chunks)),
    }
    if faults := [name for name, has in found.items() if has]:
        raise McaError(
            f"{config.model_type}: {', '.join(faults)} not supported by this backend; use mca-train"
        )


def save_among(save: Callable[[Path], None], folder: Path) -> None:
    """Write a checkpoint to a new folder and move its files into ``folder``, replacing equal names; collective.

    Args:
        save: Collective function that writes a complete checkpoint to a path.
        folder: Directory of the client's checkpoint; made if it is absent.
    """
    run_on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True))
    save(folder / _STAGED)
    run_on_first_rank(lambda: _move_files(folder / _STAGED, folder))


def _move_files(staged: Path, folder: Path) -> None:
    for entry in staged.iterdir():
        if (folder / entry.name).is_dir():
            shutil.rmtree(folder / entry.name)
        entry.replace(folder / entry.name)
    staged.rmdir()
