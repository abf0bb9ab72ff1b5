"""An MCA checkpoint directory (design: one file of dense and one of expert pieces for each rank).

<dir>/mca_config.json
      latest_checkpointed_iteration.txt
      iter_0000001/manifest.json, pp_000/tp_00.safetensors, pp_000/ep_000_etp_00.safetensors, ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from mca_config.checks import check_layout, require_layout
from mca_config.errors import McaError, with_location
from mca_config.files import has_entry, read_text, resolve_inside
from mca_config.layout import ParallelLayout
from mca_config.model_config import FILE_NAME as CONFIG
from mca_config.model_config import McaModelConfig
from mca_config.types import Typed
from mca_models.checkpoint.hf_directory import CONFIG as CONFIG_OF_HF
from mca_models.checkpoint.hf_writer import config_text
from mca_models.checkpoint.placement import (
    expert_rank,
    shard_count,
    shard_files,
    shards_by_file,
    stored_params,
)
from mca_models.storage.atomic import write_file
from mca_models.storage.byte_ranges import Shape
from mca_models.storage.copy_plan import Rule, Side, part_shapes
from mca_models.storage.manifest import FILE_NAME as MANIFEST
from mca_models.storage.manifest import FileRecord, Manifest, TensorRecord
from mca_models.storage.safetensors import TensorInfo, read_header
from mca_models.storage.source import (
    ModelSource,
    Part,
    checked_parts,
    first_few,
    require_full_shape,
    require_same_names,
)
from mca_models.templates import get_family
from mca_models.templates.parts.passthrough import PASSTHROUGH
from mca_models.templates.parts.vision_tower import MORE, SPELLING
from mca_models.weights import Param

LATEST = "latest_checkpointed_iteration.txt"
_MOST_DIGITS = 18
_MOST_PIECES = 1 << 21


def iteration_name(iteration: int) -> str:
    """Directory of one iteration, relative to the checkpoint."""
    return f"iter_{iteration:07d}"


class McaSource(ModelSource):
    """An MCA directory, opened: every file and piece that its configuration and manifest demand is there.

    Args:
        path: The directory.

    Raises:
        McaError: Something is missing, unexpected, damaged or of another shape.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: McaModelConfig = load_config(path)
        self.iteration = latest_iteration(path)
        self.folder = path / iteration_name(self.iteration)
        self.manifest = Manifest.load(self.folder)
        self.params: Sequence[Param] = stored_params(get_family(self.config.model_type).params(self.config))
        self._infos = self._read_headers()
        names = [param.mca_name() for param in self.params]
        require_same_names(self.manifest.tensors.keys(), names, self.folder / MANIFEST)
        plan = self.config.pipeline_plan()
        self._parts = {
            name: self._checked(param, shard_files(param, self.config, plan))
            for name, param in zip(names, self.params, strict=True)
        }

    def _read_headers(self) -> dict[str, dict[str, TensorInfo]]:
        layout, count = self.config.layout, len(self.manifest.files)
        experts = layout.ep * layout.etp if self.config.num_experts else 1
        # with fewer files than ranks there is no need to think up the names of all
        expected = shards_by_file(self.params, self.config) if max(layout.tp, experts) <= count else {}
        if self.manifest.files.keys() != expected.keys():
            faults = first_few(self.manifest.files.keys() ^ expected.keys())
            raise McaError(
                f"{self.folder / MANIFEST}: its files are not those of layout {self.config.layout} ({faults})"
            )
        infos = {}
        for name, record in self.manifest.files.items():
            file = resolve_inside(self.path, f"{self.folder.name}/{name}")
            header = read_header(file)
            if file.stat().st_size != record.nbytes:
                raise McaError(
                    f"{file}: has {file.stat().st_size} bytes, the manifest says {record.nbytes}"
                    "; the file is damaged: write or fetch the checkpoint again"
                )
            require_same_names(header.tensors, (param.mca_name() for param, _ in expected[name]), file)
            infos[name] = header.tensors
        return infos

    def _checked(self, param: Param, files: Sequence[str]) -> tuple[Part, ...]:
        name = param.mca_name()
        record = self.manifest.tensors[name]
        infos = [self._infos[file][name] for file in files]
        if record.files != tuple(files) or any(info.dtype != record.dtype for info in infos):
            raise McaError(
                f"{self.folder / MANIFEST}: {name} differs from what its files hold; they are damaged"
            )
        require_full_shape(param, record.shape, self.config, self.folder)
        side = shard_count(param, self.config.layout)
        return checked_parts(param, record.shape, side, infos, self.config.num_experts)

    def tensors(self) -> Iterable[TensorInfo]:
        """Yield every stored shard."""
        for infos in self._infos.values():
            yield from infos.values()

    def checksums(self) -> Mapping[Path, int]:
        """Return the checksums of the manifest."""
        return {self.folder / name: record.crc32 for name, record in self.manifest.files.items()}

    def side(self, param: Param) -> Side:
        """Return the side of ``param``'s rule that its parts are on."""
        return shard_count(param, self.config.layout)

    def parts(self, param: Param) -> tuple[Part, ...]:
        """Return the parts that hold ``param``, in the side's order."""
        return self._parts[param.mca_name()]

    def full_shape(self, param: Param) -> Shape:
        """Return the full shape of ``param``, without vocabulary padding."""
        return self.manifest.tensors[param.mca_name()].shape


