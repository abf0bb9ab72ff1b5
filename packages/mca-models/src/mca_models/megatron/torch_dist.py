"""Megatron's own checkpoints: ``torch_dist``, through its fully parallel writer, at once or in the background.

    <dir>/mca_config.json, config.json, tokenizer files ...
          latest_checkpointed_iteration.txt        1
          iter_0000001/metadata.json               {"sharded_backend": "torch_dist", ...}
                       .metadata, __R_I.distcp     tensors under Megatron's global names, for any layout
                       common.pt                   iteration, layout (megatron-core 0.16; later ones keep it inside)

Every data-parallel replica writes its share. In the background means: the weights are copied (to the host, on a
GPU), a forked process of each rank writes them, and ``PendingSave.finish`` puts the directory in place.
"""

import contextlib
import inspect
import json
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from mca_config.errors import McaError
from mca_config.model_config import FILE_NAME
from mca_models.checkpoint import iteration_name
from mca_models.checkpoint.atomic import write_file
from mca_models.checkpoint.hf_writer import write_config
from mca_models.checkpoint.mca_directory import LATEST
from mca_models.megatron import parallel, platform
from mca_models.megatron.agreement import SharedDirectory, all_gather, on_first, reason, together
from mca_models.megatron.platform.children import children_die_with_us
from mca_models.megatron.save import copy_side_files_of

if TYPE_CHECKING:
    from mca_models.megatron.virtual_models import VirtualModels

_ITERATION = 1
_METADATA: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class Writing:
    """A state dict that Megatron's writer is writing into a folder; every method is collective.

    Made by `write_state`. The folder is complete only when ``finish`` has returned.
    """

    def __init__(self, request: Any, folder: Path, *, background: bool) -> None:
        self._request, self._folder = request, folder
        self._caller = _background_writer() if background else None
        if self._caller is None:
            together(lambda: _run(request))
            return
        caller = self._caller
        with children_die_with_us():
            together(lambda: caller.schedule_async_call(request))
        self._process = caller.process  # None where a rank has nothing to write

    def done(self) -> bool:
        """Whether every rank's bytes are on disk, so that ``finish`` need not wait. The same on every rank."""
        busy = self._caller is not None and self._process is not None and self._process.is_alive()
        count = torch.tensor([int(busy)], device=platform.current_device())
        torch.distributed.all_reduce(count)
        return int(count) == 0

    def finish(self) -> None:
        """Waits for the bytes and writes the index of the checkpoint.

        Raises:
            McaError: A rank could not write; all raise the same.
        """
        together(self._join)
        write_index, *_ = self._request.finalize_fns
        with _held_back(_filesystem_writer(), "finish") as faults:
            _all_fail_alike(write_index, faults)
        on_first(lambda: _write_format(self._folder))
        self._request = None  # and with it the copies

    def _join(self) -> None:
        if self._caller is None or self._process is None:
            return
        self._process.join()
        code = self._process.exitcode
        self._caller.close()
        if code:
            how = (
                f"was ended by signal {-code}"
                if code < 0
                else f"failed with status {code}; its error is above"
            )
            raise McaError(f"the process that wrote the checkpoint {how}")


class PendingSave:
    """A checkpoint that is being written in the background; ``finish`` puts it in place.

    Every rank holds one and calls its methods together (they are collective). Training may go on meanwhile: what is
    written are the weights as they were when the save began. Until ``finish`` has returned nothing stands at
    ``directory``; a process that ends before leaves nothing that looks like a checkpoint.

    Attributes:
        directory: Where the checkpoint will stand.
    """

    def __init__(self, directory: Path, shared: SharedDirectory, writing: Writing) -> None:
        self.directory = directory
        self._shared, self._writing = shared, writing
        self._failure: McaError | None = None
        self._finished = False

    def done(self) -> bool:
        """Whether all ranks have written all bytes: ``finish`` will not wait. The same answer on every rank."""
        return self._finished or self._writing.done()

    def finish(self) -> None:
        """Waits until everything is written and puts it at ``directory``. Further calls do nothing, or raise again.

        Raises:
            McaError: A rank could not write its part; all ranks raise it, and nothing stands at ``directory``.
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
    models: "VirtualModels", directory: Path, *, overwrite: bool = False, in_background: bool = False
) -> PendingSave:
    """See ``VirtualModels.save_pretrained``; not finished yet."""
    shared = SharedDirectory(directory, overwrite=overwrite)
    with shared.discarded_on_error() as partial:
        folder = partial / iteration_name(_ITERATION)
        on_first(lambda: _prepare(models, partial))
        writing = write_state(model_state(models), folder, background=in_background)
    return PendingSave(directory, shared, writing)


def model_state(models: "VirtualModels") -> dict[str, Any]:
    """What Megatron's checkpoint of ``models`` holds: sharded tensors, and beside them what Megatron-LM asks for."""
    metadata = {**_METADATA, "dp_cp_group": parallel.replica_group(expert=False)}
    chunks: list[Any] = list(models.chunks)
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    with _quiet():
        state: dict[str, Any] = {
            name: chunk.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(names, chunks, strict=True)
        }
    return state | {"args": _arguments(models), "checkpoint_version": 3.0, "iteration": _ITERATION}


