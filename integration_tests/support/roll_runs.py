"""ROLL's own strategies on CPU ranks: its worker, batches and training steps for the tests of its facade."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mca_train.clients import client_path

CHECKOUT = os.environ.get("MCA_ROLL")
"""A checkout of ROLL, which is on no package index."""

IMPORTED = {
    "mcore_adapter": ["TrainingArguments"],
    "mcore_adapter.adapters": [
        "apply_megatron_lora",
        "find_all_embedding_modules",
        "find_all_linear_modules",
        "find_all_router_modules",
        "set_linear_is_expert",
    ],
    "mcore_adapter.checkpointing": [
        "generate_model_state_dict",
        "get_checkpoint_dir",
        "load_state_dict_from_checkpoint",
    ],
    "mcore_adapter.constants": ["MCA_CONFIG_NAME"],
    "mcore_adapter.models": ["AutoModel"],
    "mcore_adapter.models.converter.model_converter": ["ModelConverter"],
    "mcore_adapter.models.model_factory": ["McaGPTModel", "VirtualModels"],
    "mcore_adapter.models.sequence_packing_mixin": ["MultimodalEmbeddingMixin"],
    "mcore_adapter.parallel_functions": ["context_parallel_gather", "vocab_parallel_logprobs"],
    "mcore_adapter.patcher": [
        "patch_torch_find_nd_overlapping_shards",
        "patch_torch_validate_global_plan",
    ],
    "mcore_adapter.trainer.utils": [
        "build_sharded_state_dict_metadata",
        "get_ltor_masks_and_position_ids",
        "get_megatron_lr_scheduler",
    ],
}
"""Names that ROLL imports in its strategy, weight update and model provider."""


def facade() -> SimpleNamespace:
    """Import the facade in a forked rank, and ROLL from the checkout if there is one."""
    for folder in filter(None, (CHECKOUT, str(client_path("roll")))):
        sys.path.insert(0, folder)
    modules = {module: importlib.import_module(module) for module in IMPORTED}
    return SimpleNamespace(
        **{name: getattr(modules[module], name) for module, names in IMPORTED.items() for name in names}
    )


STEPS, ROWS, LENGTH = 3, 4, 32


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return a batch of ROLL: rows with padding on the right and a mask of the responses."""
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 60, (ROWS, LENGTH), generator=drawn)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 24:], mask[3, 20:] = 0, 0
    response = mask.clone()
    response[:, :6] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "response_mask": response}


def shifted_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the labels of ROLL's supervised collator: the next token of each, -100 outside of the response."""
    labels = batch["input_ids"].masked_fill(batch["response_mask"] == 0, -100).roll(-1, 1)
    labels[:, -1] = -100
    return labels


def worker_of_roll(path: Path, out: Path, options: dict[str, Any]) -> SimpleNamespace:
    """Return what ROLL's strategies read of a worker."""
    from roll.configs.worker_config import SequencePackingConfig
    from roll.distributed.executor.worker import RankInfo
    from roll.distributed.strategy import megatron_strategy
    from roll.models import model_providers
    from roll.platforms import current_platform

    model_providers.download_model = str  # it asks a Ray actor for the path of a download
    for name in ("current_device", "synchronize", "empty_cache", "get_rng_state", "set_rng_state"):
        # ROLL names devices TYPE:NUMBER, and its CPU platform has no caches and no generator
        setattr(type(current_platform), name, staticmethod(lambda *_: 0))
    options = dict(options)
    packing, frozen = options.pop("packing", False), options.pop("frozen", False)
    if (
        packing
    ):  # transformers returns the tokenizer if there is no processor, and ROLL does not pack models with one
        megatron_strategy.default_processor_provider = lambda *_, **__: None
    lora, replay = {"lora_target": None} | options.pop("lora", {}), options.pop("replay", None)
    return SimpleNamespace(
        rank_info=RankInfo(),
        pipeline_config=SimpleNamespace(sequence_length=LENGTH, max_grad_norm=1.0),
        worker_config=SimpleNamespace(
            name="actor",
            offload_nccl=False,
            checkpoint_config={},
            use_sequence_packing=packing,
            use_dynamic_batching_in_train=False,
            use_dynamic_batching_in_infer=False,
            sequence_packing_args=SequencePackingConfig(),
            router_replay=SimpleNamespace(mode=replay),
            apply_loss_scale=False,
            logits_in_fp32=True,
            model_args=SimpleNamespace(
                model_name_or_path=str(path),
                moe_aux_loss_coef=None,
                freeze_module_prefix=["embedding"] if frozen else None,
                **lora,
            ),
            strategy_args=SimpleNamespace(strategy_config=options),
            training_args=SimpleNamespace(
                max_steps=STEPS,
                per_device_train_batch_size=2,
                to_dict=lambda: arguments_of_roll(out),
            ),
        ),
    )


