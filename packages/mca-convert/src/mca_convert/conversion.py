"""A conversion from one directory to another: planned and checked for completeness, then executed by `engine`."""

import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_convert.engine import Engine
from mca_convert.fills import Fill, fills_to_hf, fills_to_mca, source_dtypes, target_dtypes
from mca_convert.non_finite import (
    Notes,
    RefusedParam,
    count_by_name,
    non_finite_error,
    non_finite_warning,
    search,
)
from mca_convert.pool import ByteCounter, Limits, Progress, allow_open_files
from mca_convert.reader import SourceFiles
from mca_convert.request import Request, conversion_target, target_layout
from mca_models.checkpoint.hf_writer import MAX_SHARD_BYTES, METADATA, HfLayout
from mca_models.checkpoint.mca_directory import McaLayout, iteration_name
from mca_models.checkpoint.side_files import (
    copy_side_files,
    different_tokenizer,
    foreign_entry,
    is_checkpoint,
    side_files,
    side_names,
)
from mca_models.checkpoint_kinds import checkpoint_kind, open_checkpoint
from mca_models.storage.atomic import AtomicDirectory, require_absent, require_free
from mca_models.storage.dtypes import DTYPE_NAMES
from mca_models.storage.manifest import FileRecord
from mca_models.storage.safetensors import FilePlan, plan_file
from mca_models.storage.source import ModelSource

logger = logging.getLogger(__name__)
_LONGEST_NAME = 255 - len(".partial-01234567")  # of the folder in which the files are written
_BLOCK = 4096  # bytes; the most common block of file systems


