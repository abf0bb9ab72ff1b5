"""Training checkpoints: ``<output_dir>/checkpoint-<step>``, complete or absent.

    checkpoint-100/
      mca_config.json, iter_0000001/, ...   the model, an MCA checkpoint of its own
      training/optimizer/                   Megatron's distributed checkpoint of the optimizer
      training/rng_<rank>.safetensors       random states
      training/scheduler.json
      trainer_state.json                    Hugging Face's TrainerState: step, epoch, logs, best metric
      training_args.json

All ranks write into a directory beside it, which rank 0 renames when everything is on disk.
"""

import contextlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mca_config.errors import McaError
from mca_models.checkpoint.atomic import PartialDirectory
from mca_train import groups
from mca_train.bucket_padding import positions_without_padding
from mca_train.rng import load_rng, save_rng

logger = logging.getLogger(__name__)

PREFIX = "checkpoint"
STATE_FILE = "trainer_state.json"
_TRAINING = "training"
_NAME = re.compile(rf"{PREFIX}-(\d+)")


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints in ``output_dir``, oldest step first."""
    if not output_dir.is_dir():
        return []
    found = [(int(m[1]), path) for path in output_dir.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def resolve(resume: str | bool | None, output_dir: Path) -> Path | None:
    """Which checkpoint ``resume_from_checkpoint`` means.

    Args:
        resume: None or False: none. True or "true": the last, which must exist. "auto": the last if there is
            one. Else a path.
        output_dir: Where the run's checkpoints are.

    Raises:
        McaError: It does not exist or is not complete.
    """
    word = str(resume).lower()
    if resume is None or word in ("false", "none", ""):
        return None
    if word in ("true", "last", "auto"):
        last = next(reversed(checkpoints(output_dir)), None)
        if last is None and word != "auto":
            raise McaError(f"resume_from_checkpoint: no complete {PREFIX}-<step> in {output_dir}")
        return last
    path = Path(str(resume))
    if not path.is_dir():
        raise McaError(f"resume_from_checkpoint: directory {path} does not exist")
    if not (path / STATE_FILE).is_file():
        raise McaError(f"resume_from_checkpoint: {path} has no {STATE_FILE}; it is not a training checkpoint")
    return path


@contextlib.contextmanager
def new_checkpoint(destination: Path, *, first: bool) -> Iterator[Path]:
    """A directory for all ranks to write into, which becomes ``destination`` when all have.

    Args:
        destination: Replaced if it exists.
        first: Whether this is the rank that makes and renames it.
    """
    partial = PartialDirectory(destination, overwrite=True) if first else None
    path = Path(groups.broadcast_object(str(partial.path) if partial else None))
    try:
        yield path
    except BaseException:
        if partial:
            partial.discard()
        raise
    groups.barrier()
    if partial:
        partial.publish()
    groups.barrier()


def rotate(output_dir: Path, limit: int | None, keep: str | None) -> None:
    """Deletes the oldest checkpoints beyond ``limit``, but never the newest or the best (``keep``)."""
    if not limit or limit < 1:
        return
    found = checkpoints(output_dir)
    best = Path(keep).resolve() if keep else None
    expendable = [path for path in found[:-1] if path.resolve() != best]
    for path in expendable[: max(len(found) - limit, 0)]:
        logger.info("deleting %s (save_total_limit %d)", path, limit)
        doomed = path.with_name(f"{path.name}.partial-deleted")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class TrainingState:
    """What training needs beyond the model, to and from a checkpoint.

    Args:
        engine: With the optimizer and the wrapped chunks.
        scheduler: The learning rate, with ``state_dict`` and ``load_state_dict``.
        rank: Of this process.
    """

    def __init__(self, engine: Any, scheduler: Any, rank: int) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._rank = rank

    def save(self, checkpoint: Path) -> None:
        """Writes this rank's part, and what one rank writes for all."""
        from megatron.core import dist_checkpointing

        folder = checkpoint / _TRAINING
        save_rng(folder, self._rank)
        optimizer = folder / "optimizer"
        if self._rank == 0:
            optimizer.mkdir(parents=True)
            (folder / "scheduler.json").write_text(json.dumps(_plain(self._scheduler.state_dict())))
        groups.barrier()
        with _without_warnings():
            dist_checkpointing.save(self._optimizer_state(loading=False), str(optimizer))

    def load(self, checkpoint: Path) -> None:
        """Restores what `save` wrote.

        Raises:
            McaError: The checkpoint holds the model only.
        """
        from megatron.core import dist_checkpointing

        folder = checkpoint / _TRAINING
        if not (folder / "optimizer").is_dir():
            raise McaError(
                f"{checkpoint}: holds no optimizer state (save_only_model?); training cannot resume"
            )
        with _without_warnings():
            state = dist_checkpointing.load(self._optimizer_state(loading=True), str(folder / "optimizer"))
        self._engine.optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(json.loads((folder / "scheduler.json").read_text()))

    def load_rng(self, checkpoint: Path) -> None:
        """Restores the random states; with another number of ranks, those of this run stay."""
        if not load_rng(checkpoint / _TRAINING, self._rank):
            logger.warning("%s: no random state of rank %d; dropout starts anew", checkpoint, self._rank)

    def _optimizer_state(self, *, loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "dp_cp_group": groups.data_group_with_context(),
        }
        chunks = [chunk.module for chunk in self._engine.chunks]
        model = {
            f"model{number}": chunk.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(chunks)
        }
        optimizer = self._engine.optimizer
        with positions_without_padding(optimizer):
            state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"optimizer": state}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Megatron's checkpoints use parts of torch that torch is about to replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it, tensors as numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
