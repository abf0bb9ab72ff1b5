"""``manifest.json``: what a complete MCA iteration holds, so that a reader can tell one from a damaged one.

    {"version": 1,
     "files": {"pp_000/tp_00.safetensors": {"bytes": 1234, "crc32": "89abcdef"}, ...},
     "tensors": {"decoder.final_layernorm.weight":
                    {"dtype": "BF16", "shape": [64], "files": ["pp_001/tp_00.safetensors"]}, ...}}

A tensor's ``shape`` is that of the whole parameter before cutting, vocabulary rows without padding; its
files are in rank order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mca_config.errors import McaError
from mca_config.files import read_json, resolve_inside
from mca_config.types import JsonObject

FILE_NAME = "manifest.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of one file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One whole parameter: its type, shape, and the files with its pieces."""

    dtype: str
    shape: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    def to_json(self) -> bytes:
        """Return the contents of the file."""
        document = {
            "version": VERSION,
            "files": {
                name: {"bytes": record.nbytes, "crc32": f"{record.crc32:08x}"}
                for name, record in sorted(self.files.items())
            },
            "tensors": {
                name: {"dtype": record.dtype, "shape": list(record.shape), "files": list(record.files)}
                for name, record in self.tensors.items()
            },
        }
        return _one_entry_a_line(document).encode() + b"\n"

    @staticmethod
    def load(iteration: Path) -> "Manifest":
        """Read the manifest in ``iteration``."""
        path = resolve_inside(iteration.parent, f"{iteration.name}/{FILE_NAME}")
        document = read_json(path, "the checkpoint is incomplete, write it again")
        try:
            return _parse(document)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            raise McaError(f"{path}: not a manifest of version {VERSION}; the file is damaged") from None


def _one_entry_a_line(document: JsonObject) -> str:
    """``document`` as JSON; ten times as fast as an indented one, and still to be read line by line."""
    return json.dumps(document).replace('}, "', '},\n "')


def _parse(document: JsonObject) -> Manifest:
    if document["version"] != VERSION:
        raise ValueError
    files = {
        str(name): FileRecord(int(entry["bytes"]), int(entry["crc32"], 16))
        for name, entry in document["files"].items()
    }
    tensors = {
        str(name): TensorRecord(str(entry["dtype"]), tuple(map(int, entry["shape"])), tuple(entry["files"]))
        for name, entry in document["tensors"].items()
    }
    if not files:
        raise ValueError
    return Manifest(files, tensors)
