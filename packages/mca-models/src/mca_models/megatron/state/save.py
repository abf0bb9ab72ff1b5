"""Write checkpoints from live ranks: MCA (one file per rank and its replicas) and Hugging Face (streamed).

``mca_models.checkpoint`` writes the bytes; this module assigns files and sends shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mca_models.checkpoint.hf_writer import MAX_SHARD_BYTES, METADATA, HfLayout
from mca_models.checkpoint.mca_directory import McaLayout, iteration_name
from mca_models.checkpoint.placement import expert_rank, pipeline_stage
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import run_on_all_ranks, run_on_first_rank, shared_directory
from mca_models.megatron.distributed.parallel import LiveModel
from mca_models.megatron.state.buckets import ParamSpecs, Unit, plan_buckets
from mca_models.megatron.state.param_specs import gather_param_specs, model_params, split_specs
from mca_models.megatron.state.stream import FilledBucket, Piece, WeightSource, stream
from mca_models.megatron.tensors import to_numpy
from mca_models.storage.safetensors import FilePlan, plan_file
from mca_models.storage.writer import SafetensorsWriter, Written, joined_record, make_file
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray

_BUCKET_BYTES = 8 << 20
"""Bytes that are sent at once; small, because the disk is slower than the network."""


def save_mca(
    models: LiveModel, directory: Path, *, overwrite: bool = False, piece: Piece | None = None
) -> None:
    """Write an MCA checkpoint; see ``VirtualModels.save_pretrained``.

    Args:
        models: The model.
        directory: Path of the checkpoint.
        overwrite: Replace an existing directory.
        piece: This rank's shards, if not the live tensors.
    """
    piece = piece or dict(models.canonical_parameters()).get
    layout = McaLayout(model_params(models), models.config, *split_specs(gather_param_specs(models)))
    with shared_directory(directory, overwrite=overwrite) as folder:
        iteration = folder / iteration_name(1)
        shares = list(_shares(models, layout, iteration))
        run_on_all_ranks(lambda: _make_files(shares))
        everyone = run_on_all_ranks(lambda: {share.name: share.write(piece) for share in shares})
        run_on_first_rank(lambda: _finish_mca(models, layout, everyone, folder))


def _make_files(shares: Sequence["_Share"]) -> None:
    for share in shares:
        if share.number == 0:
            make_file(share.plan)


def _finish_mca(
    models: LiveModel, layout: McaLayout, everyone: Sequence[Mapping[str, Written]], folder: Path
) -> None:
    iteration = folder / iteration_name(1)
    records = {
        name: joined_record(
            plan_file(iteration / name, layout.specs(name)),
            [records[name] for records in everyone if name in records],
        )
        for name in layout.files
    }
    layout.finish(folder, records)
    copy_model_side_files(models, folder)


@dataclass(frozen=True)
class _Share:
    """Byte range of a file that this replica writes.

    Args:
        name: Name of the file.
        plan: Layout of the file.
        number: Index of this replica.
        count: Number of replicas.
    """

    name: str
    plan: FilePlan
    number: int
    count: int

    def write(self, piece: Piece) -> Written:
        """Write and sync it."""
        first = len(self.plan.header)
        size = self.plan.nbytes - first
        low, high = (first + size * number // self.count for number in (self.number, self.number + 1))
        with SafetensorsWriter(self.plan, joins=True) as writer:
            for name, info in self.plan.tensors.items():
                start, stop = (
                    min(max(edge - info.offset, 0), info.nbytes) // info.itemsize for edge in (low, high)
                )
                if start < stop:
                    whole = piece(name)
                    assert whole is not None, f"this rank has no {name}"
                    elements = whole.detach().reshape(-1)[start:stop]
                    writer.write(name, _bytes(elements), start * info.itemsize)
        return writer.written


def _shares(models: LiveModel, layout: McaLayout, iteration: Path) -> Iterator[_Share]:
    """Yield this rank's share of each file with its shards."""
    for name, pieces in layout.files.items():
        param, piece = pieces[0]  # a file has the shards of one dense or one expert rank
        replicas = parallel.replicas(param.expert is not None)
        if replicas[0] == _owner(models, param, piece):
            plan = plan_file(iteration / name, layout.specs(name))
            yield _Share(name, plan, replicas.index(models.rank_context.rank), len(replicas))


