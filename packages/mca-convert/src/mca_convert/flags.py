"""The command line of ``mca-convert``: sub-commands and flags, with ``-`` or ``_`` alike.

What the flags mean for a conversion is in `commands`.
"""

import argparse
import difflib
import re
import sys
from typing import NoReturn

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.command_line import add_arguments
from mca_config.layout import SIZE_FIELDS
from mca_config.types import Typed
from mca_convert.output import printable

DEFAULT_COMMAND = "convert"
COMMANDS = {
    DEFAULT_COMMAND: "convert a checkpoint between Hugging Face and MCA, or between MCA layouts",
    "plan": "say what a conversion would read, write and hold, and all that stands in its way",
    "inspect": "say what a directory holds: kind, model, layout, dtypes, sizes",
    "verify": "compare two checkpoints as models, tensor by tensor, bit for bit",
}
_EXAMPLES = """examples:
  # Hugging Face to MCA, cut for 2 tensor x 4 pipeline ranks
  mca-convert --checkpoint_path Qwen3-8B --output_path qwen3-mca \\
      --tensor_model_parallel_size 2 --pipeline_model_parallel_size 4
  # what would that read, write and need? nothing is written
  mca-convert plan --checkpoint_path Qwen3-8B --tensor_model_parallel_size 2
  # MCA (or Megatron torch_dist, or a tree of ROLL) to Hugging Face
  mca-convert --checkpoint_path qwen3-mca --output_path qwen3-hf
  # the same model in another layout
  mca-convert --checkpoint_path qwen3-mca --output_path qwen3-tp8 --to mca --tensor_model_parallel_size 8
  # a trained LoRA adapter for peft, or folded into its base model
  mca-convert --adapter_path lora-mca --output_path lora-peft
  mca-convert --checkpoint_path Qwen3-8B --adapter_path lora-mca --merge --output_path qwen3-tuned
  # are two directories the same model, bit for bit?
  mca-convert verify qwen3-hf qwen3-tp8
"""
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZES = (
    "sizes: 2G and 2GB are 2,000,000,000 bytes, 2GiB are 2,147,483,648; those printed are KB, MB, GB of 1000"
)
_MOST_BYTES = 1 << 62
_MOST_WORKERS = 256


class Parser(argparse.ArgumentParser):
    """Says which flag was probably meant; exits 2."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits."""
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            message = f"unknown flag or argument {unknown[1]}{self._suggestion(unknown[1])}"
        sys.stderr.write(f"error: {printable(message)}; see {self.prog} --help\n")
        sys.exit(2)

    def unknown_command(self, word: str) -> NoReturn:
        """Says which command was probably meant; exits 2."""
        close = difflib.get_close_matches(word, COMMANDS, 1)
        known = f"it is one of {', '.join(COMMANDS)}; a checkpoint is named by --checkpoint_path"
        self.error(f"unknown command {word}, {f'did you mean {close[0]}?' if close else known}")

    def _suggestion(self, given: str) -> str:
        flag = given.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        if long := SIZE_FIELDS.get(name.lower().removesuffix("_size")):
            return f", did you mean --{long}?"
        if name in ("dtype", "torch_dtype", "precision"):
            return ", did you mean --bf16, --fp16 or --fp32?"
        if name in DistributingParallelArguments.__dataclass_fields__:
            return " (it does not change how weights are stored: give it to the training)"
        known = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(flag, known, 1)
        return f", did you mean {close[0]}?" if close else ""


def command_of(arguments: list[str]) -> tuple[str, list[str]]:
    """The sub-command and its own arguments; without one, the conversion."""
    if arguments and arguments[0] in COMMANDS:
        return arguments[0], arguments[1:]
    return DEFAULT_COMMAND, arguments


def build_parser(command: str, version: str) -> Parser:
    """The parser of one sub-command."""
    prog = "mca-convert" if command == DEFAULT_COMMAND else f"mca-convert {command}"
    others = "\n".join(f"  mca-convert {name:8} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog=prog,
        description=f"{COMMANDS[command][:1].upper()}{COMMANDS[command][1:]}.",
        epilog=f"{_SIZES}\n\ncommands:\n{others}\n\n{_EXAMPLES}" if command == DEFAULT_COMMAND else _SIZES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mca-convert {version}")
    _BUILDERS[command](parser)
    return parser


def _flag(parser: argparse._ActionsContainer, name: str, **how: Typed) -> None:
    """Adds ``--name`` in both spellings."""
    parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **how)


