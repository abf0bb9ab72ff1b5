"""Sizes and checksums of a training checkpoint, to detect damage before training starts.

The weights of an MCA model have their own manifest; ``training/manifest.json`` covers the rest. All ranks share the
work.
"""

import json
import os
import re
import threading
import zlib
from pathlib import Path

from mca_config.errors import McaError
from mca_models.megatron.distributed.collectives import all_gather, run_on_all_ranks, run_on_first_rank
from mca_models.storage.atomic import write_file
from mca_models.storage.manifest import FILE_NAME as MODEL_MANIFEST
from mca_models.storage.manifest import Manifest
from mca_train import groups
from mca_train.checkpoint.output_files import HF_FOLDER
from mca_train.groups import Ranks

MANIFEST = Path("training") / "manifest.json"
ARGUMENTS_FILE = "training_args.json"
_CHUNK = 1 << 22
_OF_RANK = re.compile(r"(?:rng_|fp8_|__)(\d+)")
_Record = tuple[int, int]


class Checksums:
    """Last stage of writing a checkpoint: syncs its files, computes checksums and writes the manifest.

    Each rank reads the files that it wrote, except the model's if they have their own manifest.

    Args:
        checkpoint: Directory in which all files are written by the time a method is called.
        ranks: This rank.
    """

    def __init__(self, checkpoint: Path, ranks: Ranks) -> None:
        self._checkpoint = checkpoint
        self._ranks = ranks
        self._thread: threading.Thread | None = None
        self._names: list[str] = []
        self._records: dict[str, _Record] = {}
        self._fault: Exception | None = None

    def done(self) -> bool:
        """Return True if all ranks have read their files; the first call starts reading. Collective."""
        if self._thread is None:
            self._list()
            self._thread = threading.Thread(target=self._sum, daemon=True)
            self._thread.start()
        return not groups.max_over_ranks(float(self._thread.is_alive()), self._ranks.device)

    def finish(self) -> None:
        """Wait for all ranks and write the manifest; collective."""
        if self._thread is None:
            self._list()
            self._sum()
        else:
            self._thread.join()
        records = run_on_all_ranks(self._records_or_error)
        if self._ranks.is_first:
            files = {
                name: {"bytes": size, "crc32": f"{crc:08x}"}
                for part in records
                for name, (size, crc) in sorted(part.items())
            }
            document = json.dumps({"version": 1, "files": files}, indent=1).encode() + b"\n"
            write_file(self._checkpoint / MANIFEST, document)
        groups.barrier()

    def _list(self) -> None:
        """List the files on the first rank, once all ranks have written."""
        groups.barrier()
        self._names = run_on_first_rank(lambda: _covered_files(self._checkpoint))

    def _sum(self) -> None:
        try:
            for name in self._names:
                if _writer(name) % self._ranks.world_size == self._ranks.rank:
                    self._records[name] = _checksum(self._checkpoint / name, sync=True)
        except Exception as error:  # raised by finish, on every rank
            self._fault = error

    def _records_or_error(self) -> dict[str, _Record]:
        if self._fault is not None:
            raise self._fault
        return self._records


def faults(checkpoint: Path, rank: int, world_size: int) -> list[str]:
    """Return the faults of ``checkpoint``, the same list on every rank; each rank reads a share. Collective."""
    try:
        expected = sorted(_expected(checkpoint).items())
    except (McaError, OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        local = [
            f"{error}"
            if isinstance(error, McaError)
            else f"{checkpoint / MANIFEST}: cannot be read ({error!r})"
        ]
    else:
        share = expected[rank::world_size]
        local = [fault for name, record in share if (fault := _fault(checkpoint / name, record))]
    return sorted({fault for part in all_gather(local) for fault in part})


def _covered_files(checkpoint: Path) -> list[str]:
    """List all files except the Hugging Face model and those in the model's manifest, before `MANIFEST` is written."""
    model_folders = [path.parent for path in checkpoint.glob(f"iter_*/{MODEL_MANIFEST}")]
    files = []
    for folder, _, names in os.walk(checkpoint):
        for path in (Path(folder) / name for name in names):
            inside = path.relative_to(checkpoint).parts[0] == HF_FOLDER
            covered = any(parent in path.parents and path.name != MODEL_MANIFEST for parent in model_folders)
            if not inside and not covered:
                files.append(str(path.relative_to(checkpoint)))
    return sorted(files)


def _writer(name: str) -> int:
    """Return the rank that wrote a file: it has the file cached, and only it can sync it everywhere."""
    match = _OF_RANK.match(Path(name).name)
    return int(match[1]) if match else 0


def _expected(checkpoint: Path) -> dict[str, _Record]:
    """Return the record of every file that must exist; a model-only checkpoint has no training state.

    In Megatron's format such a checkpoint has no manifest.
    """
    found: dict[str, _Record] = {}
    trains = (checkpoint / MANIFEST.parent).is_dir()
    if trains:
        document = json.loads((checkpoint / MANIFEST).read_text())
        found = {name: (int(e["bytes"]), int(e["crc32"], 16)) for name, e in document["files"].items()}
    elif not _is_model_only(checkpoint):
        raise McaError(f"{checkpoint / MANIFEST.parent}: is missing")
    covered = {Path(name).parts[0] for name in found if Path(name).name != MODEL_MANIFEST}
    left = sorted(path for path in checkpoint.glob("iter_*") if path.name not in covered)
    for iteration in (path for path in left if trains or (path / MODEL_MANIFEST).is_file()):
        files = Manifest.load(iteration).files
        found |= {f"{iteration.name}/{name}": (record.nbytes, record.crc32) for name, record in files.items()}
    return found


def _is_model_only(checkpoint: Path) -> bool:
    """Return True if the checkpoint was saved with ``save_only_model``."""
    try:
        return bool(json.loads((checkpoint / ARGUMENTS_FILE).read_text())["save_only_model"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _fault(path: Path, record: _Record) -> str | None:
    try:
        size = path.stat().st_size
        if size != record[0]:
            return f"{path}: has {size} bytes, the manifest says {record[0]}"
        if _checksum(path)[1] != record[1]:
            return f"{path}: its checksum is wrong, the file is corrupt"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None


def _checksum(path: Path, *, sync: bool = False) -> _Record:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            size, crc = size + len(block), zlib.crc32(block, crc)
        if sync:
            os.fsync(file.fileno())
    return size, crc
