"""Checkpoints of ROLL's mcore_adapter, format "legacy": one ``torch.save`` for each model-parallel rank.

    <dir>/mca_config.json                       flat; read by mca_config
          latest_checkpointed_iteration.txt     "1"
          iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

TT is the dense tensor rank, PPP the pipeline rank (left out at pipeline size 1), EEE the expert rank
(left out at expert size 1); the expert tensor rank is not in the name. Only the ranks with expert data
parallel rank 0 write: of the ranks 0, 1, ... of one pipeline stage the first ``etp x ep``, where rank r
is tensor rank ``r mod tp`` and expert rank ``r div etp``. So with experts cut otherwise than the dense
part some files can be missing, or two ranks can have written to one; such layouts are refused.

A file holds ``{"model": state dict}``, or ``{"model0": ..., "model1": ...}`` with virtual stages: the
rank's own live names (see ``names``). Its tensors may be views that carry their whole storage.
Every expert rank repeats the dense parameters, a tied or predicting last stage the embedding.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mca_config.errors import McaError
from mca_config.files import has_entry, read_json, read_text, resolve_inside
from mca_config.layout import ParallelLayout
from mca_config.model_config import FILE_NAME, McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.checkpoint.mca_directory import iteration_name, latest_iteration, load_config
from mca_models.checkpoint.placement import stored_params
from mca_models.storage.lazy_tensor import StridedTensor
from mca_models.storage.source import name_differences
from mca_models.templates import config_from_hf, get_family
from mca_models.torch_checkpoint.source import (
    ForeignSource,
    StoredParam,
    grouped_expert,
    locate_param,
    with_stored_dtype,
)
from mca_models.torch_checkpoint.storage_forms import NamedParam, NameVariant, named_params
from mca_models.torch_checkpoint.torch_file import TorchFile, open_torch_file
from mca_models.weights import Param

WEIGHTS = "model_optim_rng.pt"
_MOST_RANKS = 1 << 18
LATEST = "latest_checkpointed_iteration.txt"
_RANK_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")


class RankPosition(NamedTuple):
    """The rank that wrote a file."""

    tp: int
    pp: int
    ep: int
    etp: int


def is_roll(path: Path) -> bool:
    """Return whether directory ``path`` is such a checkpoint."""
    try:
        folder = _iteration(path)
    except McaError:
        return False
    return has_entry(path, FILE_NAME) and any(folder.glob(f"mp_rank_*/{WEIGHTS}"))


def open_roll(path: Path) -> ForeignSource:
    """The checkpoint in directory ``path``, found complete.

    Raises:
        McaError: Files or tensors are missing, unexpected, damaged or of another shape.
    """
    config = read_config(path)
    folder = _iteration(path)
    files = rank_files(config.layout)
    _require_files(folder, files)
    params = get_family(config.model_type).params(config)
    found = _RankFiles(config, params)
    for name, at in files.items():
        found.add(at, open_torch_file(resolve_inside(path, f"{folder.name}/{name}/{WEIGHTS}")))
    if found.faults:
        raise McaError("\n  ".join([f"{folder}: {len(found.faults)} faults", *found.faults[:20]]))
    places = {param.mca_name(): found.stored_param(param) for param in stored_params(params)}
    return ForeignSource(path, with_stored_dtype(config, places), stored_params(params), places)


def read_config(path: Path) -> McaModelConfig:
    """The configuration of the checkpoint in ``path``.

    mcore_adapter's file is a dump of Megatron's fields and does not name all that a family needs; the HF
    config inside it does.
    """
    config = McaModelConfig.load(path)
    document = read_json(resolve_inside(path, FILE_NAME))
    if "mca_version" in document or config.hf_config.get("model_type") != config.model_type:
        return load_config(path)
    try:
        named = config_from_hf(config.hf_config)
    except McaError as error:
        raise McaError(f"{path / FILE_NAME}: hf_config_json: {error}") from None
    return named.replace_fields(
        dtype=config.dtype,
        layout=config.layout,
        mtp_num_layers=config.mtp_num_layers,
        tie_word_embeddings=config.head.tie_word_embeddings,
    )


def rank_files(layout: ParallelLayout) -> dict[str, RankPosition]:
    """Return the folder of every rank that writes one, with the rank's position.

    Raises:
        McaError: The layout is one of which such a checkpoint holds only a part.
    """
    files: dict[str, RankPosition] = {}
    if layout.expert_model_size > _MOST_RANKS:
        raise _incomplete(layout, f"there would be {layout.expert_model_size} files")
    for pp in range(layout.pp):
        for rank in range(layout.etp * layout.ep):
            at = RankPosition(rank % layout.tp, pp, rank // layout.etp, rank % layout.etp)
            name = _folder_name(layout, at)
            if name in files:
                raise _incomplete(layout, f"two ranks wrote to {name}")
            files[name] = at
    if layout.etp * layout.ep < layout.tp:
        raise _incomplete(layout, "some tensor ranks wrote nothing")
    return files


def _folder_name(layout: ParallelLayout, at: RankPosition) -> str:
    pipeline = f"_{at.pp:03d}" if layout.pp > 1 else ""
    expert = f"_{at.ep:03d}" if layout.ep > 1 else ""
    return f"mp_rank_{at.tp:02d}{pipeline}{expert}"


def _incomplete(layout: ParallelLayout, why: str) -> McaError:
    return McaError(
        f"{FILE_NAME}: at {layout} mcore_adapter does not store the whole model ({why}); save it there with "
        "ckpt_format torch_dist, or with expert_tensor_parallel_size equal to the tensor-parallel one"
    )


def _iteration(path: Path) -> Path:
    text = read_text(resolve_inside(path, LATEST)).strip()
    return path / ("release" if text == "release" else iteration_name(latest_iteration(path)))


def _require_files(folder: Path, files: Iterable[str]) -> None:
    present = [entry.name for entry in folder.glob("mp_rank_*") if _RANK_FOLDER.fullmatch(entry.name)]
    if faults := name_differences(present, files, "rank"):
        raise McaError(f"{folder}: {faults}; {FILE_NAME} has another layout")


@dataclass
class _RankFiles:
    """Shards of all parameters, collected file by file."""

    config: McaModelConfig
    params: list[Param]

    def __post_init__(self) -> None:
        self.plan = self.config.pipeline_plan()
        self.own: dict[str, dict[int, list[StridedTensor]]] = {}  # by name and (expert) tensor rank
        self.copies: dict[str, dict[int, list[StridedTensor]]] = {}
        self.faults: list[str] = []

    def add(self, at: RankPosition, saved: TorchFile) -> None:
        """Add every tensor of one rank's file."""
        chunks = self.plan.chunks[at.pp]
        for chunk in chunks:
            key = f"model{chunk.vp}" if len(chunks) > 1 else "model"
            self._add_chunk(at, chunk, saved.state_dict(key), f"{saved.file} {key}")

    def _add_chunk(
        self, at: RankPosition, chunk: PipelineChunk, tensors: Mapping[str, StridedTensor], where: str
    ) -> None:
        expected: set[str] = set()
        for held in named_params(self.params, self.config, chunk, at.ep):
            found = [spelling for spelling in held.names if spelling.name in tensors]
            expected.update(spelling.name for spelling in found)
            if len(found) == 1:
                self._take(at, held, _tensor(held, found[0], tensors, self.config))
            elif found:
                self.faults.append(f"{where}: one parameter twice ({', '.join(name for name, _ in found)})")
            elif not held.optional:
                expected.add(held.names[0].name)
        if differences := name_differences(tensors, expected):
            self.faults.append(f"{where}: {differences}")

    def _take(self, at: RankPosition, held: NamedParam, tensor: StridedTensor) -> None:
        param = held.param
        rank = at.tp if param.expert is None else at.etp
        table = self.copies if held.optional else self.own
        name = param.alias_of or param.mca_name()
        table.setdefault(name, {}).setdefault(rank, []).append(replace(tensor, name=param.mca_name()))

    def stored_param(self, param: Param) -> StoredParam:
        """Return the tensors of ``param``, its copies on other ranks and stages included."""
        name = param.mca_name()
        by_rank = self.own[name]
        ranks = sorted(by_rank)
        place = locate_param(param, self.config, [by_rank[rank][0] for rank in ranks])
        copies = [(by_rank[rank][0], other) for rank in ranks for other in by_rank[rank][1:]]
        for rank, others in self.copies.get(name, {}).items():
            copies += [(by_rank[rank][0], other) for other in others]
        return replace(place, copies=(*place.copies, *copies))


def _tensor(
    held: NamedParam, spelling: NameVariant, tensors: Mapping[str, StridedTensor], config: McaModelConfig
) -> StridedTensor:
    """The tensor of ``held`` under the name it was found by."""
    tensor = tensors[spelling.name]
    if spelling.expert is None:
        return tensor
    count = (config.num_experts) // config.layout.ep
    return grouped_expert(tensor, spelling.expert, count, first=".linear_fc1." in held.param.mca)
