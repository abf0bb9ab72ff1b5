"""A conversion as it is requested, and the options that exclude each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError, UsageError
from mca_config.layout import ParallelLayout
from mca_convert.pool import Limits, require_count

MAX_SHARD_BYTES = 5 * 10**9
"""Default size of the largest file of a Hugging Face target."""
_CODES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
TargetLayout = ParallelLayout | DistributingParallelArguments
"""A layout, or parallel sizes that replace those of the source's layout."""


class OptionsError(UsageError):
    """Options of a conversion that exclude each other, or that lack another one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A conversion as it is requested; `api.convert` and `api.plan` describe the fields, which are their arguments.

    Raises:
        OptionsError: They exclude each other.
        McaError: One has a value that it cannot have.
    """

    checkpoint: Path | None
    destination: Path | None
    to: Literal["mca", "hf"] | None
    layout: TargetLayout | None
    dtype: Literal["bf16", "fp16", "fp32"] | None
    fp8: bool
    adapter: Path | None
    merge: bool
    max_shard_bytes: int
    overwrite: bool
    limits: Limits
    values: bool = False

    def __post_init__(self) -> None:
        if self.to not in (None, "mca", "hf"):
            raise McaError(f"to: expected mca, hf or None, not {self.to!r}")
        if self.dtype is not None and self.dtype not in _CODES:
            raise McaError(f"dtype: expected one of {', '.join(_CODES)} or None, not {self.dtype!r}")
        require_count("max_shard_size", self.max_shard_bytes)
        if self.merge and self.adapter is None:
            raise OptionsError("--merge needs --adapter_path")
        if self.merge and self.checkpoint is None:
            raise OptionsError("--merge needs the base model: --checkpoint_path")
        if self.adapter is None:
            self.require_checkpoint()

    @property
    def cast(self) -> str | None:
        """Safetensors code of ``dtype``."""
        return None if self.dtype is None else _CODES[self.dtype]

    def require_checkpoint(self) -> Path:
        """Return the checkpoint.

        Raises:
            OptionsError: There is none.
        """
        if self.checkpoint is None:
            raise OptionsError("missing --checkpoint_path; it names the checkpoint to read")
        return self.checkpoint


def target_layout(layout: TargetLayout | None, base: ParallelLayout) -> ParallelLayout:
    """Return the requested layout; sizes that are not set are those of ``base``, the source's.

    Raises:
        OptionsError: The sizes contradict each other.
    """
    if layout is None or isinstance(layout, ParallelLayout):
        return layout or base
    try:
        return layout.layout(base)
    except McaError as error:
        raise OptionsError(str(error)) from error


def conversion_target(request: Request, *, from_megatron: bool) -> Literal["mca", "hf"]:
    """Return the target of ``request``.

    Args:
        request: The conversion.
        from_megatron: The checkpoint, or the adapter that is converted, is one of Megatron.

    Raises:
        OptionsError: An option does not go with the target.
    """
    target = request.to or ("hf" if from_megatron or request.merge else "mca")
    is_adapter = request.adapter is not None and not request.merge
    if request.fp8 and is_adapter:
        raise OptionsError("--fp8 is for full models; add --merge, or remove it")
    if request.fp8 and target == "mca":
        raise OptionsError("--fp8 is for Hugging Face targets; add --to hf, or remove it")
    if request.max_shard_bytes != MAX_SHARD_BYTES and (target == "mca" or is_adapter):
        raise OptionsError("--max_shard_size is for Hugging Face models, which have several files; remove it")
    if request.layout is not None and target == "hf":
        raise OptionsError(_layout_problem(request.layout, from_megatron=from_megatron or request.merge))
    return target


def _layout_problem(layout: TargetLayout, *, from_megatron: bool) -> str:
    named = vars(layout) if isinstance(layout, DistributingParallelArguments) else {}
    names = [f"--{name}" for name in LAYOUT_FIELDS if named.get(name) is not None] or ["layout"]
    hint = ", or add --to mca to write the same model in another layout" if from_megatron else ""
    return f"{names[0]} is only for MCA targets, the target is hf; remove it{hint}"