def write_state(state: dict[str, Any], folder: Path, *, background: bool = False) -> Writing:
    """Begins to write ``state`` through Megatron's fully parallel strategy; collective.

    Args:
        state: Sharded tensors and objects, and what all ranks have alike.
        folder: Existing and empty; every rank sees it.
        background: Return once the tensors are copied; else once the bytes are written.

    Raises:
        McaError: A rank could not.
    """
    from megatron.core import dist_checkpointing

    options = {"async_sharded_save": True, "content_metadata": _METADATA}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"  # the other one is a package of its own
    strategy = _strategy()
    with _quiet(), _held_back(_common_writer(), "save_common") as faults:
        made: list[Any] = []
        _all_fail_alike(
            lambda: made.append(dist_checkpointing.save(state, str(folder), strategy, **options)), faults
        )
    return Writing(made[0], folder, background=background)


def _strategy() -> Any:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), parallel.replica_group(expert=False)
    )


def _background_writer() -> Any:
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    return TemporalAsyncCaller()


def _filesystem_writer() -> Any:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    return FileSystemWriterAsync


def _common_writer() -> Any:
    """What writes ``common.pt``; None where Megatron has none."""
    from megatron.core.dist_checkpointing.strategies import common

    return getattr(common, "TorchCommonSaveStrategy", None)


def _run(request: Any) -> None:
    """Writes this rank's part before it returns."""
    if request.async_fn is None:
        return
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    with children_die_with_us():
        request.async_fn(*arguments, **request.async_fn_kwargs)


@contextlib.contextmanager
def _held_back(owner: Any, method: str) -> Iterator[list[Exception]]:
    """Errors of a step that Megatron has one rank do alone while the others wait in a collective.

    Raised there, they would leave the others waiting; the list that is yielded takes them instead.
    """
    faults: list[Exception] = []
    original = getattr(owner, method, None)

    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs) if original else None
        except Exception as error:
            faults.append(error)

    if original is None:
        yield faults
        return
    setattr(owner, method, attempt)
    try:
        yield faults
    finally:
        setattr(owner, method, original)


def _all_fail_alike(work: Callable[[], object], faults: list[Exception]) -> None:
    """Runs ``work``, which is collective and fails on all ranks or none, or fills ``faults``.

    Megatron tells the first rank alone what went wrong.
    """
    failed: list[str] = []
    try:
        work()
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        failed.append(_cause(error))
    failed += [f"rank {torch.distributed.get_rank()} could not save: {reason(error)}" for error in faults]
    told = [text for texts in all_gather(failed) for text in texts]
    if told:
        raise McaError(told[0])


def _cause(error: BaseException) -> str:
    """Which rank failed, and why, of an error of torch's checkpoint writer."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = sorted(failures.items())[0]
        return f"rank {rank} could not save: {str(first).removeprefix('Worker failure: ')}"
    return f"rank {torch.distributed.get_rank()} could not save: {reason(error)}"


def _prepare(models: "VirtualModels", partial: Path) -> None:
    """All small files of the directory; only readers that know the folder is complete look at them."""
    (partial / iteration_name(_ITERATION)).mkdir()
    write_file(partial / FILE_NAME, models.config.to_json().encode())
    write_config(partial, models.config)
    copy_side_files_of(models, partial)
    write_file(partial / LATEST, f"{_ITERATION}\n".encode())


def _write_format(folder: Path) -> None:
    """What Megatron writes last; with it the folder is a checkpoint."""
    from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig

    for file in folder.glob("common.pt"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    write_file(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode())


def _arguments(models: "VirtualModels") -> Namespace:
    """What Megatron-LM compares with its own arguments before it loads a checkpoint."""
    config, layout = models.config, models.place.layout
    sizes = {name: value for name, value in asdict(layout).items() if isinstance(value, (int, str))}
    return Namespace(
        **sizes,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        ffn_hidden_size=config.ffn_hidden_size,
        padded_vocab_size=config.padded_vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        add_position_embedding=True,
        position_embedding_type="rope",
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron's writer warns of parts of torch, and of its own, that later versions will replace."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.strategies.torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
