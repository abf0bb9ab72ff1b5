"""Faults to plant in a trainer that is about to begin: the net has to notice each of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed

from net.case import Case

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 70}
_BATCH = {
    "pipeline_model_parallel_size": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 3e-3,
}
_TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def experts_are_not_reduced(trainer: Any) -> None:
    """Ranks with the same experts keep the gradients of their own tokens."""
    for chunk in trainer.engine.chunks:
        chunk.expert_parallel_bucket_groups.clear()


def queries_and_keys_change_places(trainer: Any) -> None:
    """The adapter of q_proj stands where that of k_proj does."""
    factors = dict(trainer.model.adapter_parameters())
    with torch.no_grad():
        for name, query in factors.items():
            if "q_proj" in name:
                key = factors[name.replace("q_proj", "k_proj")]
                kept = query.clone()
                query.copy_(key)
                key.copy_(kept)


def norms_count_twice(trainer: Any) -> None:
    """Weights that every tensor rank holds whole count once for each of them in the norm of the gradients."""
    for parameter in trainer.model.parameters():
        if parameter.dim() == 1:
            parameter.tensor_model_parallel = True


def balance_of_own_tokens(trainer: Any) -> None:
    """A router balances over the tokens of its own rank, not over those of the whole micro-batch."""
    alone = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    for module in trainer.model.modules():
        if hasattr(module, "tp_cp_group") and hasattr(module, "routing"):
            module.tp_cp_group = alone[torch.distributed.get_rank()]


def small_case(number: int, base: str, **given: Any) -> Case:
    """A model of two layers on two tensor ranks, if not otherwise."""
    options = _BATCH | given.pop("options", _TP)
    changes = _SIZES | given.pop("changes", {})
    return Case(seed=-1, number=number, base=base, **({"ranks": 2} | given), options=options, changes=changes)


FAULTS: Mapping[str, tuple[Callable[[Any], None], Case, str]] = {
    "experts": (
        experts_are_not_reduced,
        small_case(
            0, "mixtral", ranks=4, options={"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2}
        ),
        "gradient: ",
    ),
    "adapters": (
        queries_and_keys_change_places,
        small_case(1, "qwen3", lora={"target_modules": ["q_proj", "k_proj"], "r": 3, "lora_alpha": 8}),
        "loss on rank 0",
    ),
    "norm": (norms_count_twice, small_case(2, "llama"), "grad_norm on rank 0"),
    "balance": (
        balance_of_own_tokens,
        small_case(
            3,
            "qwen3_moe",
            options=_TP | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
            changes={"num_experts": 4, "num_experts_per_tok": 2},
        ),
        "gradient: ",
    ),
}
"""By name: the fault, a case that it spoils, and where that must show."""
