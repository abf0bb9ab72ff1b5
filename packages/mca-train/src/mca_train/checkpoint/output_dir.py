"""Check that a run may write into its ``output_dir`` without replacing files of others."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISDIR

from mca_config.errors import McaError
from mca_config.files import naming_read_errors
from mca_config.model_config import FILE_NAME
from mca_train.checkpoint.output_files import HF_FOLDER

_WRITTEN = (
    "config.json",
    "latest_checkpointed_iteration.txt",
    "trainer_state.json",
    "tokenizer*.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "iter_*",
    "checkpoint-*",
    f"{HF_FOLDER}/*",
)


def require_usable(output_dir: Path, sources: Iterable[str | Path | None]) -> None:
    """Raise unless a run may write into ``output_dir``.

    Args:
        output_dir: May be missing, hold an earlier run of `mca_train`, or files whose names a run does not use.
        sources: Directories that the run reads its model from.

    Raises:
        McaError: It is one of ``sources`` or inside one, it holds a model or checkpoints that mca did not write, or
            cannot be read.
    """
    sources = list(sources)
    with naming_read_errors(output_dir):
        try:
            _require_usable(output_dir, sources)
        except FileNotFoundError:  # under torchrun the first rank creates and removes it as a test
            _require_usable(output_dir, sources)


def _require_usable(output_dir: Path, sources: Iterable[str | Path | None]) -> None:
    if _is_file(output_dir):
        raise McaError(f"output_dir: {output_dir} is a file; set a directory")
    if output_dir.is_symlink() and not output_dir.exists():
        raise McaError(f"output_dir: {output_dir} is a broken link; create its target, or set a directory")
    here = output_dir.resolve()
    for source in (source for source in sources if source is not None):
        read = Path(source).resolve()
        if read in (here, here / HF_FOLDER):
            raise McaError(
                f"output_dir: {output_dir} is where the run reads {source}, which it would overwrite; set another "
                "directory"
            )
        if read in here.parents:
            raise McaError(
                f"output_dir: {output_dir} is inside {source}, which the run reads; set "
                "a directory outside of it"
            )
    if not output_dir.is_dir() or any(_traces(output_dir)):
        return
    files = sorted({str(path.relative_to(output_dir)) for name in _WRITTEN for path in output_dir.glob(name)})
    if files:
        names = ", ".join(files[:4]) + (", ..." if len(files) > 4 else "")
        raise McaError(
            f"output_dir: {output_dir} holds {names}, which mca did not write and a run may replace; set a new "
            "directory"
        )


def _is_file(path: Path) -> bool:
    """Return True if the path exists and is not a directory, by one stat call."""
    try:
        return not S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _traces(output_dir: Path) -> Iterator[bool]:
    """Yield True for every trace that a run of mca leaves, early or late."""
    yield (output_dir / "train_log.jsonl").is_file()
    yield _is_ours(output_dir)
    yield from (_is_ours(path) for path in output_dir.glob("checkpoint-*"))


def _is_ours(folder: Path) -> bool:
    try:
        return "mca_version" in json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
