"""Writes checkpoints from live ranks: MCA (each rank and its replicas one file) and Hugging Face (streamed).

The bytes are written by ``mca_models.checkpoint``, the one writer; here is only who sends what to whom.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from mca_models.checkpoint.hf_writer import METADATA, HfLayout
from mca_models.checkpoint.mca_directory import McaLayout, iteration_name
from mca_models.checkpoint.placement import cut_size, expert_rank, stage_of, stored
from mca_models.checkpoint.side_files import copy_side_files
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.distributed.collectives import all_gather, on_first, shared_directory, together
from mca_models.megatron.factory.fill import whole_shape
from mca_models.megatron.live import LiveModel
from mca_models.megatron.tensors import CODES, DTYPE_OF, to_numpy
from mca_models.storage.safetensors import FilePlan, plan_file
from mca_models.storage.writer import SafetensorsWriter, Written, joined_record, make_file
from mca_models.templates import family_of
from mca_models.weights import Param
from mca_models.weights.arrays import NumpyArray

Shape = tuple[int, ...]

Facts = dict[str, tuple[str, Shape]]
"""Safetensors code and whole shape by canonical name."""


def save_mca(models: LiveModel, directory: Path, *, overwrite: bool = False) -> None:
    """See ``VirtualModels.save_pretrained``."""
    dtypes, wholes = _split(_facts(models))
    layout = McaLayout(_params(models), models.config, dtypes, wholes)
    with shared_directory(directory, overwrite=overwrite) as folder:
        iteration = folder / iteration_name(1)
        shares = list(_shares(models, layout, iteration))
        together(lambda: _make_files(shares))
        everyone = together(lambda: {share.name: share.write(models) for share in shares})
        on_first(lambda: _finish_mca(models, layout, everyone, folder))


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
            plan_file(iteration / name, layout.specs(name)), [own[name] for own in everyone if name in own]
        )
        for name in layout.files
    }
    layout.finish(folder, records)
    copy_side_files_of(models, folder)


@dataclass(frozen=True)
class _Share:
    """The part of a file of this rank's pieces that this one of its replicas writes.

    Args:
        name: Of the file.
        plan: The file.
        number: Which replica this is.
        count: How many there are.
    """

    name: str
    plan: FilePlan
    number: int
    count: int

    def write(self, models: LiveModel) -> Written:
        """Writes and syncs it."""
        live = dict(models.canonical_parameters())
        first = len(self.plan.header)
        size = self.plan.nbytes - first
        low, high = (first + size * number // self.count for number in (self.number, self.number + 1))
        with SafetensorsWriter(self.plan, joins=True) as writer:
            for name, info in self.plan.tensors.items():
                start, stop = (
                    min(max(edge - info.offset, 0), info.nbytes) // info.itemsize for edge in (low, high)
                )
                if start < stop:
                    elements = live[name].detach().reshape(-1)[start:stop]
                    writer.write(name, _bytes(elements), start * info.itemsize)
        return writer.written


def _shares(models: LiveModel, layout: McaLayout, iteration: Path) -> Iterator[_Share]:
    """What this rank writes: a share of each file whose pieces it holds."""
    for name, pieces in layout.files.items():
        param, piece = pieces[0]  # a file holds the pieces of one dense or one expert rank
        replicas = parallel.replicas(param.expert is not None)
        if replicas[0] == _owner(models, param, piece):
            plan = plan_file(iteration / name, layout.specs(name))
            yield _Share(name, plan, replicas.index(models.place.rank), len(replicas))


def save_hf(
    models: LiveModel, directory: Path, *, overwrite: bool = False, max_shard_bytes: int | None = None
) -> None:
    """See ``VirtualModels.save_pretrained_as_hf``."""
    facts = _facts(models)
    dtypes, wholes = _split(facts)
    options = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    layout = HfLayout(_params(models), models.config, dtypes, wholes, **options)
    with shared_directory(directory, overwrite=overwrite) as folder:
        _stream(models, layout, facts, folder)
        on_first(lambda: _finish_hf(models, layout, folder))


def _finish_hf(models: LiveModel, layout: HfLayout, folder: Path) -> None:
    layout.finish(folder)
    copy_side_files_of(models, folder)


def _stream(models: LiveModel, layout: HfLayout, facts: Facts, folder: Path) -> None:
    """Goes through the parameters together; each file is written by one rank, files spread over ranks."""
    writer_of = {
        tensor: index % models.place.world_size
        for index, names in enumerate(layout.files.values())
        for tensor in names
    }
    with ExitStack() as files:
        writers: dict[str, SafetensorsWriter] = {}
        together(lambda: writers.update(_opened(models, layout, folder, files)))
        faults = _exchange_all(models, layout, facts, writer_of, writers)
        together(lambda: _closed(files, faults))


def _exchange_all(
    models: LiveModel,
    layout: HfLayout,
    facts: Facts,
    writer_of: Mapping[str, int],
    writers: Mapping[str, SafetensorsWriter],
) -> list[Exception]:
    """Sends and writes every parameter. A rank that cannot write goes on sending; why it could not."""
    live = dict(models.canonical_parameters())
    faults: list[Exception] = []
    for param in layout.params:
        targets = [name for hf in param.hf_names() for name in layout.written_as(hf)]
        exchange = _Exchange(models, param, facts)
        pieces = exchange.collect(live, {writer_of[name] for name in targets})
        if pieces is None or faults:
            continue
        try:
            _write(param, exchange.to_hf(pieces), writers, layout)
        except Exception as error:  # told to all ranks at the end
            faults.append(error)
    return faults


def _write(
    param: Param,
    tensors: Sequence[Tensor],
    writers: Mapping[str, SafetensorsWriter],
    layout: HfLayout,
) -> None:
    for hf, tensor in zip(param.hf_names(), tensors, strict=True):
        data = _bytes(tensor)
        start = (param.expert or 0) * len(data) if param.stacked else 0
        for name in layout.written_as(hf):
            if name in writers:
                writers[name].write(name, data, start)


def _opened(
    models: LiveModel, layout: HfLayout, folder: Path, files: ExitStack
) -> Mapping[str, SafetensorsWriter]:
    """This rank's open files, by the tensors in them."""
    writers: dict[str, SafetensorsWriter] = {}
    for index, (name, tensors) in enumerate(layout.files.items()):
        if index % models.place.world_size == models.place.rank:
            plan = plan_file(folder / name, layout.specs(name), METADATA)
            writers |= dict.fromkeys(tensors, files.enter_context(SafetensorsWriter(plan)))
    return writers


