"""Checkpoints that others wrote, read without torch, without executing a pickle, and without loading.

    open_roll(dir)                  a tree of ROLL's mcore_adapter (mp_rank_*/model_optim_rng.pt)
    open_torch_dist(dir, config)    a torch_dist checkpoint of Megatron (.metadata, __R_I.distcp)
    open_foreign(dir, config)       whichever of the two it is, None if neither

Both return a ``ForeignSource``, which is a ``checkpoint.ModelSource``: ``parts(param)`` are runs of bytes in
files, ``gathers(param, side)`` says how to copy from them (never plan moves of it in another way: the runs
need not hold the elements in order), ``check_duplicates()`` compares what the files hold several times.
``config.layout`` is the layout that a ROLL tree was written with.

    dequantised(infos, hf_config, dtype)    the tensors of a quantised Hugging Face directory (fp8, mxfp4)
    plain_config(hf_config, dtype_name)     its config.json without quantisation
    is_quantised(hf_config)

``infos`` are all ``TensorInfo`` by name, scales included; what comes back has the names of the unquantised
model, and for quantised tensors ``Fp8Tensor`` or ``Mxfp4Tensor`` in place of ``TensorInfo``. They have its
``name``, ``dtype`` (as read), ``shape``, ``nbytes``, ``itemsize``, ``file``, ``array()`` and ``read(start,
stop)``, so a ``Part`` may hold one, but no ``offset``: their elements stand in no file. ``flat()[start:stop]``
gives elements start to stop as a fresh array and computes only the rows that it touches, so it may be called
for every stretch of a bounded buffer.

    open_torch_file(file)           names, shapes and places of the tensors in one file of torch.save

Importing this imports NumPy; do so only where a source is opened.
"""

from pathlib import Path

from mca_config.model_config import McaModelConfig
from mca_models.foreign.fp8 import Fp8Tensor
from mca_models.foreign.mxfp4 import Mxfp4Tensor
from mca_models.foreign.quantised import HfTensor, dequantised, is_quantised, plain_config
from mca_models.foreign.roll import is_roll, open_roll
from mca_models.foreign.source import ForeignSource
from mca_models.foreign.tensors import StridedTensor
from mca_models.foreign.torch_dist import find_torch_dist, open_torch_dist
from mca_models.foreign.torch_file import TorchFile, open_torch_file

__all__ = [
    "ForeignSource",
    "Fp8Tensor",
    "HfTensor",
    "Mxfp4Tensor",
    "StridedTensor",
    "TorchFile",
    "dequantised",
    "find_torch_dist",
    "is_quantised",
    "is_roll",
    "open_foreign",
    "open_roll",
    "open_torch_dist",
    "open_torch_file",
    "plain_config",
]


def open_foreign(path: Path, config: McaModelConfig | None = None) -> ForeignSource | None:
    """The checkpoint in directory ``path`` if another program wrote it, else None.

    Args:
        path: The directory.
        config: Of the model, for a ``torch_dist`` checkpoint without a configuration beside it.

    Raises:
        McaError: It is one, but incomplete or damaged.
    """
    if is_roll(path):
        return open_roll(path)
    return open_torch_dist(path, config) if find_torch_dist(path) else None
