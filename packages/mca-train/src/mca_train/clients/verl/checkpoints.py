"""Checkpoints of verl's runs: mca's model and training state in the directory that verl names."""

from pathlib import Path
from typing import Protocol

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from mca_config.errors import McaError
from mca_config.files import naming_read_errors
from mca_config.types import JsonObject, Typed
from mca_models.megatron.distributed.collectives import run_on_first_rank
from mca_train.batching.position import RunPosition
from mca_train.checkpoint import integrity
from mca_train.checkpoint.integrity import ARGUMENTS_FILE, Checksums
from mca_train.checkpoint.model import ModelWriter, load_weights, saved_weights
from mca_train.checkpoint.training_state import LoopState, TrainingState
from mca_train.checkpoint.writer import CheckpointWriter, WriteStage, name_errors
from mca_train.engine.engine import Engine
from mca_train.engine.rng import has_dropout
from mca_train.groups import Ranks
from mca_train.types import PreTrainedTokenizerBase, TrainingArguments, Upstream, VirtualModels

_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def require_supported_checkpoints(config: Upstream) -> None:
    """Raise if verl's configuration of checkpoints has an option that is not supported.

    Args:
        config: verl's ``CheckpointConfig``.

    Raises:
        McaError: It has.
    """
    if config.async_save:
        raise McaError("checkpoint.async_save is not supported by the engine mca; set it to false")
    for name in ("save_contents", "load_contents"):
        contents: list[str] = getattr(config, name) or ["model"]
        if "model" not in contents or not set(contents) <= set(_CONTENTS):
            raise McaError(
                f"checkpoint.{name} is {list(contents)}; expected 'model', and any of {', '.join(_CONTENTS[1:])}"
            )
        if "extra" in contents and "optimizer" not in contents:
            raise McaError(
                f"checkpoint.{name} is {list(contents)}; the engine mca keeps extra (random states) with the "
                "optimizer's state: add optimizer, or remove extra"
            )


class MegatronSchedule(Protocol):
    """Megatron's ``OptimizerParamScheduler``."""

    def state_dict(self) -> JsonObject:
        """Return the state."""

    def load_state_dict(self, state_dict: JsonObject, /) -> None:
        """Restore the state."""


class _Schedule:
    """A Megatron schedule with the methods of `LearningRate` that `TrainingState` calls."""

    def __init__(self, schedule: MegatronSchedule) -> None:
        self._schedule = schedule

    def state_dict(self) -> JsonObject:
        return self._schedule.state_dict()

    def load_state_dict(self, state: JsonObject, _: int, /) -> None:
        self._schedule.load_state_dict(state)


class VerlCheckpoints:
    """Saves and loads the checkpoints of one engine; collective.

    Args:
        models: The model.
        engine: With its optimizer.
        schedule: The learning-rate schedule.
        args: Training arguments.
        ranks: This rank.
        config: verl's ``CheckpointConfig``.
        processing_class: Tokenizer or processor to save with the model.
    """

    def __init__(
        self,
        models: VirtualModels,
        engine: Engine,
        schedule: MegatronSchedule,
        args: TrainingArguments,
        ranks: Ranks,
        config: Upstream,
        processing_class: PreTrainedTokenizerBase,
    ) -> None:
        self._models, self._engine, self._args, self._ranks = models, engine, args, ranks
        self._processing_class = processing_class
        self._kept = BaseCheckpointManager(models, engine.optimizer, schedule, processing_class, config)
        self._training = TrainingState(engine, _Schedule(schedule), ranks, RunPosition())
        self._writer = CheckpointWriter(in_background=False)

    def save(self, path: Path, max_to_keep: int | None) -> None:
        """Write a checkpoint to ``path``, and delete the oldest ones of this engine beyond ``max_to_keep``."""
        if self._ranks.is_first:
            self._kept.ensure_checkpoint_capacity(max_to_keep)
        with name_errors(path):
            run_on_first_rank(lambda: path.parent.mkdir(parents=True, exist_ok=True))
        self._writer.write(path, self._begin, lambda: None)
        if self._ranks.is_first:
            self._kept.register_checkpoint(str(path), max_to_keep)

    def _begin(self, folder: Path) -> list[WriteStage]:
        with self._engine.params_gathered():
            writer = ModelWriter(
                self._models, folder, self._processing_class, hf=self._kept.should_save_hf_model
            )
        if not self._kept.should_save_optimizer:
            return [writer]
        run_on_first_rank(lambda: (folder / ARGUMENTS_FILE).write_text(self._args.to_json_string()))
        pending: Typed = self._training.begin_save(folder, LoopState(), background=False)
        return [writer, pending, Checksums(folder, self._ranks)]

    def load(self, path: Path) -> None:
        """Restore what `save` wrote to ``path``, on any layout.

        Raises:
            McaError: It is damaged, or has no optimizer although ``load_contents`` names it.
        """
        resumes = self._kept.should_load_optimizer
        with naming_read_errors(path):
            if resumes and not (path / integrity.MANIFEST).is_file():
                raise McaError(
                    f"{path}: has no {integrity.MANIFEST}, so no optimizer can be loaded from it; set "
                    "checkpoint.load_contents to [model]"
                )
            if resumes and (faults := integrity.faults(path, self._ranks.rank, self._ranks.world_size)):
                raise McaError(f"{path} is damaged: {'; '.join(faults)}")
            load_weights(self._models, path)
            self._engine.reload_main_params()
            if resumes:
                self._training.load(path, saved_weights(self._models, path))
            if resumes and self._kept.should_load_extra:
                self._training.load_rng(path, drops=has_dropout(self._models))