def _closed(files: ExitStack, faults: Sequence[Exception]) -> None:
    if faults:
        raise faults[0]
    files.close()


@dataclass(frozen=True)
class _Exchange:
    """The pieces of one parameter on their way to the ranks that write it."""

    models: LiveModel
    param: Param
    facts: Facts

    def collect(self, live: Mapping[str, Tensor], writers: set[int]) -> Sequence[Tensor] | None:
        """All pieces in rank order, on the ``writers``; None on other ranks."""
        me, name = self.models.place.rank, self.param.mca_name()
        owners = [_owner(self.models, self.param, rank) for rank in range(self._size())]
        messages: list[torch.distributed.P2POp] = []
        if me in owners:
            own = live[name].detach().contiguous()
            messages += [
                torch.distributed.P2POp(torch.distributed.isend, own, writer)
                for writer in sorted(writers - {me})
            ]
        pieces = None
        if me in writers:
            pieces = [live[name].detach() if owner == me else self._empty() for owner in owners]
            messages += [
                torch.distributed.P2POp(torch.distributed.irecv, piece, owner)
                for piece, owner in zip(pieces, owners, strict=True)
                if owner != me
            ]
        # together: where two writers have a piece for each other, NCCL would wait in each one's first for ever
        for work in torch.distributed.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return pieces

    def _empty(self) -> Tensor:
        code, whole = self.facts[self.param.mca_name()]
        shape = list(whole)
        if self.param.vocab:
            shape[0] = self.models.config.padded_vocab_size
        if self.param.shard.axis is not None:
            shape[self.param.shard.axis] //= self._size()
        return torch.empty(shape, dtype=DTYPE_OF[code], device=platform.current_device())

    def _size(self) -> int:
        return cut_size(self.param, self.models.place.layout)

    def to_hf(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """The HF tensors, without vocabulary padding."""
        whole = self.param.shard.join(list(pieces))
        if self.param.vocab:
            whole = whole[: self.models.config.vocab_size]
        tensors: Sequence[Tensor] = self.param.from_whole(whole)
        return tensors


def _owner(models: LiveModel, param: Param, rank: int) -> int:
    """The global rank that speaks for piece ``rank`` of ``param``: the first of its replicas."""
    pp = stage_of(param, models.config.pipeline_plan())
    if param.expert is None:
        return models.place.grid.rank(tp=rank, pp=pp)
    return models.place.grid.expert_rank(etp=rank, ep=expert_rank(param, models.config), pp=pp)


def _params(models: LiveModel) -> list[Param]:
    return stored(family_of(models.config.model_type).params(models.config))


def _facts(models: LiveModel) -> Facts:
    """What every rank holds, put together: all parameters of the model."""
    mine = {
        item.param.mca_name(): (CODES[tensor.dtype], whole_shape(item.param, tensor, models.config))
        for item, tensor in models.held()
        if not item.copy
    }
    facts: Facts = {}
    for part in all_gather(mine):
        facts |= part
    return facts


def _split(facts: Facts) -> tuple[dict[str, str], dict[str, Shape]]:
    return {name: code for name, (code, _) in facts.items()}, {
        name: shape for name, (_, shape) in facts.items()
    }


def _bytes(tensor: Tensor) -> NumpyArray:
    import numpy as np

    return to_numpy(tensor).reshape(-1).view(np.uint8)


def copy_side_files_of(models: LiveModel, folder: Path) -> None:
    """Copies what lies beside the weights that ``models`` was loaded from."""
    if models.source is not None and models.source.is_dir():
        copy_side_files(models.source, folder)
