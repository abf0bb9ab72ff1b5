"""Megatron's optimizer of this rank, built from HF's and Megatron's argument names."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from mca_config.types import JsonObject
from mca_train.engine.offload import rebuild_hybrids
from mca_train.engine.param_groups import param_group_overrides
from mca_train.types import Chunk, MegatronOptimizer, TrainingArguments, Wrapper


def build_optimizer(
    chunks: Sequence[Wrapper], args: TrainingArguments, params_dtype: torch.dtype
) -> MegatronOptimizer:
    """Return Megatron's optimizer of all trained parameters of ``chunks``; collective."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(**optimizer_settings(args, params_dtype))
    optimizer = get_megatron_optimizer(config, chunks, **param_group_overrides(args, config))
    _drop_stub_optimizers(optimizer)
    _share_loss_scale(optimizer)
    rebuild_hybrids(optimizer)
    if args.optimizer == "muon":
        _set_muon_qkv_shapes(chunks)
    return optimizer


def optimizer_settings(args: TrainingArguments, params_dtype: torch.dtype) -> JsonObject:
    """Return the fields of Megatron's ``OptimizerConfig`` from HF's and Megatron's argument names."""
    settings: JsonObject = {
        "optimizer": "adam",
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": args.adam_epsilon,
        "sgd_momentum": 0.0,
        "optimizer_offload_fraction": 1.0,
        "initial_loss_scale": 2.0**16,
        "store_param_remainders": False,  # checkpoints hold full main parameters
        "clip_grad": args.max_grad_norm or 0.0,
        "bf16": params_dtype == torch.bfloat16,
        "fp16": params_dtype == torch.float16,
        "params_dtype": params_dtype,
    }
    settings |= args.optimizer_config_overrides()
    if settings.get("decoupled_lr") == args.learning_rate:
        # identical parameter groups cannot be distinguished in a checkpoint
        decoupled_min = settings.get("decoupled_min_lr")
        if decoupled_min in (None, settings.get("min_lr")):
            del settings["decoupled_lr"]
    return settings


def _drop_stub_optimizers(optimizer: MegatronOptimizer) -> None:
    """Remove optimizers without parameters from a chain, for example the dense one if only experts are trained.

    A stub has nothing to save. Its loss scale, which the losses use, never sees an overflow.
    """
    singles = getattr(optimizer, "chained_optimizers", [])
    trained = [single for single in singles if not getattr(single, "is_stub_optimizer", False)]
    if 0 < len(trained) < len(singles):
        optimizer.chained_optimizers = trained


def _share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """Give all optimizers of a chain the first one's loss scale, updated once a step from all overflow checks.

    In fp16 Megatron gives the experts' optimizer a loss scale separate from that of the dense parameters (megatron-core
    0.16.1 and 0.19.2). Losses are multiplied by the first scale, and each optimizer divides its gradients by its own.
    After an overflow in one optimizer alone, the gradients of the other are wrong by the quotient of the two scales.
    """
    singles = getattr(optimizer, "chained_optimizers", [])
    if (
        len(singles) < 2 or getattr(singles[0], "grad_scaler", None) is None
    ):  # a non-distributed fp32 optimizer has no scaler
        return
    for single in singles[1:]:
        single.grad_scaler = singles[0].grad_scaler
    optimizer.prepare_grads = partial(_prepare_grads, optimizer)


def _prepare_grads(optimizer: MegatronOptimizer) -> bool:
    """Divide all gradients by the scale; return True if one is not finite."""
    scaler = optimizer.chained_optimizers[0].grad_scaler
    scaler.update = lambda overflowed: None
    try:
        overflowed = [bool(single.prepare_grads()) for single in optimizer.chained_optimizers]
    finally:
        del scaler.update
    scaler.update(any(overflowed))
    return any(overflowed)


def _set_muon_qkv_shapes(chunks: Iterable[Chunk]) -> None:
    """Set Muon's split of fused QKV weights in layers with their own numbers of heads.

    Muon orthogonalizes queries, keys and values separately, with the head counts of Megatron's configuration. In a
    layer with other head counts that split is wrong.
    """
    for chunk in chunks:
        for attention in chunk.modules():
            if not hasattr(attention, "qkv_group_rows"):
                continue
            rows, weight = attention.qkv_group_rows(), attention.linear_qkv.weight
            for tensor in (weight, getattr(weight, "main_param", None)):
                if tensor is not None:
                    tensor.is_qkv, tensor.qkv_split_shapes = len(rows) > 1, rows
