"""Learning rates of the parts of a vision-language model, as Megatron's groups of parameters.

A group's own rate follows the run's schedule, as `lr_schedule` writes it.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from mca_config.errors import McaError
from mca_config.types import JsonObject
from mca_train import groups
from mca_train.config.model_parts import PARTS, SEEING, Part, adapter_parts, trained_parts, trained_problems
from mca_train.types import TrainingArguments, Upstream

if TYPE_CHECKING:
    from mca_models import VirtualModels

_MARK = "mca_part"


def choose_parts(model: "VirtualModels", args: TrainingArguments) -> None:
    """Freezes what ``freeze`` says, and has every parameter know its part; before the model is wrapped. Collective.

    Parameters that are frozen beside trained ones of their part stay frozen.

    Raises:
        McaError: The model has no such parts, or cannot train them as the arguments say.
    """
    from mca_models.megatron.families.vision_tower import model_part
    from mca_models.megatron.peft import PeftModels

    for item, tensor in model.local_params():
        setattr(tensor, _MARK, model_part(item.param, model.config))
    if args.freeze is not None and isinstance(model, PeftModels):
        _require_without(adapter_parts(model.rules, model.config), args.freeze)
    elif args.freeze is not None:
        by_hand = _frozen_by_hand(model)
        model.train_parts(trained_parts(args))
        for tensor in by_hand:
            tensor.requires_grad_(False)
    for problem in _problems(model, args, adapted=isinstance(model, PeftModels)):
        raise McaError(problem)


def _require_without(adapted: Collection[Part], frozen: Collection[str]) -> None:
    """Refuses an adapter on parts that are to be frozen: which it is on was decided when it was made."""
    if trained := [part for part in adapted if part in frozen]:
        raise McaError(
            f"freeze: the adapter is on {', '.join(sorted(trained))}; leave it out of freeze, or make the adapter with "
            "other parts (get_peft_model(..., parts=...))"
        )


def _frozen_by_hand(model: "VirtualModels") -> list[torch.Tensor]:
    """This rank's parameters that are frozen, in parts of which something is trained on any rank; collective."""
    held = [tensor for _, tensor in model.local_params() if isinstance(tensor, torch.nn.Parameter)]
    here = {getattr(tensor, _MARK) for tensor in held if tensor.requires_grad}
    device = groups.current_ranks(model.config.layout).device
    trained = {part for part in PARTS if groups.max_over_ranks(float(part in here), device)}
    return [tensor for tensor in held if getattr(tensor, _MARK) in trained and not tensor.requires_grad]


def _problems(model: "VirtualModels", args: TrainingArguments, *, adapted: bool) -> Iterator[str]:
    """As `part_problems`, of the parts that the model trains, whoever selected them; the same on every rank."""
    given = [key for part in SEEING if getattr(args, key := f"{part}_learning_rate") is not None]
    if model.config.vision is None:
        if given:
            yield f"{', '.join(given)}: a {model.config.model_type} model has no vision part; leave it out"
        return
    if given or args.overlap_param_gather:
        yield from trained_problems(args, _seeing(model), adapted=adapted)


def _seeing(model: "VirtualModels") -> set[Part]:
    """Which of the parts that see have anything to train, an adapter's too, on the ranks that hold them."""
    here = {
        getattr(tensor, _MARK, "vision")  # that of an adapter
        for chunk in model.chunks
        for tensor in getattr(chunk, "vision_model", torch.nn.Module()).parameters()
        if tensor.requires_grad
    }
    device = groups.current_ranks(model.config.layout).device
    return {part for part in SEEING if groups.max_over_ranks(float(part in here), device)}


def rates_of_parts(args: TrainingArguments, config: Upstream) -> JsonObject:
    """``config_overrides`` of ``get_megatron_optimizer``; empty if no part has a rate of its own.

    Args:
        args: The rates.
        config: Megatron's ``OptimizerConfig``, whose own overrides stay.
    """
    given = {"vision": args.vision_learning_rate, "projector": args.projector_learning_rate}
    # groups that differ in nothing from the rest cannot be told apart in a checkpoint
    rates = {part: rate for part, rate in given.items() if rate not in (None, args.learning_rate)}
    if not rates:
        return {}
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    found: JsonObject = {**(get_standard_config_overrides(config) or {})}
    for part, rate in rates.items():
        key = ParamKey(predicate=ParamPredicate(f"mca_{part}", _is(part)))
        found[key] = {"max_lr": rate}
    return {"config_overrides": found}


def _is(part: str) -> Upstream:
    return lambda parameter: getattr(parameter, _MARK, None) == part
