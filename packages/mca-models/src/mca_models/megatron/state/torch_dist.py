"""Megatron's ``torch_dist`` checkpoints with its fully parallel writer, synchronously or in the background.

    <dir>/mca_config.json, config.json, tokenizer files ...
          latest_checkpointed_iteration.txt        1
          iter_0000001/metadata.json               {"sharded_backend": "torch_dist", ...}
                       .metadata, __R_I.distcp     tensors under Megatron's global names, for any layout
                       common.pt                   iteration, layout (before megatron-core 0.19, which keeps it inside)

Every data-parallel replica writes its share. In the background: the weights are copied (to the host, on a GPU), a
forked process of each rank writes them, and ``PendingSave.finish`` renames the directory.
"""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from mca_config.errors import McaError
from mca_config.model_config import FILE_NAME
from mca_models.checkpoint.hf_directory import CONFIG
from mca_models.checkpoint.hf_writer import config_text
from mca_models.checkpoint.mca_directory import LATEST, iteration_name
from mca_models.megatron import features
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import SharedDirectory, run_on_first_rank
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.distributed.writer import (
    METADATA,
    PendingWrite,
    suppress_writer_warnings,
    write_state,
)
from mca_models.megatron.state.save import copy_model_side_files
from mca_models.megatron.types import GptModel, ShardedState
from mca_models.storage.atomic import write_file

__all__ = ["PendingSave", "PendingWrite", "model_state", "save_torch_dist", "write_state"]
_ITERATION = 1


class PendingSave:
    """Checkpoint that is being written in the background; ``finish`` completes it.

    Every rank has one; all methods are collective. Training may continue meanwhile, because the weights of the
    beginning of the save are written. ``directory`` does not exist until ``finish`` has returned; a process that ends
    before leaves nothing that looks like a checkpoint.

    Attributes:
        directory: Path of the checkpoint.
    """

    def __init__(self, directory: Path, shared: SharedDirectory, writing: PendingWrite) -> None:
        self.directory = directory
        self._shared, self._writing = shared, writing
        self._failure: McaError | None = None
        self._finished = False

    def done(self) -> bool:
        """Return whether all ranks' bytes are written, so that ``finish`` does not wait; the same on every rank."""
        return self._finished or self._writing.done()

    def finish(self) -> None:
        """Wait for all bytes and rename the checkpoint to ``directory``; further calls do nothing, or raise again.

        Raises:
            McaError: A rank could not write its part; all ranks raise it, and ``directory`` does not exist.
        """
        if self._failure is not None:
            raise self._failure
        if self._finished:
            return
        try:
            with self._shared.discarded_on_error():
                self._writing.finish()
                self._shared.publish()
        except McaError as error:
            self._failure = error
            raise
        self._finished = True


def save_torch_dist(
    models: LiveModel, directory: Path, *, overwrite: bool = False, in_background: bool = False
) -> PendingSave:
    """Begin a checkpoint; see ``VirtualModels.save_pretrained``."""
    shared = SharedDirectory(directory, overwrite=overwrite)
    with shared.discarded_on_error() as partial:
        folder = partial / iteration_name(_ITERATION)
        run_on_first_rank(lambda: _prepare(models, partial))
        writing = write_state(model_state(models), folder, background=in_background)
    return PendingSave(directory, shared, writing)


def model_state(models: LiveModel) -> ShardedState:
    """Return the state of Megatron's checkpoint: sharded tensors, and the values that Megatron-LM reads."""
    chunks: list[GptModel] = list(models.chunks)
    parallel.activate_process_groups(chunks)
    metadata = {**METADATA, "dp_cp_group": parallel.replica_group(expert=False)}
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    with suppress_writer_warnings():
        state: ShardedState = {
            name: chunk.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(names, chunks, strict=True)
        }
    return state | {"args": _arguments(models), "checkpoint_version": 3.0, "iteration": _ITERATION}


def _prepare(models: LiveModel, partial: Path) -> None:
    """Write the small files, which readers only open once the directory is complete."""
    (partial / iteration_name(_ITERATION)).mkdir()
    write_file(partial / FILE_NAME, models.config.to_json().encode())
    write_file(partial / CONFIG, config_text(models.config))
    copy_model_side_files(models, partial)
    write_file(partial / LATEST, f"{_ITERATION}\n".encode())


def _arguments(models: LiveModel) -> Namespace:
    """Return the arguments that Megatron-LM compares with its own before it loads a checkpoint."""
    config, layout = models.config, models.rank_context.layout
    sizes = {name: value for name, value in asdict(layout).items() if isinstance(value, (int, str))}
    return Namespace(
        **sizes,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.attention.num_attention_heads,
        ffn_hidden_size=config.mlp.ffn_hidden_size,
        padded_vocab_size=config.padded_vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        add_position_embedding=True,
        position_embedding_type=features.positions(config),
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
    )