def save_hf(
    models: LiveModel,
    directory: Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    piece: Piece | None = None,
) -> None:
    """Write a Hugging Face checkpoint; see ``VirtualModels.save_pretrained_as_hf``."""
    specs = gather_param_specs(models)
    limit = max_shard_bytes or MAX_SHARD_BYTES
    layout = HfLayout(model_params(models), models.config, *split_specs(specs), limit)
    source = WeightSource(
        models.rank_context, models.config, piece or dict(models.canonical_parameters()).get
    )
    with shared_directory(directory, overwrite=overwrite) as folder:
        _stream(source, layout, specs, folder)
        run_on_first_rank(lambda: _finish_hf(models, layout, folder))


def _finish_hf(models: LiveModel, layout: HfLayout, folder: Path) -> None:
    layout.finish(folder)
    copy_model_side_files(models, folder)


def _stream(source: WeightSource, layout: HfLayout, specs: ParamSpecs, folder: Path) -> None:
    """Stream all parameters; each file is written by one rank, files are distributed over ranks."""
    world_size = source.rank_context.world_size
    writer_of = {
        tensor: index % world_size for index, names in enumerate(layout.files.values()) for tensor in names
    }
    units = [Unit([param], _writers(param, layout, writer_of)) for param in layout.params]
    buckets = plan_buckets(units, specs, source.config, _BUCKET_BYTES)
    with ExitStack() as files:
        writers: dict[str, SafetensorsWriter] = {}
        run_on_all_ranks(lambda: writers.update(_open_files(source.rank_context, layout, folder, files)))
        faults: list[Exception] = []
        for filled in stream(source, buckets):
            if not faults:
                _write(filled, writers, layout, faults)
            del filled
        run_on_all_ranks(lambda: _close_files(files, faults))


def _writers(param: Param, layout: HfLayout, writer_of: Mapping[str, int]) -> frozenset[int]:
    return frozenset(writer_of[name] for hf in param.hf_names() for name in layout.written_as(hf))


def _write(
    filled: FilledBucket, writers: Mapping[str, SafetensorsWriter], layout: HfLayout, faults: list[Exception]
) -> None:
    """Write a received bucket; a rank that cannot write continues to send, and all ranks raise at the end."""
    try:
        for slot in filled.bucket.slots:
            for entry in slot.outputs:
                data = _bytes(entry.view(filled.buffer))
                start = (slot.param.expert or 0) * len(data) if slot.param.stacked else 0
                for name in layout.written_as(entry.name):
                    if name in writers:
                        writers[name].write(name, data, start)
    except Exception as error:
        faults.append(error)


def _open_files(
    rank_context: parallel.RankContext, layout: HfLayout, folder: Path, files: ExitStack
) -> Mapping[str, SafetensorsWriter]:
    """Return this rank's open files by the tensors in them."""
    writers: dict[str, SafetensorsWriter] = {}
    for index, (name, tensors) in enumerate(layout.files.items()):
        if index % rank_context.world_size == rank_context.rank:
            plan = plan_file(folder / name, layout.specs(name), METADATA)
            writers |= dict.fromkeys(tensors, files.enter_context(SafetensorsWriter(plan, checksum=False)))
    return writers


def _close_files(files: ExitStack, faults: Sequence[Exception]) -> None:
    if faults:
        raise faults[0]
    files.close()


def _owner(models: LiveModel, param: Param, rank: int) -> int:
    """Return the global rank of the first replica of shard ``rank`` of ``param``."""
    pp = pipeline_stage(param, models.config.pipeline_plan())
    if param.expert is None:
        return models.rank_context.grid.rank(tp=rank, pp=pp)
    return models.rank_context.grid.expert_rank(etp=rank, ep=expert_rank(param, models.config), pp=pp)


def _bytes(tensor: Tensor) -> NumpyArray:
    import numpy as np

    return to_numpy(tensor).reshape(-1).view(np.uint8)


def copy_model_side_files(models: LiveModel, folder: Path) -> None:
    """Copy tokenizer and other side files of the checkpoint that ``models`` was loaded from."""
    if models.source is not None and models.source.is_dir():
        copy_side_files(models.source, folder)
