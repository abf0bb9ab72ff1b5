"""`help_of_command` is the text of ``mca-train plan --help`` and of the other commands that do not train."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, fields

from mca_train.plan.options import PlanOptions

_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class _Command:
    usage: str
    text: str
    flags: tuple[tuple[str, str], ...] = ()
    examples: tuple[str, ...] = ()


_KEYS = "Keys of the configuration can follow as --key value; mca-train sft --help lists them."
_PLAN_FLAGS = tuple(
    (f"--{one.name} {one.metadata['value']}".rstrip(), one.metadata["help"]) for one in fields(PlanOptions)
)
_COMMANDS = {
    "plan": _Command(
        usage="plan [KIND] CONFIG.yaml [--key value ...]",
        text="Says what a run would need: ranks, layers, parameters, memory of each stage, bubble, batch. Reads the "
        "model's config.json, no weights and no data, and needs no GPU. Ends with 2 for a run that no machine could "
        f"make. {_KEYS}",
        flags=_PLAN_FLAGS,
        examples=(
            "plan sft run.yaml --gpus 16 --device h100-80",
            "plan run.yaml --search --gpus 64 --device h200",
            "plan run.yaml --dry_run --plot pictures",
        ),
    ),
    "data": _Command(
        usage="data [KIND] CONFIG.yaml [--key value ...]",
        text="Shows what a model would see: how many samples, tokens and targets, a histogram of lengths, how full "
        "packs are, three samples with their targets marked, and rows that are cut or left out and why. Reads the "
        f"tokenizer and the data, no model. {_KEYS}",
        examples=("data sft run.yaml", "data sft run.yaml --max_train_samples 1000"),
    ),
    "tokenize": _Command(
        usage="tokenize CONFIG.yaml --output_prefix PREFIX [--key value ...]",
        text="Writes each row of train_file as a document of one of Megatron's indexed datasets. A pre-training run "
        f"reads it as one of its datasets, by PREFIX. {_KEYS}",
        flags=(("--output_prefix PREFIX", "PREFIX.bin and PREFIX.idx are written"),),
        examples=("tokenize run.yaml --output_prefix data/corpus",),
    ),
    "report": _Command(
        usage="report RUN_DIR [--compare OTHER_DIR] [--output FILE]",
        text="Writes one page of HTML about a run, which needs no network: curves of all that was logged, memory "
        "planned and measured, checkpoints, configuration, versions.",
        flags=(
            ("--compare OTHER_DIR", "another run beside it"),
            ("--output FILE", "the page; else RUN_DIR/report.html"),
        ),
        examples=("report runs/first", "report runs/second --compare runs/first"),
    ),
    "init": _Command(
        usage="init KIND MODEL [FILE]",
        text="Writes a commented configuration of a kind of run for a model, to the screen or to a new FILE.",
        examples=("init sft Qwen/Qwen3-8B run.yaml",),
    ),
    "schema": _Command(
        usage="schema [KIND]",
        text="Prints the JSON schema of a configuration, by which editors complete keys and mark mistakes.",
        examples=("schema > mca.schema.json", "schema sft > sft.schema.json"),
    ),
    "completion": _Command(
        usage="completion bash|zsh|fish",
        text="Prints the script by which a shell completes the words of mca-train.",
        examples=("completion bash > ~/.local/share/bash-completion/completions/mca-train",),
    ),
}


def help_of_command(name: str) -> str | None:
    """The text; None: there is no such command."""
    command = _COMMANDS.get(name)
    if command is None:
        return None
    lines = [f"usage: mca-train {command.usage}", "", *textwrap.wrap(command.text, _WIDTH)]
    if command.flags:
        lines += ["", *_flags(command.flags)]
    lines += ["", "examples:", *(f"  mca-train {example}" for example in command.examples)]
    return "\n".join(lines) + "\n"


def _flags(flags: Iterable[tuple[str, str]]) -> Iterable[str]:
    for flag, text in flags:
        yield f"  {flag}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
