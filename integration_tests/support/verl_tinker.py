"""Steps of verl's Tinker worker, which accumulates gradients over calls, for any engine of verl, on CPU ranks."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.losses import sft_loss

from verl_rl import new_worker

CALLS = (2, 4)
"""Sequences of each call before a step, over all replicas."""


def _batch(step: int, call: int) -> TensorDict:
    """Return random sequences."""
    generator = torch.Generator().manual_seed(100 * step + call)
    lengths = torch.randint(6, 20, (CALLS[call],), generator=generator).tolist()
    rows = [torch.randint(3, 400, (length,), generator=generator) for length in lengths]
    columns = {
        "input_ids": rows,
        "position_ids": [torch.arange(length) for length in lengths],
        "loss_mask": [(torch.arange(length) > 2).long() for length in lengths],
    }
    nested = {
        name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()
    }
    return TensorDict(nested, batch_size=len(rows))


def _forward_backward(worker: TinkerTrainingWorker, data: TensorDict) -> tuple[float, float] | None:
    """Return the loss and the sum of log-probabilities of this replica's part of ``data``."""
    size = worker.engine.get_data_parallel_size()
    mine = data.chunk(size)[worker.engine.get_data_parallel_rank()].contiguous()
    lengths = data["input_ids"].offsets().diff().tolist()
    tensordict_utils.assign_non_tensor(
        mine,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        temperature=1.0,
        global_token_num=NonTensorData(lengths),
        pad_mode="no_padding",
    )
    output = worker.forward_backward(mine)
    if output is None:
        return None
    metrics = tensordict_utils.get(output, "metrics")
    following = [
        row[:-1].double().sum() for row in output["log_probs"].unbind()
    ]  # none follows the last token
    return float(metrics["loss"]), float(sum(following))


def tinker(job: dict[str, Any], config: DictConfig) -> None:
    """Run steps of two calls each and write a line of JSON for each to ``job["log"]``."""
    initialize_global_process_group()
    worker = new_worker(config, kind=TinkerTrainingWorker)
    worker.set_loss_fn(partial(sft_loss, config=None))
    worker.optimizer_zero_grad()
    lines = []
    for step in range(job["iterations"]):
        found = [_forward_backward(worker, _batch(step, call)) for call in range(len(CALLS))]
        metrics = worker.optimizer_step({"lr": 1e-3 / (1 + step), "weight_decay": 0.0})
        if worker.engine.is_mp_src_rank_with_outputs() and worker.engine.get_data_parallel_rank() == 0:
            lines.append(json.dumps({"calls": found, "grad_norm": float(metrics["grad_norm"])}))
    if lines:
        Path(job["log"]).write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()
