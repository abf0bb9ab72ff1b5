"""A GRPO loop of verl's `TrainingWorker` with a rollout by transformers, for any engine of verl, on CPU ranks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group
from verl.workers.config import ActorConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from mca_config.errors import McaError
from verl_media import MediaRollout

PROMPTS, ANSWERS, LENGTH = 4, 2, 12
"""Prompts of an iteration, answers to each, and tokens of an answer."""


def new_worker(
    config: DictConfig, model_type: str = "language_model", kind: type[TrainingWorker] = TrainingWorker
) -> Any:
    """Return an initialized worker of the engine in ``config``, without a loss."""
    worker = kind(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=omega_conf_to_dataclass(config.model),
            engine_config=omega_conf_to_dataclass(config.engine),
            optimizer_config=omega_conf_to_dataclass(config.optim),
            checkpoint_config=omega_conf_to_dataclass(config.checkpoint),
            profiler_config=omega_conf_to_dataclass(config.profiler),
        )
    )
    worker.optimizer_config.total_training_steps = config.trainer.total_training_steps
    worker.reset()
    return worker


def new_actor(config: DictConfig) -> TrainingWorker:
    """Return a worker of the engine in ``config`` with the loss of verl's actor."""
    worker = new_worker(config)
    actor = ActorConfig(
        strategy=config.engine.strategy,
        rollout_n=ANSWERS,
        ppo_micro_batch_size_per_gpu=2,
        entropy_coeff=0.01,
        use_kl_loss=True,
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def rollout(model: Any, iteration: int) -> TensorDict:
    """Return sampled answers to random prompts, padded as verl's rollout pads them; the same on every rank."""
    torch.manual_seed(iteration)
    lengths = torch.randint(3, 9, (PROMPTS,))
    width = int(lengths.max())
    prompts = torch.zeros(PROMPTS, width, dtype=torch.int64)
    mask = torch.arange(width) >= width - lengths[:, None]
    prompts[mask] = torch.randint(3, 400, (int(mask.sum()),))
    prompts, mask = prompts.repeat_interleave(ANSWERS, 0), mask.repeat_interleave(ANSWERS, 0)
    with torch.no_grad():
        ids = model.generate(
            prompts, attention_mask=mask.long(), do_sample=True, max_new_tokens=LENGTH, eos_token_id=None
        )
    responses = ids[:, width:]
    ends = torch.randint(4, LENGTH + 1, (len(ids),))
    response_mask = torch.arange(LENGTH) < ends[:, None]
    responses = responses * response_mask
    attention = torch.cat([mask, response_mask], 1).long()
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask.long(),
        },
        batch_size=len(ids),
    )


COMMON = {"temperature": 0.8, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "pad_token_id": 0}


def infer(worker: TrainingWorker, batch: TensorDict, **options: Any) -> list[torch.Tensor]:
    """Return log-probabilities and entropies ``[2, samples, tokens]`` of the answers of each replica."""
    return outputs(worker, batch, ("log_probs", "entropy"), calculate_entropy=True, **options)


def outputs(
    worker: TrainingWorker, batch: TensorDict, names: tuple[str, ...], **options: Any
) -> list[torch.Tensor]:
    """Return the model's outputs ``[names, samples, tokens]`` for the answers of each replica."""
    engine = worker.engine
    data = left_right_2_no_padding(batch.clone())
    tensordict_utils.assign_non_tensor(data, compute_loss=False, **COMMON, **options)
    output = worker.infer_batch(data)
    found = torch.zeros(len(names), *batch["responses"].shape)
    if engine.is_mp_src_rank_with_outputs():
        for number, name in enumerate(names):
            found[number] = no_padding_2_padding(output[name], data).float()
    by_rank = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, found)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs()))
    by_replica = {replica: values for (replica, has), values in zip(ranks, by_rank, strict=True) if has}
    return [by_replica[replica] for replica in range(engine.get_data_parallel_size())]


