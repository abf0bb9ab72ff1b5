"""The command line of ``mca-convert``: sub-commands and flags, with ``-`` or ``_``."""

import argparse
import re
from math import inf
from typing import Literal

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.layout import SIZE_FIELDS
from mca_config.parser import Parser, add_arguments, add_flag
from mca_config.program import SHELLS, Command, Program

DEFAULT_COMMAND = "convert"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZES = "sizes: 2G and 2GB are 2,000,000,000 bytes, 2GiB is 2,147,483,648; printed sizes are\npowers of 1000"
_MOST_BYTES = 1 << 62
_MOST_WORKERS = 256


def program() -> Program:
    """Return the table of all commands of ``mca-convert``."""
    return Program(
        name="mca-convert",
        text="Converts a checkpoint between Hugging Face and MCA, or between MCA layouts, without torch.",
        commands=_COMMANDS,
        default=DEFAULT_COMMAND,
        hint=_hint,
        no_command=f"it is one of {', '.join(_COMMANDS)}; a checkpoint is named by --checkpoint_path",
    )


def _hint(name: str) -> str:
    """Return a hint about flags of other programs or of training; empty if there is none."""
    if long := SIZE_FIELDS.get(name.lower().removesuffix("_size")):
        return f"; did you mean --{long}?"
    if name == "json":
        return "; plan, inspect and verify take --json"
    if name in ("dtype", "torch_dtype", "precision"):
        return "; did you mean --bf16, --fp16 or --fp32?"
    if name in DistributingParallelArguments.__dataclass_fields__ and name not in LAYOUT_FIELDS:
        return "; it has no effect on stored weights, so set it for training"
    return ""


def _convert_flags(parser: Parser) -> None:
    _conversion_flags(parser, planning=False)
    add_flag(
        parser,
        "push_to_hub",
        metavar="ORG/NAME",
        help="upload the result as this model of the Hub, created if missing; its other checkpoint files are deleted",
    )
    _quiet_flag(parser)


def _plan_flags(parser: Parser) -> None:
    _conversion_flags(parser, planning=True)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, with every file")
    parser.add_argument(
        "--values",
        action="store_true",
        help="read all weights too, and report values that are not finite or that a cast would make infinite",
    )


def _quiet_flag(parser: Parser) -> None:
    add_flag(
        parser,
        "quiet",
        action="store_true",
        help="print no progress and no summary, only warnings and errors",
    )


def _inspect_flags(parser: Parser) -> None:
    parser.add_argument(
        "path", type=_path, metavar="PATH", help="a directory of any kind, or a model of the Hub"
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--values",
        action="store_true",
        help="read all weights too, and list the tensors with values that are not finite; exit code 1 if there are any",
    )
    add_flag(
        parser,
        "top",
        type=_positive,
        metavar="N",
        default=5,
        help="number of largest tensors to list; default: 5",
    )


def _conversion_flags(parser: Parser, *, planning: bool) -> None:
    source = "checkpoint to read (with --adapter_path: the base model): a directory or a Hub model (org/name@revision)"
    add_flag(parser, "checkpoint_path", type=_path, metavar="DIR", help=source)
    where = (
        "the output directory; checks that it is absent or empty and that the disk has enough space"
        if planning
        else "the new checkpoint; must be absent or empty"
    )
    add_flag(parser, "output_path", type=_path, required=not planning, metavar="DIR", help=where)
    add_flag(
        parser,
        "to",
        hint=Literal["mca", "hf"],
        metavar="{mca,hf}",
        help="the target; default: hf from Megatron's checkpoints, else mca (mca to mca: layout, hf to hf: dequantise)",
    )
    _adapter_flags(parser)
    _dtype_flags(parser)
    _layout_flags(parser)
    _engine_flags(parser)
    add_flag(
        parser,
        "max_shard_size",
        type=byte_count,
        metavar="SIZE",
        default=5 * 10**9,
        help="largest file of a Hugging Face target, e.g. 2G; default: 5 GB",
    )
    add_flag(
        parser,
        "overwrite",
        action="store_true",
        help="replace a checkpoint at --output_path once the new one is complete; any other directory is an error",
    )


def _adapter_flags(parser: Parser) -> None:
    group = parser.add_argument_group("LoRA", "convert an adapter instead of a model, or merge it")
    add_flag(
        group,
        "adapter_path",
        type=_path,
        metavar="DIR",
        help="a PEFT adapter (converted to MCA; needs its base model's config) or an MCA adapter (converted to PEFT)",
    )
    add_flag(
        group,
        "merge",
        action="store_true",
        help="merge the adapter into the base model and write that as Hugging Face, or with --to mca as MCA",
    )


def _dtype_flags(parser: Parser) -> None:
    group = parser.add_argument_group("dtype", "cast floating-point weights; default: no cast")
    choice = group.add_mutually_exclusive_group()
    for flag in ("bf16", "fp16", "fp32"):
        choice.add_argument(f"--{flag}", dest="dtype", action="store_const", const=flag, help=f"to {flag}")
    group.add_argument(
        "--fp8",
        action="store_true",
        help="write linear weights of a Hugging Face target as e4m3 with an fp32 scale per block of 128 x 128",
    )


