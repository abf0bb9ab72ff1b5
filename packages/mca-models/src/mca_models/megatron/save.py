"""Writes checkpoints from live ranks: MCA (each rank its own file) and Hugging Face (streamed).

The bytes are written by ``mca_models.checkpoint``, the one writer; here is only who sends what to whom.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from mca_models.checkpoint import (
    METADATA,
    FileRecord,
    HfLayout,
    McaLayout,
    PartialDirectory,
    SafetensorsWriter,
    copy_side_files,
    iteration_name,
    plan_file,
)
from mca_models.checkpoint.atomic import write_file
from mca_models.checkpoint.hf_directory import CONFIG
from mca_models.checkpoint.placement import cut_size, expert_rank, stage_of, stored
from mca_models.megatron import platform
from mca_models.megatron.fill import whole_shape
from mca_models.megatron.tensors import CODES, DTYPE_OF, to_numpy
from mca_models.templates import config_to_hf, family_of
from mca_models.weights import Param

if TYPE_CHECKING:
    from mca_models.megatron.virtual_models import VirtualModels

Shape = tuple[int, ...]
Facts = dict[str, tuple[str, Shape]]
"""Safetensors code and whole shape by canonical name."""


def save_mca(models: "VirtualModels", directory: Path, *, overwrite: bool = False) -> None:
    """See ``VirtualModels.save_pretrained``."""
    facts = _facts(models)
    dtypes, wholes = _split(facts)
    layout = McaLayout(_params(models), models.config, dtypes, wholes)
    with _shared_directory(directory, overwrite) as folder:
        records = _write_own_files(models, layout, folder / iteration_name(1))
        everyone = _all_gather(records)
        if models.place.rank == 0:
            layout.finish(folder, {name: record for part in everyone for name, record in part.items()})
            _write_config(models, folder)
            _copy_side_files(models, folder)


def _write_own_files(models: "VirtualModels", layout: McaLayout, folder: Path) -> dict[str, FileRecord]:
    """The files whose pieces this rank holds, if it is the first of its replicas."""
    live = dict(models.canonical_parameters())
    records = {}
    for name, pieces in layout.files.items():
        if {_owner(models, param, rank) for param, rank in pieces} != {models.place.rank}:
            continue
        with SafetensorsWriter(plan_file(folder / name, layout.specs(name))) as writer:
            for param, _ in pieces:
                writer.write(param.mca_name(), _bytes(live[param.mca_name()]))
        records[name] = writer.record
    return records


def save_hf(
    models: "VirtualModels", directory: Path, *, overwrite: bool = False, max_shard_bytes: int | None = None
) -> None:
    """See ``VirtualModels.save_pretrained_as_hf``."""
    facts = _facts(models)
    dtypes, wholes = _split(facts)
    options = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    layout = HfLayout(_params(models), models.config, dtypes, wholes, **options)
    with _shared_directory(directory, overwrite) as folder:
        _stream(models, layout, facts, folder)
        if models.place.rank == 0:
            layout.finish(folder)
            _copy_side_files(models, folder)


def _stream(models: "VirtualModels", layout: HfLayout, facts: Facts, folder: Path) -> None:
    """Goes through the parameters together; each file is written by one rank, files spread over ranks."""
    writer_of = {
        tensor: index % models.place.world_size
        for index, names in enumerate(layout.files.values())
        for tensor in names
    }
    copies: dict[str, list[str]] = {}
    for copy, original in layout.duplicates.items():
        copies.setdefault(original, []).append(copy)
    live = dict(models.canonical_parameters())
    with _writers(models, layout, folder) as writers:
        for param in layout.params:
            targets = [name for hf in param.hf_names() for name in (hf, *copies.get(hf, ()))]
            exchange = _Exchange(models, param, facts)
            pieces = exchange.collect(live, {writer_of[name] for name in targets})
            if pieces is None:
                continue
            for hf, tensor in zip(param.hf_names(), exchange.to_hf(pieces), strict=True):
                data = _bytes(tensor)
                start = (param.expert or 0) * len(data) if param.stacked else 0
                for name in (hf, *copies.get(hf, ())):
                    if name in writers:
                        writers[name].write(name, data, start)


@contextmanager
def _writers(
    models: "VirtualModels", layout: HfLayout, folder: Path
) -> Iterator[Mapping[str, SafetensorsWriter]]:
    """This rank's open files, by the tensors in them."""
    with ExitStack() as stack:
        writers: dict[str, SafetensorsWriter] = {}
        for index, (name, tensors) in enumerate(layout.files.items()):
            if index % models.place.world_size == models.place.rank:
                plan = plan_file(folder / name, layout.specs(name), METADATA)
                writers |= dict.fromkeys(tensors, stack.enter_context(SafetensorsWriter(plan)))
        yield writers