def update(worker: TrainingWorker, data: TensorDict, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Train two epochs on this replica's part ``data``; return the metrics ``names`` where verl reports them."""
    total = PROMPTS * ANSWERS
    tensordict_utils.assign_non_tensor(
        data,
        global_batch_size=total,
        mini_batch_size=total,
        epochs=2,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
        **COMMON,
    )
    updated = worker.train_mini_batch(data)
    if updated is None:
        return {}
    metrics = tensordict_utils.get(updated, "metrics")
    return {name: np.asarray(metrics[name], dtype=np.float64).ravel().tolist() for name in names}


def iterate(worker: TrainingWorker, batch: TensorDict, *, lora: bool) -> dict[str, Any]:
    """Run one GRPO iteration on this replica's part of ``batch``; return what verl reports, and log-probabilities.

    The reference is the model without its adapter or, if it has none, near the policy.
    """
    rank, size = worker.engine.get_data_parallel_rank(), worker.engine.get_data_parallel_size()
    rewards = torch.zeros(batch["responses"].shape)
    rewards[:, 0] = (batch["responses"] % 7 == 0).float().sum(1)  # tokens that are multiples of 7
    index = np.repeat(np.arange(PROMPTS), ANSWERS)
    batch["advantages"], _ = compute_grpo_outcome_advantage(rewards, batch["response_mask"], index)
    batch = tensordict_utils.contiguous(tensordict_utils.chunk_tensordict(batch, size)[rank])  # as verl does
    policy = infer(worker, batch)
    batch["old_log_probs"] = policy[rank][0]
    batch["ref_log_prob"] = batch["old_log_probs"] - 0.01 * batch["response_mask"]
    if lora:
        batch["ref_log_prob"] = infer(worker, batch, no_lora_adapter=True)[rank][0]
    data = left_right_2_no_padding(batch)
    tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
    names = ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss")
    reported = update(worker, data, names)
    whole = torch.cat(policy, 1).double()
    return {"log_probs": whole[0].sum(1).tolist(), "entropy": whole[1].sum(1).tolist()} | reported


class DeltaReceiver:
    """Receiver of a sharded-delta engine: full weights once, then verl's entries of changed elements."""

    def __init__(self, worker: TrainingWorker) -> None:
        self._engine = worker.engine
        shards, _ = self._engine.get_per_tensor_param_shard()
        own = {name: flat.view(spec.full_shape).clone() for name, flat, spec in shards if spec.contributes}
        parts: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        self._weights = {name: tensor for part in parts for name, tensor in part.items()}
        assert len(self._weights) == sum(map(len, parts)), "several ranks send the same tensor"
        self._engine.prime_delta_snapshots()

    def receive(self) -> tuple[int, bool]:
        """Apply the changes; return their number, and whether the weights equal the engine's to the bit."""
        changes, _ = self._engine.get_per_tensor_param_delta_shard()
        number = 0
        for slots, _dtype, counts, index, values, group in changes:
            gathered = gather_slot_entries_to_rank0(index, values, counts, group)
            for (name, _shape), (where, what) in zip(slots, gathered or (), strict=bool(gathered)):
                self._weights[name].view(-1)[where.long()] = what
                number += what.numel()
        current, _ = self._engine.get_per_tensor_param()
        same = [torch.equal(self._weights[name], tensor.bfloat16()) for name, tensor in current]
        result = [(number, all(same))]
        dist.broadcast_object_list(result, 0)  # verl gathers on the first rank
        return result[0]


def check_adapter(worker: TrainingWorker) -> None:
    """Check that base model and adapter, sent one after the other, are the merged model that is sent otherwise."""
    engine = worker.engine
    merged = dict(engine.get_per_tensor_param()[0])
    engine.model_config.lora["merge"] = False
    base, config = engine.get_per_tensor_param(base_sync_done=False)
    base = {name.replace(".base_layer", ""): (name, tensor) for name, tensor in base}
    adapter = dict(engine.get_per_tensor_param(base_sync_done=True)[0])
    engine.model_config.lora["merge"] = True
    assert merged.keys() == base.keys()
    scale = config["lora_alpha"] / config["r"]
    for name, tensor in merged.items():
        sent_as, expected = base[name]
        factors = [
            adapter.pop(f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight", None)
            for side in "BA"
        ]
        if factors[0] is not None:
            assert ".base_layer." in sent_as
            expected = expected + scale * factors[0] @ factors[1]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    assert not adapter


def check_offload(worker: TrainingWorker) -> None:
    """Check that after training verl has moved everything to host memory, and that a use moves back its part only."""
    from mca_train.clients.verl.offload import gradient_storages, model_storages, optimizer_storages

    engine = worker.engine

    def held() -> list[bool]:
        groups = (model_storages(engine._pipeline), gradient_storages(engine._pipeline))
        groups += (optimizer_storages(engine._pipeline, engine.optimizer),)
        assert all(groups)
        return [any(each.nbytes() for each in group.values()) for group in groups]

    assert held() == [False, False, False]
    engine.to("cpu")  # a second time changes nothing
    next(engine.get_per_tensor_param()[0])
    assert held() == [True, False, False]
    engine.to("cpu", model=True, optimizer=False, grad=False)
    assert held() == [False, False, False]


def grpo(job: dict[str, Any], config: DictConfig) -> None:
    """Run iterations of GRPO and write a line of JSON for each to ``job["log"]``."""
    initialize_global_process_group()
    worker = new_actor(config)
    media = MediaRollout(config.model.path, ANSWERS, LENGTH) if job.get("media") else None
    model = AutoModelForCausalLM.from_pretrained(config.model.path).eval() if media is None else None
    receiver = DeltaReceiver(worker) if job.get("delta") else None
    lines = []
    for iteration in range(job["iterations"]):
        if (
            model is not None and not config.model.lora_rank
        ):  # FSDP merges into bf16, from which other tokens would be drawn
            weights, _ = worker.engine.get_per_tensor_param()
            sent = {name: tensor.float() for name, tensor in weights}
            model = type(model).from_pretrained(None, config=model.config, state_dict=sent).eval()
        batch = rollout(model, iteration) if media is None else media.batch(iteration)
        line = iterate(worker, batch, lora=config.model.lora_rank > 0)
        if job.get("offloads"):
            check_offload(worker)
        if receiver is not None:
            line["delta"] = receiver.receive()
        if job.get("adapter"):
            check_adapter(worker)
        lines.append(json.dumps(line))
    if worker.engine.is_mp_src_rank_with_outputs() and worker.engine.get_data_parallel_rank() == 0:
        Path(job["log"]).write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def batch_errors(vision: Path) -> list[str]:
    """Return the error of each batch that the engine mca does not support.

    Args:
        vision: Directory of a Qwen2.5-VL.
    """
    from mca_models import config_from_hf
    from mca_train.clients.verl.batches import sample_images, sequences, token_values

    document = json.loads((vision / "config.json").read_text())
    config = config_from_hf(document)
    text = replace(config, mrope=None, vision=None)
    plain = replace(config, mrope=None)
    image = document["image_token_id"]
    pictures = {"pixel_values": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}

    def images_of(model: Any) -> Any:
        return lambda data: sample_images(data, [torch.tensor([5, image, 6])], model)

    places = {"position_ids": torch.nested.as_nested_tensor([torch.arange(3)], layout=torch.jagged)}
    shifted = torch.arange(1, 4).expand(4, -1)
    wrong = {"position_ids": torch.nested.as_nested_tensor([shifted], layout=torch.jagged)}
    found = []
    for check, tensors, values in (
        (token_values, {"temperature": torch.tensor([1.0, 0.5])}, {}),
        (token_values, {}, {"distillation_use_topk": True}),
        (token_values, {}, {"calculate_sum_pi_squared": True}),
        (sequences, {"input_ids": torch.zeros(2, 3)}, {}),
        (images_of(text), places, {"multi_modal_inputs": [pictures]}),
        (images_of(config), places, {"multi_modal_inputs": [pictures | {"audio_features": torch.ones(1)}]}),
        (images_of(config), wrong, {"multi_modal_inputs": [pictures]}),
        (images_of(config), places, {"multi_modal_inputs": [{}]}),
        (images_of(plain), wrong, {"multi_modal_inputs": [pictures]}),
    ):
        try:
            check(tensordict_utils.get_tensordict(tensors, values))
            found.append("no error")
        except McaError as error:
            found.append(str(error))
    return found
