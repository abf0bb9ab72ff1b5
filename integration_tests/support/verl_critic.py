"""Iterations of verl's critic on answers of random tokens, for any engine of verl, on CPU ranks."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.model
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoModelForTokenClassification
from verl.trainer.ppo.core_algos import compute_gae_advantage_return
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import CriticConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from verl_rl import LENGTH, new_worker, outputs, rollout, update

METRICS = ("loss", "grad_norm", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")


class RandomPolicy:
    """Policy that answers with random tokens."""

    def generate(self, prompts: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        """Return the prompts with their answers."""
        return torch.cat([prompts, torch.randint(3, 400, (len(prompts), max_new_tokens))], 1)


def _load_without_flash_attention(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> torch.nn.Module:
    """Load as verl's ``load_valuehead_model``, which asks for flash attention and so for a GPU."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


def iterate(worker: TrainingWorker, batch: TensorDict) -> dict[str, Any]:
    """Run one iteration on this replica's part of ``batch``; return values of all answers, and what verl reports."""
    rank, size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    batch = batch.chunk(size)[rank].contiguous()
    by_replica = outputs(worker, batch, ("values",))
    mask = batch["response_mask"]
    batch["values"] = by_replica[rank][0] * mask
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = (batch["responses"] % 7 == 0).float().sum(1)
    _, batch["returns"] = compute_gae_advantage_return(rewards, batch["values"], mask, 1.0, 0.95)
    reported = update(worker, left_right_2_no_padding(batch), METRICS)
    values = torch.cat(by_replica, 1)[0]
    return {"values": values.sum(1).tolist(), "last": values[:, -1].tolist()} | reported


def check_saved(worker: TrainingWorker, folder: Path) -> None:
    """Check that transformers computes the values of the engine with the model that a checkpoint has."""
    worker.save_checkpoint(str(folder))
    batch = rollout(RandomPolicy(), 9)
    rank, size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    batch = batch.chunk(size)[rank].contiguous()
    ours = outputs(worker, batch, ("values",))[rank][0]
    model = AutoModelForTokenClassification.from_pretrained(folder / "hf").eval()
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        values = model(**inputs).logits[:, -LENGTH - 1 : -1, 0]
    mask = batch["response_mask"]
    torch.testing.assert_close(ours * mask, values * mask, rtol=1e-4, atol=1e-5)


def check_trained(worker: TrainingWorker, kinds: list[str]) -> None:
    """Check that parameters of each of ``kinds``, fragments of names, are trained, and no others."""
    chunks = worker.engine.models.chunks
    trained = [name for chunk in chunks for name, param in chunk.named_parameters() if param.requires_grad]
    assert all(any(kind in name for name in trained) for kind in kinds), trained
    others = [name for name in trained if not any(kind in name for kind in kinds)]
    assert not others, others


def critic(job: dict[str, Any], config: DictConfig) -> None:
    """Run iterations of the critic and write a line of JSON for each to ``job["log"]``."""
    verl.utils.model.load_valuehead_model = _load_without_flash_attention
    initialize_global_process_group()
    worker = new_worker(config, "value_model")
    loss = CriticConfig(strategy=config.engine.strategy, ppo_micro_batch_size_per_gpu=2)
    worker.set_loss_fn(partial(value_loss, config=loss))
    lines = [
        json.dumps(iterate(worker, rollout(RandomPolicy(), iteration)))
        for iteration in range(job["iterations"])
    ]
    if kinds := job.get("trains"):
        check_trained(worker, kinds)
    if job.get("saves"):
        check_saved(worker, Path(job["saves"]))
    if worker.engine.is_mp_src_rank_with_outputs() and worker.engine.get_data_parallel_rank() == 0:
        Path(job["log"]).write_text(os.linesep.join(lines))
    dist.barrier()
    dist.destroy_process_group()
