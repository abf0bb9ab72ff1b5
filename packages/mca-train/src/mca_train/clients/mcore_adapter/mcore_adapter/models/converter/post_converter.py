"""``convert_checkpoint_to_hf`` and ``convert_checkpoint_to_mca`` by ``mca-convert``, which must be installed."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def convert_checkpoint_to_hf(
    model_name_or_path: str | Path,
    save_directory: str | Path,
    adapter_name_or_path: str | Path | None = None,
    torch_dtype: torch.dtype | None = None,
    verbose: bool = True,
) -> None:
    """Write a Hugging Face checkpoint of an MCA directory."""
    flags = [] if torch_dtype is None else [f"--{_DTYPES[torch_dtype]}"]
    flags += [] if adapter_name_or_path is None else ["--adapter_path", str(adapter_name_or_path)]
    _convert(model_name_or_path, save_directory, flags, verbose)


def convert_checkpoint_to_mca(
    model_name_or_path: str | Path,
    save_directory: str | Path,
    dist_args: DistributingParallelArguments,
    bf16: bool = False,
    fp16: bool = False,
    verbose: bool = True,
) -> None:
    """Write an MCA checkpoint of a Hugging Face directory, in the layout of ``dist_args``."""
    if bf16 and fp16:
        raise McaError("bf16 excludes fp16; remove one of the two")
    flags = ["--to", "mca", *(["--bf16"] if bf16 else ["--fp16"] if fp16 else [])]
    for name in LAYOUT_FIELDS:
        if (value := getattr(dist_args, name)) is not None:
            flags += [f"--{name}", str(value)]
    _convert(model_name_or_path, save_directory, flags, verbose)


def _convert(source: str | Path, target: str | Path, flags: list[str], verbose: bool) -> None:
    if find_spec("mca_convert") is None:
        raise McaError("converting checkpoints needs the package mca-convert; install it")
    paths = ["--checkpoint_path", str(source), "--output_path", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "mca_convert", *paths, *flags],
        capture_output=not verbose,
        text=True,
        check=False,
    )
    if done.returncode:
        raise McaError(f"mca-convert of {source} failed{f': {done.stderr.strip()}' if done.stderr else ''}")
