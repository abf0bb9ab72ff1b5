"""Starter configuration: the keys that most runs set, with comments."""

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
bf16: {bf16}                              # {bf16_text}
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
# A LoRA adapter instead of the whole model: uncomment these lines.
# lora_rank: 16
# lora_alpha: 32
# lora_target_modules: all-linear
"""


def starter(task: Task, model: str, *, gpu: bool) -> str:
    """The text of a YAML file for ``task`` on ``model``.

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
