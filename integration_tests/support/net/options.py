"""Layouts and training options to draw from: tables, no rule about what fits with what."""

import random
from collections.abc import Iterator
from typing import Any

Options = dict[str, Any]
Table = tuple[tuple[float, tuple[Options, ...]], ...]
"""How often one of the choices is taken."""

SPLIT = {"use_distributed_optimizer": True}
REDUCE = {"overlap_grad_reduce": True}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
OFFLOAD = {"optimizer_cpu_offload": True}

GENERAL: Table = (
    (0.5, (SPLIT, REDUCE, SPLIT | REDUCE, SPLIT | REDUCE | {"overlap_param_gather": True})),
    (0.4, tuple(REDUCE | {"ddp_bucket_size": size} for size in (1, 300, 5000))),
    (
        0.35,
        (
            FULL | {"recompute_method": "uniform", "recompute_num_layers": 1},
            FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
            FULL | {"recompute_method": "block", "recompute_num_layers": 1},
            {"gradient_checkpointing": True},
            SELECTIVE,
            SELECTIVE | {"recompute_modules": ["core_attn", "mlp"]},
            SELECTIVE | {"recompute_modules": ["layernorm"]},
            SELECTIVE | {"recompute_modules": ["mla_up_proj"]},
        ),
    ),
    (0.2, ({"sequence_packing": True},)),
    (0.15, tuple({"loss_chunk_size": size} for size in (5, 17))),
    (0.12, ({"label_smoothing_factor": 0.1},)),
    (0.6, tuple({"max_grad_norm": norm} for norm in (0.0, 0.02, 0.3, 100.0))),
    (
        0.2,
        (
            *({"decoupled_lr": rate} for rate in (0.0, 3e-4, 6e-3)),
            {"decoupled_lr": 6e-3, "decoupled_min_lr": 1e-3, "lr_scheduler_type": "cosine"},
        ),
    ),
    (0.12, ({"optimizer": "sgd"}, {"optim": "sgd"}, {"optimizer": "sgd", "sgd_momentum": 0.9})),
    (
        0.08,
        (
            OFFLOAD,
            OFFLOAD | {"optimizer_offload_fraction": 0.5},
            OFFLOAD | {"use_precision_aware_optimizer": True},
        ),
    ),
    (
        0.3,
        (
            {"lr_scheduler_type": "linear", "warmup_steps": 1},
            {"lr_scheduler_type": "cosine", "min_lr": 2e-4},
            {"lr_scheduler_type": "linear"},
        ),
    ),
    (0.2, ({"weight_decay": 0.0}, {"weight_decay": 0.3})),
    (0.2, ({"eval_on_start": True}, {"eval_strategy": "steps", "eval_steps": 1})),
    (
        0.1,
        ({"deterministic_mode": True}, {"attention_softmax_in_fp32": False}, {"attention_backend": "local"}),
    ),
    (
        0.1,
        (
            {"bias_activation_fusion": True},
            {"bias_dropout_fusion": True},
            {"cross_entropy_loss_fusion": True},
        ),
    ),
    (
        0.05,
        ({"apply_rope_fusion": True}, {"variable_seq_lengths": True}, {"distribute_saved_activations": True}),
    ),
    (0.05, ({"calculate_per_token_loss": True}, {"check_for_nan_in_grad": True}, {"load_broadcast": True})),
    (0.05, ({"accumulate_allreduce_grads_in_fp32": True}, {"num_distributed_optimizer_instances": 2})),
    (0.06, ({"overlap_p2p_comm": True}, {"overlap_p2p_comm": False}, {"batch_p2p_comm": True})),
)
BALANCE = ("aux_loss", "seq_aux_loss", "global_aux_loss")
EXPERTS: Table = (
    (0.4, tuple({"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1} for kind in BALANCE)),
    (0.2, ({"moe_z_loss_coeff": 0.01},)),
    (0.25, ({"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "alltoall"})),
    (0.3, tuple({"moe_router_bias_update_rate": rate} for rate in (0.0, 0.05))),
    (0.1, ({"moe_router_dtype": "fp64"}, {"moe_router_dtype": "fp32"})),
    (0.1, ({"moe_shared_expert_overlap": True}, {"moe_grouped_gemm": True}, {"moe_permute_fusion": True})),
    (
        0.15,
        tuple(
            SELECTIVE | {"recompute_modules": modules}
            for modules in (["moe"], ["moe_act"], ["shared_experts"], ["core_attn", "moe"])
        ),
    ),
)
PREDICTION: Table = ((0.5, tuple({"mtp_loss_scaling_factor": scale} for scale in (0.1, 0.5))),)


def _weighted(rng: random.Random, weights: dict[int, float]) -> int:
    return rng.choices(list(weights), list(weights.values()))[0]


def layout(rng: random.Random, *, sparse: bool) -> Options:
    """Parallel sizes."""
    sizes: Options = {"tensor_model_parallel_size": _weighted(rng, {1: 4, 2: 4, 4: 1.5, 3: 0.5})}
    sizes["pipeline_model_parallel_size"] = _weighted(rng, {1: 4, 2: 5, 3: 1, 4: 1})
    if (cp := _weighted(rng, {1: 7, 2: 2.5, 4: 0.5})) > 1:
        sizes["context_parallel_size"] = cp
    if (ep := _weighted(rng, {1: 4, 2: 4, 4: 2} if sparse else {1: 30, 2: 1})) > 1:
        sizes["expert_model_parallel_size"] = ep
    if (etp := _weighted(rng, {0: 5, 1: 2.5, 2: 2, 4: 0.5} if sparse else {0: 30, 2: 1})) > 0:
        sizes["expert_tensor_parallel_size"] = etp
    if rng.random() < (0.6 if sizes["tensor_model_parallel_size"] > 1 else 0.03):
        sizes["sequence_parallel"] = rng.random() < 0.9
    return sizes


def split(rng: random.Random, sizes: Options, layers: int, prediction: int) -> Options:
    """Return the options that assign layers to pipeline stages."""
    if (pp := sizes["pipeline_model_parallel_size"]) == 1:
        return {}
    kind = rng.choice(("even", "even", "virtual", "virtual", "string", "string", "first", "last", "account"))
    if kind == "virtual":
        return {"virtual_pipeline_model_parallel_size": 2}
    if kind == "string":
        return {
            "pipeline_model_parallel_layout": _string(rng, pp * rng.choice((1, 1, 2)), layers, prediction)
        }
    if kind in ("first", "last"):
        return {f"num_layers_in_{kind}_pipeline_stage": rng.choice((1, 2))}
    if kind == "account":
        both = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        return dict.fromkeys(rng.choice((both, both[:1], both[1:])), True)
    return {}


def _string(rng: random.Random, stages: int, layers: int, prediction: int) -> str:
    """``E``, the layers, ``m`` and ``L`` in order, with bars anywhere between them."""
    letters = ["E", *"t" * layers, *"m" * prediction, "L"]
    places = range(1, len(letters))
    cuts = sorted(rng.sample(places, min(stages - 1, len(places))))
    parts = [letters[a:b] for a, b in zip([0, *cuts], [*cuts, len(letters)], strict=True)]
    return "|".join("".join(part) for part in parts)


def batch(rng: random.Random, sizes: Options) -> Options:
    """Micro-batches; more of them where virtual stages take turns."""
    pp = sizes["pipeline_model_parallel_size"]
    interleaved = "virtual_pipeline_model_parallel_size" in sizes or "pipeline_model_parallel_layout" in sizes
    counts = (pp, pp, 2 * pp, 3) if interleaved else (1, 2, 3)
    return {
        "per_device_train_batch_size": rng.choice((1, 1, 2)),
        "per_device_eval_batch_size": rng.choice((1, 2)),
        "gradient_accumulation_steps": rng.choice(counts),
        "lr_scheduler_type": "constant",
        "adam_epsilon": 3e-3,  # a step then is smooth in the gradients, and still depends on their size
    }


def chosen(rng: random.Random, *, sparse: bool, prediction: bool) -> Iterator[tuple[Options, ...]]:
    """Some tables' choices, each shuffled; of experts on models without them too, rarely."""
    shares = [(often, choices) for often, choices in (*GENERAL, *(PREDICTION if prediction else ()))]
    shares += [(often if sparse else often * 0.03, choices) for often, choices in EXPERTS]
    for often, choices in shares:
        if rng.random() < often:
            yield tuple(rng.sample(choices, len(choices)))


def together(found: Options, choice: Options) -> Options:
    """One kind of recomputation takes the place of another."""
    if "recompute_granularity" in choice:
        kinds = ("recompute", "gradient_check")
        found = {name: value for name, value in found.items() if not name.startswith(kinds)}
    return found | choice