def load_config(path: Path) -> McaModelConfig:
    """The model that ``mca_config.json`` of directory ``path`` describes, found to be one of its family.

    Raises:
        McaError: It is missing or damaged, or no such model can be.
    """
    config = McaModelConfig.load(path)
    try:
        _require_extra(config)
        get_family(config.model_type).require_family(config)
    except McaError as error:
        raise with_location(error, path / CONFIG) from None
    return config


def _require_extra(config: McaModelConfig) -> None:
    """Raise unless the keys of ``extra`` that have a structure have it."""
    vision = get_family(config.model_type).vision
    spellings = range(len(vision.spellings) if vision is not None else 1)
    expected: dict[str, tuple[str, Callable[[Typed], bool]]] = {
        "hf_duplicates": ("a list of names", _is_list(str)),
        PASSTHROUGH: ("an object of shapes", _is_shapes),
        MORE: ("an object of shapes", _is_shapes),
        SPELLING: (
            f"a number from 0 to {spellings[-1]}",
            lambda value: type(value) is int and value in spellings,
        ),
    }
    for key, (words, is_right) in expected.items():
        if key in config.extra and not is_right(config.extra[key]):
            raise McaError(f"extra: {key} must be {words}, not {config.extra[key]!r:.80}; restore the file")


def _is_list(kind: type) -> Callable[[Typed], bool]:
    return lambda value: isinstance(value, list | tuple) and all(type(entry) is kind for entry in value)


def _is_shapes(value: Typed) -> bool:
    return isinstance(value, dict) and all(
        _is_list(int)(shape) and min(shape, default=0) >= 0 for shape in value.values()
    )


def is_mca(path: Path) -> bool:
    """Return whether ``path`` looks like an MCA checkpoint rather than a Hugging Face one."""
    return has_entry(path, CONFIG)


def latest_iteration(path: Path) -> int:
    """The iteration that ``latest_checkpointed_iteration.txt`` names."""
    text = read_text(resolve_inside(path, LATEST), "the checkpoint is incomplete, write it again").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise McaError(f"{path / LATEST}: {text!r:.40} cannot be read as the number of an iteration")
    return int(text)


def shard_shapes(param: Param, whole: Shape, layout: ParallelLayout) -> tuple[Shape, ...]:
    """The shapes of the pieces of ``param`` in rank order.

    Raises:
        McaError: It does not divide.
    """
    try:
        return part_shapes(Rule.from_param(param), whole, shard_count(param, layout))
    except ValueError as error:
        flag = "tensor_model_parallel_size" if param.expert is None else "expert_tensor_parallel_size"
        raise McaError(
            f"{param.mca_name()} of shape {list(whole)} cannot be cut as {layout}: {error}; "
            f"choose another --{flag}"
        ) from None


