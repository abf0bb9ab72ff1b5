"""The commands ``mca-train schema``, ``init`` and ``completion``, with the schema and the starter configuration."""

import json
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path

from mca_config.errors import UsageError
from mca_config.fields import TypeHint, alternatives, hint_origin, is_enum
from mca_config.files import write_error
from mca_config.printable import suggestion
from mca_config.types import JsonObject, Typed
from mca_train.reference.keys import REQUIRED, Key, task_keys
from mca_train.reference.program import program
from mca_train.tasks import TASKS
from mca_train.tasks.task import Task

_HEAD = """\
# mca-train {kind} run.yaml
# All keys: mca-train {kind} --help. Every key is also a flag, and the flag wins: --learning_rate 1e-4

# What is trained, on what, and where the result goes.
model_name_or_path: {model}
train_file: data/train.jsonl            # {rows}
# eval_file: data/eval.jsonl            # evaluated at the end, and as eval_strategy says
output_dir: runs/{kind}
seq_length: {length}                        # {length_text}
"""
_BODY = """\

# The run: a step takes micro-batch x accumulation x data-parallel-size samples.
num_train_epochs: 1                     # or max_steps: 1000
per_device_train_batch_size: 1          # the micro-batch
gradient_accumulation_steps: 8          # micro-batches in a step
learning_rate: {rate}
lr_scheduler_type: cosine
warmup_steps: 0.03                      # a fraction of the run if it is below 1
bf16: {bf16:<34}# {bf16_text}
{own}
# The layout: tensor x pipeline x context x data-parallel ranks.
# `mca-train plan {kind} run.yaml` shows what each rank holds; with --device h100-80, whether it fits.
tensor_model_parallel_size: 1
pipeline_model_parallel_size: 1
use_distributed_optimizer: true         # divides the optimizer over data-parallel ranks
# context_parallel_size: 1              # divides long sequences
# expert_model_parallel_size: 1         # distributes experts
# sequence_parallel: true               # with several tensor ranks; saves memory
# recompute_granularity: selective      # or full, with recompute_method: uniform and recompute_num_layers: 1
{lora}
# What is logged and kept.
logging_steps: 10
save_steps: 500
save_total_limit: 2
# save_hf_model: true                   # also writes output_dir/hf, for transformers
# report_to: tensorboard                # or wandb, mlflow; default: none
"""
_LORA = """
# A LoRA adapter instead of the full model: uncomment these lines.
# lora_rank: 16
# lora_alpha: 32
# lora_target_modules: all-linear
"""
_NAMES: dict[TypeHint, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
}


def starter(task: Task, model: str, *, gpu: bool) -> str:
    """Return the text of a YAML file for ``task`` on ``model``.

    Args:
        task: The kind of run.
        model: The model's directory or Hub id.
        gpu: Whether this machine has one; half precision is on where it does.
    """
    example = task.example
    values = {
        "kind": task.name,
        "model": model,
        "rows": example.rows,
        "length": "2048",
        "length_text": example.length,
        "rate": example.learning_rate,
        "bf16": "true" if gpu else "false",
        "bf16_text": "false: in the dtype of config.json"
        if gpu
        else "in the dtype of config.json; true on a GPU",
        "own": example.task_lines,
        "lora": "" if example.lora is None else _LORA + example.lora,
    }
    return (_HEAD + _BODY).format(**values)


def schema(tasks: Iterable[Task]) -> JsonObject:
    """Return the schema of a file for any of ``tasks``."""
    tasks = tuple(tasks)
    keys: dict[str, Key] = {}
    for task in tasks:
        keys |= {key.name: key for key in task_keys(task)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"configuration of mca-train {' or '.join(task.name for task in tasks)}",
        "type": "object",
        "additionalProperties": False,
        "required": list(REQUIRED),
        "properties": {name: _property(key) for name, key in keys.items()},
    }


def _property(key: Key) -> JsonObject:
    kinds = [kind for member in alternatives(key.hint) for kind in _kinds(member)]
    kinds = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    found: JsonObject = dict(kinds[0]) if len(kinds) == 1 else {"anyOf": kinds}
    if key.help:
        found["description"] = key.help
    if key.default not in (None, "", [], {}):
        default = getattr(key.default, "value", key.default)
        found["default"] = default if _is_json(default) else str(default)
    return found


