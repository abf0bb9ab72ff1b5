"""Megatron's optimizer of this rank, with the trained parts of a multimodal model and their learning rates.

A parameter group's learning rate follows the run's schedule, which `lr_schedule` writes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.megatron.peft import PeftModels
from mca_models.templates.parts.vision_language import PARTS, Part, model_part
from mca_train import groups
from mca_train.config.model_parts import (
    MEDIA_PARTS,
    PART_RATES,
    absent_parts,
    adapter_parts,
    trained_parts,
    trained_problems,
)
from mca_train.engine.offload import rebuild_hybrids
from mca_train.types import Chunk, MegatronOptimizer, TrainingArguments, Upstream, Wrapper

if TYPE_CHECKING:
    from mca_models import VirtualModels

_MARK = "mca_part"


def select_trained_parts(model: "VirtualModels", args: TrainingArguments) -> None:
    """Freeze the parts named in ``freeze`` and mark every parameter with its part, before DDP wrapping. Collective.

    Parameters that the user froze within a trained part stay frozen.

    Raises:
        McaError: The model has no such parts, or cannot train them as the arguments ask.
    """
    for problem in absent_parts(args, model.config):
        raise McaError(problem)
    for item, tensor in model.local_params():
        setattr(tensor, _MARK, model_part(item.param, model.config))
    if args.freeze is not None and isinstance(model, PeftModels):
        _reject_adapter_on(adapter_parts(model.rules, model.config), args.freeze)
    elif args.freeze is not None:
        user_frozen = _user_frozen(model)
        model.train_parts(trained_parts(args, model.config))
        for tensor in user_frozen:
            tensor.requires_grad_(False)
    for problem in _problems(model, args, adapted=isinstance(model, PeftModels)):
        raise McaError(problem)


def _reject_adapter_on(adapted: Collection[Part], frozen: Collection[str]) -> None:
    """Raise if the adapter, whose targets are fixed, is on a frozen part."""
    if trained := [part for part in adapted if part in frozen]:
        raise McaError(
            f"freeze: the adapter is on {', '.join(sorted(trained))}; remove it from freeze, or create the adapter "
            "with other parts (get_peft_model(..., parts=...))"
        )


def _user_frozen(model: "VirtualModels") -> list[torch.Tensor]:
    """Return this rank's frozen parameters in parts of which any rank trains something; collective."""
    params = [tensor for _, tensor in model.local_params() if isinstance(tensor, torch.nn.Parameter)]
    here = {getattr(tensor, _MARK) for tensor in params if tensor.requires_grad}
    device = groups.current_ranks(model.config.layout).device
    trained = {part for part in PARTS if groups.max_over_ranks(float(part in here), device)}
    return [tensor for tensor in params if getattr(tensor, _MARK) in trained and not tensor.requires_grad]


def _problems(model: "VirtualModels", args: TrainingArguments, *, adapted: bool) -> Iterator[str]:
    """Yield `trained_problems` for the parts that the model trains; the same on every rank."""
    has_rates = any(getattr(args, key) is not None for key in PART_RATES.values())
    if model.config.vision is not None and (has_rates or args.overlap_param_gather):
        yield from trained_problems(args, _trained_media_parts(model), adapted=adapted)


def _trained_media_parts(model: "VirtualModels") -> set[Part]:
    """Return the parts for media that any rank trains, directly or through an adapter; collective."""
    here = {
        getattr(tensor, _MARK, "vision")  # adapter parameters have no mark
        for chunk in model.chunks
        for tensor in getattr(chunk, "vision_model", torch.nn.Module()).parameters()
        if tensor.requires_grad
    }
    device = groups.current_ranks(model.config.layout).device
    return {part for part in MEDIA_PARTS if groups.max_over_ranks(float(part in here), device)}


def param_group_overrides(args: TrainingArguments, config: Upstream) -> JsonObject:
    """Return ``config_overrides`` for ``get_megatron_optimizer``; empty if no part has its own learning rate.

    Args:
        args: The learning rates.
        config: Megatron's ``OptimizerConfig``, whose standard overrides are kept.
    """
    configured = {part: getattr(args, key) for part, key in PART_RATES.items()}
    # identical parameter groups cannot be distinguished in a checkpoint
    rates = {part: rate for part, rate in configured.items() if rate not in (None, args.learning_rate)}
    if not rates:
        return {}
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    overrides: JsonObject = {**(get_standard_config_overrides(config) or {})}
    for part, rate in rates.items():
        key = ParamKey(predicate=ParamPredicate(f"mca_{part}", _is_part(part)))
        overrides[key] = {"max_lr": rate}
    return {"config_overrides": overrides}


def _is_part(part: str) -> Upstream:
    return lambda parameter: getattr(parameter, _MARK, None) == part


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