def _convert_flags(parser: argparse.ArgumentParser) -> None:
    _conversion_flags(parser, planning=False)
    _flag(
        parser,
        "push_to_hub",
        metavar="ORG/NAME",
        help="upload the result as this model of the Hugging Face Hub, which is made if it is not there",
    )
    _quiet_flag(parser)


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    _conversion_flags(parser, planning=True)
    parser.add_argument("--json", action="store_true", help="the plan as JSON, with every file")


def _quiet_flag(parser: argparse.ArgumentParser) -> None:
    _flag(parser, "quiet", action="store_true", help="no progress and no summary: nothing but what is wrong")


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a directory of any kind, or a model of the Hub")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    _flag(
        parser,
        "top",
        type=_positive,
        metavar="N",
        default=5,
        help="how many of the biggest tensors; default 5",
    )


def _conversion_flags(parser: argparse.ArgumentParser, *, planning: bool) -> None:
    source = (
        "the checkpoint to read, a directory or a model of the Hub (org/name, org/name@revision); with --adapter_path: "
        "the adapter's base model"
    )
    _flag(parser, "checkpoint_path", metavar="DIR", help=source)
    where = (
        "where it would go; checks that it is free and has room"
        if planning
        else "the new one; absent or empty before"
    )
    _flag(parser, "output_path", required=not planning, metavar="DIR", help=where)
    _flag(
        parser,
        "to",
        choices=("mca", "hf"),
        help="the target; default: hf from Megatron's checkpoints (MCA, ROLL, torch_dist), else mca. An MCA source "
        "can go to mca again, in another layout; a quantised Hugging Face one to hf, dequantised",
    )
    _adapter_flags(parser)
    _dtype_flags(parser)
    _layout_flags(parser)
    _engine_flags(parser)
    _flag(
        parser,
        "max_shard_size",
        type=byte_count,
        metavar="SIZE",
        default=5 * 10**9,
        help="largest file of a Hugging Face target, e.g. 2G; default 5 GB",
    )
    _flag(
        parser,
        "overwrite",
        action="store_true",
        help="replace a checkpoint at --output_path, once the new one is complete; anything else there is kept",
    )


def _adapter_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRA", "convert an adapter instead of a model, or merge it")
    _flag(
        group,
        "adapter_path",
        metavar="DIR",
        help="a PEFT adapter (goes to MCA; needs its base model's config) or an MCA adapter (goes to PEFT)",
    )
    _flag(
        group,
        "merge",
        action="store_true",
        help="fold the adapter into the base model and write that as Hugging Face, or with --to mca as MCA",
    )


def _dtype_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dtype", "cast floating-point weights; default: as they are")
    choice = group.add_mutually_exclusive_group()
    for flag, code in (("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")):
        choice.add_argument(f"--{flag}", dest="cast", action="store_const", const=code, help=f"to {flag}")
    group.add_argument(
        "--fp8",
        action="store_true",
        help="weights of linears of a Hugging Face target as e4m3 with an fp32 scale for each block of 128 x 128, as "
        "DeepSeek and Qwen publish them; the rest stays, or is cast",
    )


def _layout_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "layout", "parallel sizes of an MCA target; default: the source's, else 1"
    )
    add_arguments(group, DistributingParallelArguments, LAYOUT_FIELDS)


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    _flag(group, "workers", type=_workers, metavar="N", help="threads; default: the processors, at most 8")
    _flag(
        group,
        "memory_limit",
        type=byte_count,
        metavar="SIZE",
        help="bytes of all buffers together, e.g. 64M; default 3 MB for each thread",
    )


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="a checkpoint directory, of any kind and layout")
    parser.add_argument("second", metavar="B", help="another one")
    _flag(
        parser,
        "tolerance",
        type=_tolerance,
        metavar="X",
        help="largest absolute difference allowed; dtypes may then differ. Default: bit for bit",
    )
    parser.add_argument("--json", action="store_true", help="the outcome as JSON, with every difference")
    _quiet_flag(parser)
    _engine_flags(parser)


_BUILDERS = {
    DEFAULT_COMMAND: _convert_flags,
    "plan": _plan_flags,
    "inspect": _inspect_flags,
    "verify": _verify_flags,
}


def byte_count(text: str) -> int:
    """Bytes from ``512M``, ``2GiB``, ``1000000``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)b?", text.strip().lower())
    number = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]] if match else 0
    if not 1 <= number <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M, 2G or 2GiB, not {text!r:.40}")
    return int(number)


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
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return value
