"""Megatron checkpoint of any format in a directory.

`mca_models.checkpoint_kinds` recognises MCA and Hugging Face directories.
"""

from pathlib import Path

from mca_config.model_config import McaModelConfig
from mca_models.torch_checkpoint.roll import is_roll, open_roll
from mca_models.torch_checkpoint.source import ForeignSource
from mca_models.torch_checkpoint.torch_dist import find_torch_dist, open_torch_dist


def open_foreign(path: Path, config: McaModelConfig | None = None) -> ForeignSource | None:
    """The checkpoint in directory ``path`` if another program wrote it, else None.

    Args:
        path: The directory.
        config: Of the model, for a ``torch_dist`` checkpoint without a configuration file.

    Raises:
        McaError: It is one, but incomplete or damaged.
    """
    if is_roll(path):
        return open_roll(path)
    return open_torch_dist(path, config) if find_torch_dist(path) else None
