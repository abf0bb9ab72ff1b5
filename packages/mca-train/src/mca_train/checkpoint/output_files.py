"""Names of a run's files in ``output_dir``, and its checkpoints; without torch, to report wrong paths early."""

import re
from pathlib import Path

from mca_config.errors import McaError, UsageError
from mca_config.files import naming_read_errors

PREFIX = "checkpoint"
"""Checkpoints are named ``checkpoint-<step>``."""
STATE_FILE = "trainer_state.json"
"""Written last, so that a checkpoint with it is complete."""
HF_FOLDER = "hf"
"""The Hugging Face model of a checkpoint."""
TRAINING = "training"
"""The optimizer's state and the position in the data."""
_NAME = re.compile(rf"{PREFIX}-(\d+)")


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints in ``output_dir``, oldest step first.

    Raises:
        McaError: It cannot be listed.
    """
    with naming_read_errors(output_dir):
        try:
            names = [path.name for path in output_dir.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(step, output_dir / name) for name in names if (step := named_step(name)) is not None]
        return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def named_step(name: str) -> int | None:
    """Return the step of a directory that is named like a checkpoint; None: it is not."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step of one of `checkpoints`."""
    return int(checkpoint.name.removeprefix(f"{PREFIX}-"))


def resolve(resume: str | bool | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that ``resume_from_checkpoint`` selects.

    Args:
        resume: None or False: none. True or "true": the latest, which must exist. "auto": the latest if there is one.
            Else a path.
        output_dir: Directory with the run's checkpoints.

    Raises:
        McaError: It does not exist or is not complete.
    """
    word = str(resume).lower()
    if resume is None or word in ("false", "none", ""):
        return None
    if word in ("true", "last", "auto"):
        last = next(reversed(checkpoints(output_dir)), None)
        if last is None and word != "auto":
            raise McaError(
                f"resume_from_checkpoint: no complete {PREFIX}-<step> in {output_dir}"
                "; set auto to begin where there is none"
            )
        return last
    path = Path(str(resume))
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise UsageError(f"resume_from_checkpoint: {path} {what}")
    inside = checkpoints(path)
    if inside and not (path / TRAINING).is_dir():
        raise McaError(
            f"resume_from_checkpoint: {path} is the output_dir of a run; set a checkpoint in it ({inside[-1].name}), "
            "or continue that run with output_dir and auto"
        )
    if not (path / STATE_FILE).is_file():
        raise McaError(
            f"resume_from_checkpoint: {path} has no {STATE_FILE}, so it is not a training checkpoint"
            "; set a checkpoint-<step> directory of a run, or auto"
        )
    return path
