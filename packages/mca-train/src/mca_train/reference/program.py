"""The table of the commands of ``mca-train``: their help, and flags that are not keys of a run.

It imports no torch, so that help is fast; the keys of a kind are loaded on demand.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mca_config.program import SHELLS, Command, Program
from mca_train.tasks import TASKS
from mca_train.tasks.task import Task

if TYPE_CHECKING:
    from mca_config.parser import Parser

_KEYS = "Keys of the configuration can follow as --key value; `mca-train KIND --help` lists them."
_KIND = "Without KIND it is the first kind that has a kind-specific key in the file, else sft. "
_TEXT = (
    "Trains a Hugging Face or MCA checkpoint with Megatron, over tensor, pipeline, virtual pipeline, context, expert "
    "and data parallel ranks. Starts its own local ranks, unless torchrun did."
)
_LAUNCH = (
    "mca-train KIND run.yaml starts the ranks of this machine; torchrun --nproc-per-node N -m mca_train KIND run.yaml "
    "those of several"
)
_NOTES = """\
CONFIG.yaml holds `key: value` lines. Every key is also a flag, with - or _, and the flag wins; flags alone do too.
Keys are those of Hugging Face's TrainingArguments, the parallel arguments of mca, and:

  model_name_or_path       directory or Hub id of the model
  tokenizer_name_or_path   of the tokenizer, if it is elsewhere
  train_file, eval_file    .jsonl .json .parquet .txt
  seq_length               tokens per block or sample
  nproc_per_node           ranks to start on this machine
  lora_rank                train a LoRA adapter instead of full fine-tuning
  sequence_packing         several samples in a row

