"""Megatron parameter groups for the learning rates of a multimodal model's parts.

A group's learning rate follows the run's schedule, which `lr_schedule` writes.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_models.megatron.peft import PeftModels
from mca_models.templates.trainable_parts import PARTS, Part, model_part
from mca_train import groups
from mca_train.config.model_parts import (
    MEDIA_PARTS,
    PART_RATES,
    absent_parts,
    adapter_parts,
    trained_parts,
    trained_problems,
)
from mca_train.types import TrainingArguments, Upstream

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
    keys = [key for key in PART_RATES.values() if getattr(args, key) is not None]
    if model.config.vision is None:
        return
    if keys or args.overlap_param_gather:
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