@dataclass(frozen=True)
class Conversion:
    """A planned conversion with all tensors to write; planning writes nothing.

    Args:
        source: The opened checkpoint.
        target: The layout of the new one.
        fills: Every target tensor and where it comes from.
        prefix: Subdirectory of the weight files in the target directory.
    """

    source: ModelSource
    target: McaLayout | HfLayout
    fills: list[Fill]
    prefix: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that will be written."""
        return sum(fill.nbytes for fill in self.fills)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files that will be written, in blocks of the disk."""
        sizes = {name: plan.nbytes for name, plan in self.file_plans(Path()).items()}
        if isinstance(self.target, McaLayout):
            small = self.target.small_files({name: FileRecord(size, 0) for name, size in sizes.items()})
        else:
            small = self.target.small_files()
        return bytes_on_disk([*sizes.values(), *map(len, small.values())], self.source.path)

    def file_plans(self, directory: Path) -> dict[str, FilePlan]:
        """Return the plans of the target files in ``directory``."""
        metadata = METADATA if isinstance(self.target, HfLayout) else None
        return {
            name: plan_file(directory / self.prefix / name, self.target.specs(name), metadata)
            for name in self.target.files
        }

    @property
    def kind(self) -> Literal["mca", "hf"]:
        """The target."""
        return "mca" if isinstance(self.target, McaLayout) else "hf"

    @property
    def open_files(self) -> int:
        """Files that are open at once."""
        return len(self.target.files) + len({info.file for info in self.source.tensors()})

    def run(
        self,
        destination: Path,
        limits: Limits,
        progress: Progress | None = None,
        *,
        overwrite: bool = False,
        require_replaceable: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write the new checkpoint; ``destination`` is complete or absent.

        Args:
            destination: Absent, or an empty directory, or with ``overwrite`` any.
            limits: Threads and memory.
            progress: See `Progress`; called with 0 before the first file is made, and before the result is put in
                place.
            overwrite: Replace the contents of ``destination``.
            require_replaceable: Called before that; raises if they must be kept.

        Raises:
            McaError: The destination exists, a file cannot be read or written, or the conversion computes values from
                NaN or infinite ones.
        """
        allow_open_files(self.open_files)
        self.source.check_duplicates()
        # before there is anything to remove, because this can raise an error
        needed = self.disk_bytes
        counter = ByteCounter(self.nbytes, progress)
        counter.check()
        partial = AtomicDirectory(destination, overwrite=overwrite, require_replaceable=require_replaceable)
        with partial.writing(needed) as path:
            records = self._write_weights(path, limits, counter)
            files = {str(Path(self.prefix, name)): record.nbytes for name, record in records.items()}
            files |= copy_side_files(self.source.path, path)
            if isinstance(self.target, McaLayout):
                files |= self.target.finish(path, records)
            else:
                files |= self.target.finish(path)
            counter.check()
            partial.publish(files)
        return destination

    def _write_weights(self, directory: Path, limits: Limits, counter: ByteCounter) -> dict[str, FileRecord]:
        sources = SourceFiles(self.source.checksums())
        to_mca, notes = isinstance(self.target, McaLayout), Notes(self.source, self.fills)
        plans = self.file_plans(directory)
        try:
            engine = Engine(plans, sources, limits, checksum=to_mca, progress=counter.add, note=notes.note)
            records = engine.run(self.fills)
            sources.check(limits.workers, counter.check)
        except RefusedParam as refused:
            casts = notes.casts()
            (first, *_) = search(self.source, [refused.param], limits, casts=casts, proceed=counter.check)
            raise non_finite_error(first, notes.work or "", casts.get(refused.param.mca_name(), "")) from None
        finally:
            sources.close()
        if notes.params:
            found = search(self.source, list(notes.params.values()), limits, proceed=counter.check)
            logger.warning("%s", non_finite_warning(self.source.path, count_by_name(found)))
        return records


def bytes_on_disk(sizes: Iterable[int], source: Path, replaced: Collection[str] = ()) -> int:
    """Return the bytes that files of ``sizes`` and the side files of ``source`` occupy, in blocks of the disk.

    One more is for the marker of the folder in which they are written.

    Args:
        sizes: Sizes of the written files.
        source: The source.
        replaced: Names of side files that are written with other content.
    """
    copied = (file.stat().st_size for file in side_files(source) if file.name not in replaced)
    sizes = [*sizes, *copied, 1]
    return sum(-(-size // _BLOCK) * _BLOCK for size in sizes)


def plan_conversion(request: Request) -> Conversion:
    """Plan the conversion of a model, with an adapter merged into it if requested.

    Raises:
        OptionsError: The options exclude each other.
        McaError: The source is incomplete or damaged, or cannot be converted in this way.
    """
    path = request.require_checkpoint()
    target = conversion_target(request, from_megatron=checkpoint_kind(path).is_megatron)
    source = open_checkpoint(path, request.cast)
    if request.adapter is not None:
        source = _merged(source, request.adapter, request.cast)
    if target == "hf":
        return plan_to_hf(source, request.cast, request.max_shard_bytes, fp8=request.fp8)
    return plan_to_mca(source, target_layout(request.layout, source.config.layout), request.cast)


def _merged(base: ModelSource, adapter: Path, cast: str | None) -> ModelSource:
    from mca_models.lora import MergedSource, open_adapter

    if names := different_tokenizer(base.path, adapter):
        logger.info(
            "tokenizer files are copied from the base model; those of %s that differ (%s) are not used",
            adapter,
            ", ".join(names),
        )
    return MergedSource(base, open_adapter(adapter, base.config), cast)


def plan_to_mca(source: ModelSource, layout: ParallelLayout, cast: str | None = None) -> Conversion:
    """Plan a conversion to an MCA checkpoint of ``layout``; ``cast`` is a dtype code."""
    config = replace(_with_dtype(source.config, cast), layout=layout)
    found = source_dtypes(source)
    target = McaLayout(source.params, config, target_dtypes(source.params, found, cast), _full_shapes(source))
    for file in target.files:
        target.specs(file)  # finds what does not divide, naming the flag
    return Conversion(source, target, list(fills_to_mca(source, target, found)), iteration_name(1))


def plan_to_hf(
    source: ModelSource,
    cast: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    fp8: bool = False,
) -> Conversion:
    """Plan a conversion to a Hugging Face checkpoint.

    Args:
        source: The opened checkpoint.
        cast: Dtype code; None keeps dtypes.
        max_shard_bytes: Largest file.
        fp8: Write the weights of linear layers as fp8 blocks.
    """
    config = _with_dtype(source.config, cast)
    found = source_dtypes(source)
    dtypes = target_dtypes(source.params, found, cast)
    target = HfLayout(source.params, config, dtypes, _full_shapes(source), max_shard_bytes, fp8=fp8)
    return Conversion(source, target, list(fills_to_hf(source, target, found)))


def _full_shapes(source: ModelSource) -> dict[str, tuple[int, ...]]:
    return {param.mca_name(): source.full_shape(param) for param in source.params}


def _with_dtype(config: McaModelConfig, cast: str | None) -> McaModelConfig:
    if cast is None:
        return config
    names: dict[str, object] = {"dtype": DTYPE_NAMES[cast]}
    return replace(config, **names)  # type: ignore[arg-type]


def require_adapter(path: Path) -> None:
    """Raise `McaError` if directory ``path`` has no LoRA adapter."""
    if not checkpoint_kind(path).is_adapter:
        raise McaError(
            f"--adapter_path {path}: no adapter_config.json is there; expected a PEFT or MCA adapter directory"
        )


def require_free_destination(sources: Iterable[Path], destination: Path, *, overwrite: bool = False) -> None:
    """Raise `McaError` if ``destination`` exists, or with ``overwrite`` has other files than a checkpoint."""
    sources = tuple(sources)
    name = os.fsencode(os.path.abspath(destination)).rpartition(b"/")[2]  # noqa: PTH100
    if len(name) > _LONGEST_NAME:
        raise McaError(
            f"--output_path {destination}: its name has {len(name)} bytes, more than {_LONGEST_NAME}; "
            "choose a shorter one"
        )
    try:
        require_absent(destination)
    except McaError as error:
        fault = _overwrite_problem(destination, sources) if destination.is_dir() else ""
        if not overwrite or not destination.is_dir():
            hint = "; --overwrite replaces the checkpoint there" if fault is None else ""
            raise McaError(f"--output_path {error}{hint}") from None
        if fault is not None:
            raise McaError(
                f"--output_path {destination}: {fault}, so --overwrite does not replace it; remove it or name another "
                "directory"
            ) from None
        try:
            require_free(destination, overwrite=True)
        except McaError as error:
            raise McaError(f"--output_path {error}") from None
    output = destination.resolve()
    for source in sources:
        for above, below, what in (
            (output, source.resolve(), "contains"),
            (source.resolve(), output, "is inside"),
        ):
            if below.is_relative_to(above):
                raise McaError(
                    f"--output_path {destination}: {what} the source {source}; name another directory"
                )


def _overwrite_problem(destination: Path, sources: Iterable[Path]) -> str | None:
    """Return why ``destination`` must not be replaced; None if it has only files of a checkpoint."""
    if not is_checkpoint(destination):
        return "has no checkpoint"
    copied = {name for source in sources if source.is_dir() for name in side_names(source)}
    foreign = foreign_entry(destination, copied)
    return None if foreign is None else f"has {foreign}, which is not part of a checkpoint"
