"""The ``mca-train`` command is here: its words, its help and its exit codes.

It reads no configuration and imports no torch; what a command does is in ``run``.
"""

import sys
from pathlib import Path

from mca_config.errors import McaError, UsageError
from mca_config.streams import safe_streams
from mca_train.launch.stopping import Stopped
from mca_train.tasks.table import TASKS

_HELP = """\
usage: {usage}
       mca-train plan [KIND] CONFIG.yaml [--key value ...]
       mca-train data [KIND] CONFIG.yaml [--key value ...]
       mca-train tokenize CONFIG.yaml --output_prefix PREFIX
       mca-train report RUN_DIR [--compare OTHER_DIR]
       mca-train init KIND MODEL [FILE]
       mca-train schema [KIND]
       mca-train completion bash|zsh|fish

Trains a Hugging Face or MCA checkpoint with Megatron, over tensor, pipeline, virtual pipeline, context, expert
and data parallel ranks. Starts its own local ranks, unless torchrun did.

{kinds}
  plan       says what a run would need (ranks, layers, parameters, memory, bubble, batch), what fits a device,
             and which layout is fastest; needs no GPU
  data       shows what a model would see: counts, lengths, fill, samples with their targets, rows left out
  tokenize   writes the texts of train_file as one of Megatron's indexed datasets, PREFIX.bin and PREFIX.idx
  report     writes one page of HTML about a run, or two beside each other
  init       writes a commented configuration of a kind for a model, to the screen or to a new FILE
  schema     prints the JSON schema of a configuration, by which editors complete and check it
  completion prints a script by which a shell completes words; mca-train completion --help says where to keep it

mca-train COMMAND --help says more of each.

CONFIG.yaml holds `key: value` lines; every key is also a flag, with - or _, and the flag wins. Keys are those of
Hugging Face's TrainingArguments, the parallel arguments of mca, and:

  model_name_or_path   directory of the model          tokenizer_name_or_path   of the tokenizer, if elsewhere
  train_file           .jsonl .json .parquet .txt      eval_file                the same
  seq_length           tokens per block or sample      local_ranks              ranks to start on this machine
  lora_rank            train a LoRA adapter instead    lora_target_modules      all-linear, or names
  sequence_packing     several samples in a row        dpo_loss, dpo_beta       of dpo

All keys, with their meaning: mca-train KIND --help.

examples:
  mca-train pretrain run.yaml
  mca-train sft run.yaml --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2
  mca-train sft run.yaml --resume_from_checkpoint auto --max-steps 1000
  torchrun --nproc-per-node 8 -m mca_train pretrain run.yaml

run.yaml:
  model_name_or_path: models/qwen3
  train_file: data/train.jsonl
  eval_file: data/eval.jsonl
  output_dir: runs/first
  seq_length: 1024
  max_steps: 200
  learning_rate: 1e-3
  per_device_train_batch_size: 2      # micro-batch
  gradient_accumulation_steps: 4      # micro-batches in a step
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
"""


def _commands() -> tuple[str, ...]:
    return (*TASKS, "plan", "report", "data", "tokenize", "init", "schema", "completion")


def _help() -> str:
    width = max(map(len, TASKS))
    usage = "\n       ".join(f"mca-train {name:<{width}} CONFIG.yaml [--key value ...]" for name in TASKS)
    kinds = "\n".join(f"  {task.name:<10} {task.summary}" for task in TASKS.values())
    return _HELP.replace("{usage}", usage).replace("{kinds}", kinds)


def _help_on(words: list[str]) -> str:
    """The help that is asked for: of a kind of run all its keys, of another command its flags, else the general one."""
    name = next(iter(words), "")
    if name in TASKS:
        from mca_train.reference.flags import help_of

        return help_of(TASKS[name])
    if name not in _commands():
        return _help()
    from mca_train.reference.command_help import help_of_command

    return help_of_command(name) or _help()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; the exit code: 0, 1 for a failure, 2 for wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    with safe_streams(to_the_end=arguments is None, output_too=True):
        code = _main(words)
        lost = bool(getattr(sys.stdout, "failed", False)) and words[:1] not in [[name] for name in TASKS]
        return code or int(lost)  # of training, the log has what was said


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help") or {"-h", "--help"} & set(words[1:]):
        sys.stdout.write(_help_on(words))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"mca-train {version('mca-train')}\n")
        return 0
    try:
        return _run(words)
    except McaError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped by SIGINT\n")
        return 130
    except Stopped as stop:
        sys.stderr.write(f"{stop}\n")
        return stop.code


def _run(words: list[str]) -> int:
    from mca_train.config.fields import nearest

    command = words[0]
    if command not in (known := _commands()):
        raise UsageError(f"unknown command '{command}'{nearest(command, known, 'see mca-train --help')}")
    words, kind = words[1:], TASKS.get(command)
    if command == "report":
        from mca_train.report.page import write_report

        return write_report(words)
    if command in ("init", "schema", "completion"):
        return _about_keys(command, words)
    if command in ("plan", "data") and words[:1] and words[0] in TASKS:
        words, kind = words[1:], TASKS[words[0]]
    if not words or words[0].startswith("-"):
        raise UsageError(f"mca-train {command} needs a configuration file: mca-train {command} CONFIG.yaml")
    config, overrides = Path(words[0]), words[1:]
    from mca_train.launch.environment import one_thread_until_forked, started_by_launcher

    if command == "plan" or not started_by_launcher():
        one_thread_until_forked()  # before torch is imported below
    if command == "tokenize":
        from mca_train.run.tokenizing import tokenize

        return tokenize(config, overrides)
    if command == "data":
        from mca_train.run.showing import print_data

        return print_data(kind, config, overrides)
    if command == "plan" or kind is None:
        from mca_train.run.planning import print_plan

        return print_plan(kind, config, overrides)
    from mca_train.run.train import run

    again = [sys.executable, "-m", "mca_train", command, *words]
    return run(kind, config, overrides, again)


def _about_keys(command: str, words: list[str]) -> int:
    from mca_train.reference import commands

    if command == "init":
        return commands.write_starter(words)
    if command == "schema":
        return commands.print_schema(words)
    return commands.print_completion(words, _commands())


if __name__ == "__main__":
    sys.exit(main())
