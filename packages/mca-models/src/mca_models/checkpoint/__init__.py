"""Checkpoints on disk: Hugging Face and MCA directories, read and written without torch.

Reading::

    source = open_checkpoint(path)                     # any kind; complete, or an McaError
    for param in source.params:                        # all stored parameters, in canonical order
        piece = read_piece(source, param, rank, size)  # NumPy; only this rank's slices are read

Writing an MCA directory, by one process or several (each its own files)::

    layout = McaLayout(params, config, dtypes, wholes)
    partial = PartialDirectory(destination)            # one process; the others get partial.path
    file = plan_file(partial.path / iteration_name(1) / name, layout.specs(name))
    with SafetensorsWriter(file) as writer: writer.write(tensor_name, bytes_like) ...
    layout.finish(partial.path, {name: writer.record, ...}); partial.publish()

A HF directory likewise, with ``HfLayout`` and ``METADATA``.
"""

from mca_models.checkpoint.atomic import PartialDirectory, atomic_directory, require_absent
from mca_models.checkpoint.hf_directory import HfSource, has_weights
from mca_models.checkpoint.hf_writer import METADATA, HfLayout
from mca_models.checkpoint.imagined import ImaginedSource
from mca_models.checkpoint.manifest import FileRecord, Manifest
from mca_models.checkpoint.mca_directory import (
    McaLayout,
    McaSource,
    is_mca,
    iteration_name,
    latest_iteration,
    layout_faults,
)
from mca_models.checkpoint.opening import Kind, kind_of, open_checkpoint
from mca_models.checkpoint.safetensors import FilePlan, TensorInfo, plan_file, read_header
from mca_models.checkpoint.side_files import copy_side_files, side_files
from mca_models.checkpoint.source import ModelSource, Part, gather_piece, read_piece
from mca_models.checkpoint.writer import SafetensorsWriter

__all__ = [
    "METADATA",
    "FilePlan",
    "FileRecord",
    "HfLayout",
    "HfSource",
    "ImaginedSource",
    "Kind",
    "Manifest",
    "McaLayout",
    "McaSource",
    "ModelSource",
    "Part",
    "PartialDirectory",
    "SafetensorsWriter",
    "TensorInfo",
    "atomic_directory",
    "copy_side_files",
    "gather_piece",
    "has_weights",
    "is_mca",
    "iteration_name",
    "kind_of",
    "latest_iteration",
    "layout_faults",
    "open_checkpoint",
    "plan_file",
    "read_header",
    "read_piece",
    "require_absent",
    "side_files",
]