`mca-train KIND --help` lists all keys with their meaning."""
_EXAMPLES = (
    "init sft models/qwen3 run.yaml",
    "plan run.yaml --gpus 16 --device h100-80",
    "sft run.yaml --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2",
    "sft --model_name_or_path models/qwen3 --train_file train.jsonl --output_dir runs/first",
    "sft run.yaml --resume_from_checkpoint auto --max-steps 1000",
    "# several machines: torchrun starts the ranks",
    "  torchrun --nproc-per-node 8 -m mca_train pretrain run.yaml",
)


def _operands(parser: "Parser") -> None:
    from mca_config.parser import add_operands

    add_operands(parser)


def _plan_flags(parser: "Parser") -> None:
    from mca_config.parser import add_arguments
    from mca_train.plan.options import PlanOptions

    _operands(parser)
    add_arguments(parser, PlanOptions)


def _flags(**meanings: tuple[str, str]) -> Callable[["Parser"], None]:
    """Return the function that declares operands, and flags by name with placeholder and meaning."""

    def add(parser: "Parser") -> None:
        from mca_config.parser import add_flag

        _operands(parser)
        for name, (value, text) in meanings.items():
            settings: dict[str, str] = {"metavar": value} if value else {"action": "store_true"}
            add_flag(parser, name, help=text, **settings)

    return add


_COMMANDS = {
    "plan": Command(
        usage="[KIND] [CONFIG.yaml] [--key value ...]",
        summary="shows what a run would need (ranks, layers, parameters, memory, bubble, batch), what fits a device, "
        "and which layout is fastest; needs no GPU",
        text="Shows what a run would need: ranks, layers, parameters, memory of each stage, bubble, batch. Reads the "
        "model's config.json, but no weights and no data, and needs no GPU. Ends with exit code 2 if no machine could "
        f"make the run, with 1 if --search finds no layout. {_KIND}{_KEYS}",
        flags=_plan_flags,
        examples=(
            "plan sft run.yaml --gpus 16 --device h100-80",
            "plan sft run.yaml --search --gpus 64 --device h200",
            "plan dpo run.yaml --dry_run --plot pictures",
        ),
    ),
    "data": Command(
        usage="[KIND] [CONFIG.yaml] [--key value ...]",
        summary="shows what a model would see: counts, lengths, fill, samples with their targets, rows left out",
        text="Shows what a model would see: how many samples, tokens and targets, a histogram of lengths, how full "
        "packs are, three samples with their targets marked, and rows that are cut or left out and why. Reads the "
        f"tokenizer and the data, but no model. {_KIND}{_KEYS}",
        flags=_operands,
        examples=("data sft run.yaml", "data sft run.yaml --max_train_samples 1000"),
    ),
    "tokenize": Command(
        usage="[CONFIG.yaml] --output_prefix PREFIX [--key value ...]",
        summary="writes the texts of train_file as one of Megatron's indexed datasets, PREFIX.bin and PREFIX.idx",
        text="Writes each row of train_file as a document of one of Megatron's indexed datasets. A pre-training run "
        f"reads it as one of its datasets, by PREFIX. {_KEYS}",
        flags=_flags(output_prefix=("PREFIX", "where to write PREFIX.bin and PREFIX.idx (required)")),
        examples=("tokenize run.yaml --output_prefix data/corpus",),
    ),
    "report": Command(
        usage="RUN_DIR [--compare OTHER_DIR] [--output FILE | --json]",
        summary="writes one page of HTML about a run, or about two side by side",
        text="Writes one page of HTML about a run, which needs no network: curves of all that was logged, memory "
        "planned and measured, checkpoints, configuration, versions. docs/reference/json.md lists the keys of --json.",
        flags=_flags(
            compare=("OTHER_DIR", "another run for comparison"),
            output=("FILE", "where to write the page; default: RUN_DIR/report.html"),
            json=("", "print one JSON object instead of writing a page"),
        ),
        examples=("report runs/first", "report runs/second --compare runs/first"),
    ),
    "init": Command(
        usage="KIND MODEL [FILE]",
        summary="writes a commented configuration of a kind for a model, to the screen or to a new FILE",
        text="Writes a commented configuration of a kind of run for a model, to the screen or to a new FILE. MODEL is "
        "a directory or a model of the Hub (org/name).",
        flags=_operands,
        examples=("init sft Qwen/Qwen3-8B run.yaml",),
    ),
    "schema": Command(
        usage="[KIND]",
        summary="prints the JSON schema of a configuration, with which editors complete and check it",
        text="Prints the JSON schema of a configuration, with which editors complete keys and mark mistakes.",
        flags=_operands,
        examples=("schema > mca.schema.json", "schema sft > sft.schema.json"),
    ),
    "completion": Command(
        usage="|".join(SHELLS),
        summary="prints a shell completion script",
        text="Prints the shell completion script of mca-train. Keep it in a file: it takes seconds to generate.",
        flags=_operands,
        examples=("completion bash > ~/.local/share/bash-completion/completions/mca-train",),
    ),
    "client": Command(
        usage="mcore_adapter|roll",
        summary="prints the directory with which LLaMA-Factory or ROLL trains on mca",
        text="Prints a directory for PYTHONPATH, in which mca has the name mcore_adapter. With that of mcore_adapter "
        "LLaMA-Factory (USE_MCA=1) trains on mca, with that of roll ROLL.",
        flags=_operands,
        examples=("client mcore_adapter", "client roll"),
    ),
}
"""The commands except those of kinds of run."""


def program() -> Program:
    """Return the table of all commands of ``mca-train``."""
    kinds = {name: _kind(task) for name, task in TASKS.items()}
    return Program(
        name="mca-train",
        text=_TEXT,
        commands=kinds | _COMMANDS,
        notes=_NOTES,
        examples=_EXAMPLES,
        other_commands={
            **dict.fromkeys(("launch", "run"), _LAUNCH),
            **dict.fromkeys(("train", "finetune"), f"name a kind of run: {', '.join(TASKS)}"),
        },
    )


def _kind(task: Task) -> Command:
    def help_() -> str:
        from mca_train.reference.keys import task_help

        return task_help(task)

    return Command(
        usage="[CONFIG.yaml] [--key value ...]", summary=task.summary, flags=_operands, full_help=help_
    )