def _kinds(member: TypeHint) -> list[JsonObject]:
    """Return the forms that a value of this type may have in a file."""
    if is_enum(member):
        values: list[Typed] = [choice.value for choice in member]
        return [{"enum": [*values, False] if "no" in values else values}]  # to YAML 1.1 a bare no is false
    if hint_origin(member) is typing.Literal:
        return [{"enum": list(typing.get_args(member))}]
    kind = hint_origin(member) or member
    if kind in (list, tuple):
        items = [form for one in alternatives((typing.get_args(member) or (str,))[0]) for form in _kinds(one)]
        return [*items, {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}}]
    if kind is float:
        return [{"type": "number"}, {"type": "string", "pattern": r"^[+-]?\d+(\.\d*)?[eE][+-]?\d+$"}]
    return [{"type": _NAMES[kind]}] if kind in _NAMES else [{}]


def _is_json(value: Typed) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def print_schema(words: Sequence[str]) -> int:
    """Run ``schema [KIND]``: print the JSON schema of a configuration file."""
    tasks = [parse_kind(words[0])] if words else list(TASKS.values())
    if len(words) > 1:
        raise UsageError(f"unexpected argument '{words[1]}'; write mca-train schema [KIND] > schema.json")
    sys.stdout.write(json.dumps(schema(tasks), indent=2) + "\n")
    return 0


def write_starter(words: Sequence[str]) -> int:
    """Run ``init KIND MODEL [FILE]``: print a commented configuration, or write it to a new file."""
    if not 2 <= len(words) <= 3:
        raise UsageError(
            "mca-train init needs a kind and a model: mca-train init sft models/qwen3 [run.yaml]"
        )
    task, path = parse_kind(words[0]), Path(words[2]) if len(words) > 2 else None
    note = _model_problem(words[1])
    if path is not None and path.exists():
        raise UsageError(f"{path} exists; name another file")
    import torch

    text = starter(task, words[1], gpu=torch.cuda.is_available())
    if path is None:
        sys.stdout.write(text)
    else:
        _write_new(path, text)
        sys.stdout.write(f"wrote {path}; next: edit it, then mca-train plan {words[0]} {path}\n")
    if note:
        sys.stderr.write(f"note: {note}\n")
    return 0


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; name another file") from None
    except OSError as error:
        raise write_error(path, error, advice="name another file") from error


def _model_problem(model: str) -> str:
    """Return a note about a model that is not on this machine; empty: it is.

    Raises:
        UsageError: There is no such directory, and the name is not a Hub id.
    """
    from mca_models.hub import is_hub_id

    if is_hub_id(model):
        return f"there is no directory {model} here, so a run would download the model {model} from the Hub"
    folder = Path(model)
    if not folder.exists():
        raise UsageError(
            f"model {model}: no such directory; expected one with a config.json, or a model of the Hub (org/name)"
        )
    if not any((folder / name).is_file() for name in ("config.json", "mca_config.json")):
        raise UsageError(f"model {model}: expected a directory with a config.json or an mca_config.json")
    return ""


def print_completion(words: Sequence[str]) -> int:
    """Run ``completion SHELL``: print the completion script of this command."""
    from mca_config.program import SHELLS, completion

    if len(words) != 1:
        raise UsageError(f"mca-train completion needs a shell: {', '.join(SHELLS)}")
    known = program()
    keys = {name: [f"--{key.name}" for key in task_keys(task)] for name, task in TASKS.items()}
    keys |= {name: sorted({flag for some in keys.values() for flag in some}) for name in ("plan", "data")}
    keys["tokenize"] = keys["pretrain"]
    flags = {name: [*known.parser(name).flags, *keys.get(name, ())] for name in known.commands}
    sys.stdout.write(completion(known.name, words[0], flags))
    return 0


def parse_kind(name: str) -> Task:
    """Return the kind of run with this name.

    Raises:
        UsageError: The name is unknown.
    """
    if name not in TASKS:
        known = f"it is one of {', '.join(TASKS)}"
        raise UsageError(f"unknown kind '{name}'{suggestion(name, TASKS, known)}")
    return TASKS[name]