def _too_many_pieces(params: Iterable[Param], layout: ParallelLayout) -> list[str]:
    """Why a layout is not even thought through: the names of its pieces would fill all memory."""
    pieces = sum(shard_count(param, layout) for param in params)
    if pieces <= _MOST_PIECES:
        return []
    return [f"{layout} cuts the model into {pieces} pieces, more than {_MOST_PIECES}; choose smaller sizes"]


def layout_faults(params: Iterable[Param], config: McaModelConfig, wholes: Mapping[str, Shape]) -> list[str]:
    """All reasons why a model cannot be laid out as ``config.layout`` says, similar parameters reported once."""
    params = stored_params(params)
    if problems := [*check_layout(config, config.layout), *_too_many_pieces(params, config.layout)]:
        return problems
    faults: dict[object, str] = {}

    def attempt(key: object, check: Callable[[], object]) -> None:
        try:
            check()
        except McaError as error:
            faults.setdefault(key, str(error))

    attempt("pipeline", config.pipeline_plan)
    for param in params:
        if param.expert is not None:
            attempt("experts", partial(expert_rank, param, config))
        whole = wholes[param.mca_name()]
        attempt(
            (Rule.from_param(param), whole, param.expert is None),
            partial(shard_shapes, param, whole, config.layout),
        )
    return list(dict.fromkeys(faults.values()))


class McaLayout:
    """The names, types and shapes of an MCA checkpoint that is to be written, before any byte is.

    Args:
        params: All parameters of the model.
        config: With the target layout.
        dtypes: Safetensors code of each stored parameter, by canonical name.
        wholes: Whole shape of each, without vocabulary padding.

    Raises:
        McaError: The layout does not divide the model.
    """

    def __init__(
        self,
        params: Iterable[Param],
        config: McaModelConfig,
        dtypes: Mapping[str, str],
        wholes: Mapping[str, Shape],
    ) -> None:
        require_layout(config, config.layout)
        self.params, self.config = stored_params(params), config
        for problem in _too_many_pieces(self.params, config.layout):
            raise McaError(problem)
        self._config_text = config_text(config)
        self.dtypes, self.wholes = dtypes, wholes
        self.files = shards_by_file(self.params, config)
        self._specs: dict[str, list[tuple[str, str, Shape]]] = {}

    def piece_shape(self, param: Param, rank: int) -> Shape:
        """The shape of the piece that ``rank`` holds."""
        return shard_shapes(param, self.wholes[param.mca_name()], self.config.layout)[rank]

    def specs(self, file: str) -> list[tuple[str, str, Shape]]:
        """Return the arguments of ``plan_file`` for ``file``: (name, dtype code, shape)."""
        if file not in self._specs:
            self._specs[file] = [
                (param.mca_name(), self.dtypes[param.mca_name()], self.piece_shape(param, rank))
                for param, rank in self.files[file]
            ]
        return self._specs[file]

    @cached_property
    def manifest_tensors(self) -> dict[str, TensorRecord]:
        """The tensors of the manifest."""
        plan = self.config.pipeline_plan()
        return {
            name: TensorRecord(self.dtypes[name], self.wholes[name], shard_files(param, self.config, plan))
            for name, param in ((param.mca_name(), param) for param in self.params)
        }

    def finish(self, directory: Path, records: Mapping[str, FileRecord]) -> dict[str, int]:
        """Write everything but the pieces into ``directory``, once all files are written and synced.

        ``config.json`` goes along, for tokenizers and other readers of the Hugging Face directory layout.

        Args:
            directory: The (partial) checkpoint directory.
            records: Size and checksum of every file, by its name relative to the iteration.

        Returns:
            The size of each file that was written, by its name.
        """
        require_same_names(records.keys(), self.files.keys(), directory)
        small = self.small_files(records)
        return {name: write_file(directory / name, content) for name, content in small.items()}

    def small_files(self, records: Mapping[str, FileRecord]) -> dict[str, bytes]:
        """Return the contents of the files that `finish` writes, by name, the one that readers look for last."""
        return {
            f"{iteration_name(1)}/{MANIFEST}": Manifest(records, self.manifest_tensors).to_json(),
            CONFIG: self.config.to_json().encode(),
            CONFIG_OF_HF: self._config_text,
            LATEST: b"1\n",
        }