def _layout_flags(parser: Parser) -> None:
    group = parser.add_argument_group(
        "layout", "parallel sizes of an MCA target; default: the source's, else 1"
    )
    add_arguments(group, DistributingParallelArguments, LAYOUT_FIELDS)


def _engine_flags(parser: Parser) -> None:
    group = parser.add_argument_group("engine")
    add_flag(
        group,
        "workers",
        type=_workers,
        metavar="N",
        help="number of threads; default: one per processor, at most 8",
    )
    add_flag(
        group,
        "memory_limit",
        type=byte_count,
        metavar="SIZE",
        help="size of all buffers, e.g. 64M; default: 3 MB a thread, up to 320 MiB for merged or dequantised weights",
    )


def _verify_flags(parser: Parser) -> None:
    parser.add_argument(
        "first", type=_path, metavar="A", help="a checkpoint directory, of any kind and layout"
    )
    parser.add_argument("second", type=_path, metavar="B", help="another one")
    add_flag(
        parser,
        "tolerance",
        type=_tolerance,
        metavar="X",
        help="largest absolute difference allowed; dtypes may then differ. Default: bit for bit",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the outcome as JSON, with every difference"
    )
    _quiet_flag(parser)
    _engine_flags(parser)


def _completion_flags(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))


_COMMANDS = {
    DEFAULT_COMMAND: Command(
        usage="--checkpoint_path SRC --output_path DST [flags]",
        summary="converts a checkpoint between Hugging Face and MCA, or between MCA layouts (the default)",
        flags=_convert_flags,
        notes=_SIZES,
        examples=(
            "# Hugging Face to MCA, sharded for 2 tensor x 4 pipeline ranks",
            "--checkpoint_path Qwen3-8B --output_path qwen3-mca \\",
            "    --tensor_model_parallel_size 2 --pipeline_model_parallel_size 4",
            "# sizes and memory of that conversion; nothing is written",
            "plan --checkpoint_path Qwen3-8B --tensor_model_parallel_size 2",
            "# MCA (or Megatron torch_dist, or a checkpoint of ROLL) to Hugging Face",
            "--checkpoint_path qwen3-mca --output_path qwen3-hf",
            "# the same model in another layout",
            "--checkpoint_path qwen3-mca --output_path qwen3-tp8 --to mca --tensor_model_parallel_size 8",
            "# a trained LoRA adapter for peft, or merged into its base model",
            "--adapter_path lora-mca --output_path lora-peft",
            "--checkpoint_path Qwen3-8B --adapter_path lora-mca --merge --output_path qwen3-tuned",
            "# compare two directories bit for bit",
            "verify qwen3-hf qwen3-tp8",
        ),
    ),
    "plan": Command(
        usage="--checkpoint_path SRC [flags]",
        summary="shows the files, sizes, memory and errors of a conversion without running it",
        text="Shows the files, sizes, memory and errors of a conversion without running it. Nothing is written, and of "
        "a model of the Hub only the headers are fetched. The exit code is 1 if the conversion would fail.",
        flags=_plan_flags,
        notes=_SIZES,
        examples=(
            "plan --checkpoint_path Qwen/Qwen3-8B --tensor_model_parallel_size 2",
            "plan --checkpoint_path qwen3-mca --output_path qwen3-hf --json",
        ),
    ),
    "inspect": Command(
        usage="PATH [--json] [--top N] [--values]",
        summary="shows the contents of a directory: kind, model, layout, dtypes, sizes",
        text="Shows the contents of a directory: kind, model, layout, dtypes, sizes, and the largest tensors. The exit "
        "code is 1 if the checkpoint is incomplete.",
        flags=_inspect_flags,
        examples=("inspect qwen3-mca", "inspect Qwen/Qwen3-8B --top 20", "inspect qwen3-mca --values"),
    ),
    "verify": Command(
        usage="A B [flags]",
        summary="compares two checkpoints as models, tensor by tensor, bit for bit",
        text="Compares two checkpoints as models, tensor by tensor, bit for bit; their formats and layouts may differ. "
        "The exit code is 1 if the models differ.",
        flags=_verify_flags,
        notes=_SIZES,
        examples=("verify qwen3-hf qwen3-tp8", "verify qwen3-hf qwen3-bf16 --tolerance 0.01"),
    ),
    "completion": Command(
        usage="|".join(SHELLS),
        summary="prints a shell completion script",
        text="Prints the shell completion script of mca-convert.",
        flags=_completion_flags,
        examples=("completion bash > ~/.local/share/bash-completion/completions/mca-convert",),
    ),
}


def byte_count(text: str) -> int:
    """Parse a size such as ``512M``, ``2GiB`` or ``1000000``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)b?", text.strip().lower())
    number = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]] if match else 0
    if not 1 <= number <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M, 2G or 2GiB, not {text!r:.40}")
    return int(number)


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(
            "expected a path, not an empty value (of a shell variable that is not set?)"
        )
    return text


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text!r:.40}")
    return int(text)


def _workers(text: str) -> int:
    count = _positive(text)
    if count > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_WORKERS} threads, not {count}")
    return count


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, not {text!r}")
    return value