def train_strategy(path: Path, out: Path, options: dict[str, Any]) -> Any:
    """Return ROLL's unmodified training strategy with the model of ROLL's provider."""
    facade()
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy
    from roll.models.model_providers import default_actor_model_provider

    strategy = MegatronTrainStrategy(worker_of_roll(path, out, options))
    strategy.initialize(default_actor_model_provider)
    return strategy


def train_steps(
    strategy: Any, steps: range, *, sft: bool = False, batches: Callable[[int], dict[str, Any]] = batch_of
) -> list[float]:
    """Train and return the loss of each step, the sum over its micro-batches; 0 where the last stage is elsewhere.

    Args:
        strategy: ROLL's strategy.
        steps: Numbers of the steps.
        sft: Take the loss of ROLL's supervised worker, whose model computes the cross entropy of the labels.
        batches: Returns the batch of a step; arrays of objects are no tensors.
    """
    from roll.distributed.scheduler.protocol import DataProto

    seen: list[float] = []

    def loss(data: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data.batch["attention_mask"]
        if sft:
            value, metrics = strategy.op_compute_language_loss(logits, data.batch["labels"], 50)
            seen.append(value.item())
            return value, metrics
        log_probs = strategy.op_compute_log_probs(logits, data.batch["input_ids"], mask)
        value = -(log_probs * data.batch["response_mask"][:, 1:]).sum() / 50
        seen.append(value.item())
        return value, {"loss": value.item()}

    losses = []
    for step in steps:
        info = {"loss_mask_keys": [], "is_offload_optimizer_states_in_train_step": False}
        batch = batches(step)
        if sft:
            batch["labels"] = shifted_labels(batch)
        objects = {name: batch.pop(name) for name in list(batch) if not isinstance(batch[name], torch.Tensor)}
        strategy.train_step(DataProto.from_dict(batch, objects, meta_info=info), loss)
        losses.append(sum(seen))
        seen.clear()
    return losses


def arguments_of_roll(out: Path) -> dict[str, Any]:
    """Return what ROLL's worker passes as training arguments."""
    return {
        "output_dir": str(out),
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "report_to": "none",
        "use_cpu": True,
        "use_distributed_optimizer": True,
    }


def _logits(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
    return logits


def reference_losses(
    model: Any,
    *,
    batches: Callable[[int], dict[str, Any]] = batch_of,
    logits_of: Callable[[Any, dict[str, Any]], torch.Tensor] = _logits,
) -> list[float]:
    """Return the losses of the steps of `train_steps` with a transformers model, each the sum over two micro-batches.

    Args:
        model: The model, some of whose parameters may be frozen.
        batches: Returns the batch of a step.
        logits_of: Returns the logits of the model and a micro-batch.
    """
    optimizer = torch.optim.AdamW(
        [x for x in model.parameters() if x.requires_grad], lr=1e-2, weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        total, batch = 0.0, batches(step)
        for half in (slice(0, ROWS // 2), slice(ROWS // 2, None)):
            micro = {name: value[half] for name, value in batch.items()}
            ids, mask, response = (micro[name] for name in ("input_ids", "attention_mask", "response_mask"))
            logits = logits_of(model, micro)[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            loss = -(log_probs * mask[:, 1:] * response[:, 1:]).sum() / 50
            (loss / 2).backward()  # the mean over the micro-batches
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