@dataclass(frozen=True)
class _Exchange:
    """The pieces of one parameter on their way to the ranks that write it."""

    models: "VirtualModels"
    param: Param
    facts: Facts

    def collect(self, live: Mapping[str, Tensor], writers: set[int]) -> Sequence[Tensor] | None:
        """All pieces in rank order, on the ``writers``; None on other ranks."""
        me, name = self.models.place.rank, self.param.mca_name()
        owners = [_owner(self.models, self.param, rank) for rank in range(self._size())]
        pending: list[Any] = []
        if me in owners:
            own = live[name].detach().contiguous()
            pending = [torch.distributed.isend(own, writer) for writer in sorted(writers - {me})]
        pieces = None
        if me in writers:
            pieces = [live[name].detach() if owner == me else self._receive(owner) for owner in owners]
        for work in pending:
            work.wait()
        return pieces

    def _receive(self, owner: int) -> Tensor:
        code, whole = self.facts[self.param.mca_name()]
        shape = list(whole)
        if self.param.vocab:
            shape[0] = self.models.config.padded_vocab_size
        if self.param.shard.axis is not None:
            shape[self.param.shard.axis] //= self._size()
        piece = torch.empty(shape, dtype=DTYPE_OF[code], device=platform.current_device())
        torch.distributed.recv(piece, owner)
        return piece

    def _size(self) -> int:
        return cut_size(self.param, self.models.place.layout)

    def to_hf(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """The HF tensors, without vocabulary padding."""
        whole = self.param.shard.join(list(pieces))
        if self.param.vocab:
            whole = whole[: self.models.config.vocab_size]
        tensors: Sequence[Tensor] = self.param.from_whole(whole)
        return tensors


def _owner(models: "VirtualModels", param: Param, rank: int) -> int:
    """The global rank that speaks for piece ``rank`` of ``param``: the first of its replicas."""
    pp = stage_of(param, models.config.pipeline_plan())
    if param.expert is None:
        return models.place.grid.rank(tp=rank, pp=pp)
    return models.place.grid.expert_rank(etp=rank, ep=expert_rank(param, models.config), pp=pp)


def _params(models: "VirtualModels") -> list[Param]:
    return stored(family_of(models.config.model_type).params(models.config))


def _facts(models: "VirtualModels") -> Facts:
    """What every rank holds, put together: all parameters of the model."""
    mine = {
        item.param.mca_name(): (CODES[tensor.dtype], whole_shape(item.param, tensor, models.config))
        for item, tensor in models.held()
        if not item.copy
    }
    facts: Facts = {}
    for part in _all_gather(mine):
        facts |= part
    return facts


def _split(facts: Facts) -> tuple[dict[str, str], dict[str, Shape]]:
    return {name: code for name, (code, _) in facts.items()}, {
        name: shape for name, (_, shape) in facts.items()
    }


def _bytes(tensor: Tensor) -> Any:
    import numpy as np

    return to_numpy(tensor).reshape(-1).view(np.uint8)


def _all_gather(value: Any) -> list[Any]:
    """``value`` of every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def _shared_directory(directory: Path, overwrite: bool) -> Iterator[Path]:
    """A partial directory that rank 0 owns and all write into; published when every rank is done."""
    first = torch.distributed.get_rank() == 0
    partial, fault = None, None
    if first:
        try:
            partial = PartialDirectory(directory, overwrite=overwrite)
        except Exception as error:  # every rank must raise, or the others wait forever
            fault = error
    shared: list[Any] = [None if partial is None else str(partial.path), fault]
    torch.distributed.broadcast_object_list(shared, 0)
    if shared[1] is not None:
        raise shared[1]
    try:
        yield Path(shared[0])
        torch.distributed.barrier()  # every file is written and synced
    except BaseException:
        if partial is not None:
            partial.discard()
        raise
    if partial is not None:
        partial.publish()
    torch.distributed.barrier()


def _write_config(models: "VirtualModels", folder: Path) -> None:
    text = json.dumps(config_to_hf(models.config), indent=2, ensure_ascii=False)
    write_file(folder / CONFIG, text.encode() + b"\n")


def _copy_side_files(models: "VirtualModels", folder: Path) -> None:
    if models.source is not None and models.source.is_dir():
        copy_side_files(models.source, folder)
