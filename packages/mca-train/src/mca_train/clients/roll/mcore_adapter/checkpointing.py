"""Directories of a ROLL checkpoint: the model in mca's format below them, the optimizer where ROLL writes it."""

from pathlib import Path

from megatron.core import parallel_state

from mca_train.clients.external_loop import MODEL_FOLDER
from mca_train.types import Chunk


def get_checkpoint_dir(checkpoints_path: str, iteration: int = 1, return_base_dir: bool = False) -> str:
    """Return the directory of the optimizer: one for all ranks (``return_base_dir``), or this rank's."""
    base = Path(checkpoints_path) / f"iter_{iteration:07d}"
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    return str(base if return_base_dir else base / "mp_rank_{:02d}_{:03d}_{:03d}".format(*ranks))


def generate_model_state_dict(model: Chunk, ckpt_format: str = "mca") -> dict[str, object]:
    """Return nothing: ``McaGPTModel.save_pretrained`` writes all chunks of the rank itself."""
    return {}


def load_state_dict_from_checkpoint(checkpoint_dir: str) -> Path | None:
    """Return the directory of the model or adapter in a checkpoint; None: absent.

    ``VirtualModels.load_state_dict`` reads it.
    """
    folders = (Path(checkpoint_dir) / MODEL_FOLDER, Path(checkpoint_dir) / "default" / MODEL_FOLDER)
    return next((folder for folder in folders if folder.is_dir()), None)
