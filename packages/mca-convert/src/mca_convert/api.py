"""The functions of the package: `convert`, `verify`, `inspect` and `plan`.

Paths may be models of the Hugging Face Hub (``org/name``, ``org/name@revision``), as on the command line. Messages of
errors name an option by its flag: ``--fp8`` is the argument ``fp8``.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mca_config.arguments import DistributingParallelArguments
from mca_config.errors import McaError, UsageError
from mca_config.layout import ParallelLayout
from mca_config.printable import counted
from mca_convert.pool import LEAST_MEMORY, ByteCounter, Limits, default_workers, require_count
from mca_convert.request import MAX_SHARD_BYTES, Request, conversion_target, target_layout
from mca_models.hub import headers_only, is_hub_id, resolve_directory

if TYPE_CHECKING:
    from mca_convert.compare import Comparison
    from mca_convert.conversion import Conversion
    from mca_convert.forecast import ConversionPlan
    from mca_convert.inspection import Inspection

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """A finished conversion."""

    path: Path
    """The new directory."""
    target: Literal["mca", "hf"]
    model_type: str
    layout: ParallelLayout | None
    """Layout of an MCA target; None for Hugging Face."""
    is_adapter: bool
    """True if a LoRA adapter was converted."""
    tensors: int
    """Number of tensors written; of an adapter the number of its parameters."""
    files: int
    """Number of files with weights."""
    nbytes: int
    """Bytes of weights."""
    seconds: float
    """Wall-clock time, without that of planning."""


def convert(
    src: str | Path | None,
    dst: str | Path,
    *,
    to: Literal["mca", "hf"] | None = None,
    layout: ParallelLayout | DistributingParallelArguments | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    fp8: bool = False,
    adapter_path: str | Path | None = None,
    merge: bool = False,
    max_shard_size: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionResult:
    """Convert a checkpoint between Hugging Face and MCA, or between MCA layouts.

    The new directory is complete or absent. Without ``dtype`` and ``fp8`` every element keeps its bits.

    Args:
        src: The checkpoint: Hugging Face, MCA, ROLL or Megatron ``torch_dist``. With ``adapter_path``: the adapter's
            base model, or None for an MCA adapter that is not merged.
        dst: The new directory; absent or empty, unless ``overwrite``.
        to: The target. None: ``hf`` from Megatron's checkpoints and merged models, else ``mca``.
        layout: Layout of an MCA target. None: the source's, else all sizes 1. Sizes of
            `mca_config.DistributingParallelArguments` that are None are the source's too.
        dtype: Dtype of floating-point weights. None: they keep theirs. Weights that stay fp32 (router biases) are cast
            only by ``fp32``.
        fp8: Write the linear weights of a Hugging Face target as e4m3 with an fp32 scale per block of 128 x 128.
        adapter_path: A LoRA adapter of PEFT or MCA to convert instead of the model.
        merge: Merge that adapter into the base model, and write the model.
        max_shard_size: Bytes of the largest file of a Hugging Face target.
        overwrite: Replace a checkpoint at ``dst`` once the new one is complete.
        workers: Number of threads. None: one per processor, at most 8, within ``memory_limit``.
        memory_limit: Bytes of all buffers, at least 192 KiB per thread. None: 3 MB per thread, and up to
            320 MiB in all for weights that are merged or dequantised.
        progress: Called with the bytes done and in all, by one thread at a time; may raise an error to stop. The first
            call comes before the first file is made, the last before ``dst`` is put in place. Of an adapter both are 0.

    Returns:
        The conversion: sizes, target and time.

    Raises:
        McaError: The source is incomplete or damaged, the options exclude each other, or ``dst`` cannot be written.

    Example:
        ```python
        from mca_config import ParallelLayout
        from mca_convert import convert, verify

        convert("Qwen3-8B", "qwen3-mca", layout=ParallelLayout(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=4))
        convert("qwen3-mca", "qwen3-hf")
        assert verify("Qwen3-8B", "qwen3-hf").same
        ```
    """
    with _system_errors():
        from mca_convert.conversion import plan_conversion, require_adapter, require_free_destination

        request = Request(
            checkpoint=_path(src),
            destination=_path(dst),
            to=to,
            layout=layout,
            dtype=dtype,
            fp8=fp8,
            adapter=_path(adapter_path),
            merge=merge,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
            limits=_limits(workers, memory_limit),
        )
        destination = Path(dst)
        sources = [Path(path) for path in (adapter_path, src) if path is not None]
        require_free = partial(require_free_destination, sources, destination, overwrite=overwrite)
        require_free()
        if request.adapter is not None:
            require_adapter(adapter := resolve_directory(request.adapter))
            request = replace(request, adapter=adapter)
        if request.checkpoint is not None:
            request = replace(request, checkpoint=resolve_directory(request.checkpoint))
        if request.adapter is not None and not merge:
            _warn_about_limits(workers, memory_limit)
            return _convert_adapter(request, request.adapter, destination, progress, require_free)
        return _convert_model(request, plan_conversion(request), destination, progress, require_free)


def plan(
    src: str | Path | None,
    dst: str | Path | None = None,
    *,
    to: Literal["mca", "hf"] | None = None,
    layout: ParallelLayout | DistributingParallelArguments | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    fp8: bool = False,
    adapter_path: str | Path | None = None,
    merge: bool = False,
    max_shard_size: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    values: bool = False,
) -> "ConversionPlan":
    """Plan a conversion: its files, sizes and memory, and the errors that it would raise. Nothing is written.

    The arguments are those of `convert`. Without ``dst`` neither its path nor the free space are checked. Of a model of
    the Hub only the headers of weights are fetched. With ``values`` all weights are read too, and values are reported
    that are not finite or that a cast makes infinite.

    Returns:
        The plan. A conversion that would fail is no exception: its errors are in ``refusals``.

    Raises:
        McaError: The options exclude each other, or the Hub cannot be reached.

    Example:
        ```python
        found = plan("Qwen/Qwen3-8B", layout=ParallelLayout(tensor_model_parallel_size=2))
        print(found.written_bytes, found.peak_bytes, found.refusals)
        ```
    """
    with _system_errors(), ExitStack() as stack:
        from mca_convert.forecast import forecast

        request = Request(
            checkpoint=_path(src),
            destination=_path(dst),
            to=to,
            layout=layout,
            dtype=dtype,
            fp8=fp8,
            adapter=_path(adapter_path),
            merge=merge,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
            limits=_limits(workers, memory_limit),
            values=values,
        )
        local: dict[str, Path | None] = {}
        names: dict[str, str] = {}
        for field, path in (("checkpoint", request.checkpoint), ("adapter", request.adapter)):
            local[field] = None if path is None else _with_headers(path, stack, names, values=values)
        found = forecast(replace(request, checkpoint=local["checkpoint"], adapter=local["adapter"]))
        found.source = _restore(found.source, names)
        found.refusals = [_restore(line, names) for line in found.refusals]
        found.notes = [_restore(line, names) for line in found.notes]
        return found


def inspect(path: str | Path, *, top: int = 5, values: bool = False) -> "Inspection":
    """Inspect a checkpoint or adapter directory: kind, model, layout, dtypes, sizes.

    Args:
        path: A directory of any kind; of a model of the Hub only headers are fetched, unless ``values``.
        top: Number of largest tensors to list.
        values: Read all weights too, and count those that are not finite.

    Returns:
        The contents; ``problem`` has the error of a checkpoint that is incomplete or damaged.

    Raises:
        McaError: There is no such directory.

    Example:
        ```python
        found = inspect("qwen3-mca")
        print(found.kind, found.sizes["layout"], found.problem)
        ```
    """
    require_count("top", top)
    with _system_errors(), ExitStack() as stack:
        from mca_convert.inspection import inspect_directory

        names: dict[str, str] = {}
        folder = _with_headers(_local_path(path), stack, names, values=values, needs_weights=True)
        found = inspect_directory(folder, top, Limits(workers=default_workers()) if values else None)
        found.path = _restore(found.path, names)
        found.problem = found.problem and _restore(found.problem, names)
        return found


def verify(
    a: str | Path,
    b: str | Path,
    *,
    tolerance: float | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> "Comparison":
    """Compare two checkpoints as models, or two LoRA adapters, tensor by tensor; formats and layouts may differ.

    Args:
        a: A checkpoint or adapter directory.
        b: The other.
        tolerance: Largest absolute difference allowed; dtypes may then differ. None: compare bits.
        workers: Number of threads. None: one per processor, at most 8, within ``memory_limit``.
        memory_limit: Bytes of all buffers, at least 192 KiB per thread. None: 3 MB per thread, and up to
            320 MiB in all for weights that are merged or dequantised.
        progress: As for `convert`; the bytes are those of ``a``.

    Returns:
        The outcome; ``same`` says whether the two are the same model, ``differences`` where they differ.

    Raises:
        McaError: A checkpoint is incomplete or damaged, or one is a model and the other an adapter.

    Example:
        ```python
        outcome = verify("Qwen3-8B", "qwen3-mca")
        for name, difference in outcome.differences.items():
            print(name, difference.index, difference.values)
        ```
    """
    limits = _limits(workers, memory_limit)
    if tolerance is not None and not 0 <= tolerance < inf:
        raise McaError(f"tolerance: expected a finite number of at least 0, not {tolerance!r}")
    with _system_errors():
        from mca_convert.compare import compare_adapters, compare_models, is_quantized
        from mca_models.checkpoint_kinds import checkpoint_kind, open_checkpoint

        paths = resolve_directory(a), resolve_directory(b)
        if any(checkpoint_kind(path).is_adapter for path in paths):
            _warn_about_limits(workers, memory_limit)
            return compare_adapters(*paths, tolerance=tolerance)
        first, second = (open_checkpoint(path) for path in paths)
        if is_quantized(first) and is_quantized(second):  # bf16 would hide small differences of scales
            first, second = (open_checkpoint(path, "F32") for path in paths)
        return compare_models(first, second, limits, tolerance=tolerance, progress=progress)


def _convert_model(
    request: Request,
    conversion: "Conversion",
    destination: Path,
    progress: Callable[[int, int], None] | None,
    require_free: Callable[[], None],
) -> ConversionResult:
    started = time.monotonic()
    conversion.run(
        destination, request.limits, progress, overwrite=request.overwrite, require_replaceable=require_free
    )
    config = conversion.target.config
    return ConversionResult(
        path=destination,
        target=conversion.kind,
        model_type=config.model_type,
        layout=config.layout if conversion.kind == "mca" else None,
        is_adapter=False,
        tensors=len({fill.tensor for fill in conversion.fills}),
        files=len(conversion.target.files),
        nbytes=conversion.nbytes,
        seconds=time.monotonic() - started,
    )


def _convert_adapter(
    request: Request,
    adapter: Path,
    destination: Path,
    progress: Callable[[int, int], None] | None,
    require_free: Callable[[], None],
) -> ConversionResult:
    from mca_config.model_config import McaModelConfig
    from mca_models.checkpoint_kinds import load_model_config
    from mca_models.lora import convert_adapter, is_mca_adapter

    started, from_mca = time.monotonic(), is_mca_adapter(adapter)
    target = conversion_target(request, from_megatron=from_mca)
    layout = target_layout(
        request.layout, McaModelConfig.load(adapter).layout if from_mca else ParallelLayout()
    )
    counter, sizes = ByteCounter(0, progress), list[int]()

    def check(written: Path) -> None:
        sizes.extend(file.stat().st_size for file in written.rglob("*.safetensors"))
        counter.check()
        require_free()  # again: another program may have written there

    counter.check()
    converted = convert_adapter(
        adapter,
        destination,
        model=None if request.checkpoint is None else load_model_config(request.checkpoint),
        to=target,
        layout=layout,
        cast=request.cast,
        overwrite=request.overwrite,
        proceed=check,
    )
    return ConversionResult(
        path=destination,
        target=target,
        model_type=converted.model.model_type,
        layout=layout if target == "mca" else None,
        is_adapter=True,
        tensors=len(converted.params),
        files=len(sizes),
        nbytes=sum(sizes),
        seconds=time.monotonic() - started,
    )


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else _local_path(name)


def _local_path(name: str | Path) -> Path:
    """Return the path ``name``, absolute if `Path` would make an id of the Hub of it, as of ``./runs/step100``."""
    path = Path(name)
    return path.absolute() if is_hub_id(path) and not is_hub_id(name) else path


def _limits(workers: int | None, memory_limit: int | None) -> Limits:
    for name, value in (("workers", workers), ("memory_limit", memory_limit)):
        if value is not None:
            require_count(name, value)
    threads = workers or default_workers()
    if memory_limit is not None:
        if workers is None:
            threads = max(1, min(threads, memory_limit // LEAST_MEMORY))
        if memory_limit < threads * LEAST_MEMORY:
            raise UsageError(
                f"--memory_limit is {counted(memory_limit, 'byte')}; expected at least "
                f"{threads * LEAST_MEMORY >> 10}KiB for {counted(threads, 'thread')}; raise it"
                + (" or lower --workers" if threads > 1 else "")
            )
    return Limits(workers=threads, memory=memory_limit)


def _warn_about_limits(workers: int | None, memory_limit: int | None) -> None:
    """Log a warning about limits of an adapter, which is read into memory by one thread."""
    values = {"--workers": workers, "--memory_limit": memory_limit}
    if names := [name for name, value in values.items() if value is not None]:
        verb = "has" if len(names) == 1 else "have"
        logger.warning(
            "%s %s no effect on an adapter; one thread reads it into memory", " and ".join(names), verb
        )


def _with_headers(
    path: Path, stack: ExitStack, names: dict[str, str], *, values: bool, needs_weights: bool = False
) -> Path:
    """Return the local directory of ``path``; of a Hub model that is a temporary one, which is noted in ``names``."""
    if values or not is_hub_id(path):
        return resolve_directory(path)
    folder = stack.enter_context(headers_only(path, needs_weights=needs_weights))
    names[str(folder)] = str(path)
    return folder


def _restore(text: str, names: Mapping[str, str]) -> str:
    """Replace the temporary directories of Hub models in ``text`` by their ids."""
    for folder, name in names.items():
        text = text.replace(folder, name)
    return text


@contextmanager
def _system_errors() -> Iterator[None]:
    """Convert errors of the system in the block, which name a file, to `McaError`."""
    try:
        yield
    except OSError as error:
        file = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        raise McaError(f"{file}{error.strerror or error}") from error
