"""A trainer's arguments may not ask for another model than the one that it is given: nothing would come of that.

What shapes a model is said when it is made. What a trainer's arguments leave out stays as it was said there.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError
from mca_config.layout import SIZE_FIELDS, ParallelLayout
from mca_config.types import Typed, Values
from mca_train.trainer.unused_options import without_effect
from mca_train.types import VirtualModels

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_ALWAYS_ON = "calculate_per_token_loss"
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_SHORT = {name: short for short, name in SIZE_FIELDS.items()}


def require_made_with(model: VirtualModels, args: "TrainingArguments") -> None:
    """Refuses arguments that ask for what ``model`` was not made with.

    Raises:
        McaError: They do; all of it is named.
    """
    if args is model.args:
        return
    found = [*_layout(model, args), *_precision(model, args), *_settings(model, args)]
    if found:
        raise McaError(
            f"args ask for what the model was not made with: {', '.join(found)}; give AutoModel the same args, or "
            "leave that out here"
        )


def _differs(name: str, asked: Typed, made: Typed) -> str:
    return f"{name} {getattr(asked, 'name', asked)} (the model: {getattr(made, 'name', made)})"


def _layout(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    made = model.config.layout
    asked = args.layout(made)
    for name in LAYOUT_FIELDS:
        if getattr(args, name) is not None and _entry(asked, name) != _entry(made, name):
            yield _differs(name, _entry(asked, name), _entry(made, name))


def _entry(layout: ParallelLayout, name: str) -> Typed:
    """A field of ``layout``; a size in full, where None stands for one."""
    return getattr(layout, _SHORT.get(name, name))


def _precision(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    for name, dtype in _PRECISIONS.items():
        if getattr(args, name) and model.config.dtype != dtype:
            yield _differs(name, True, model.config.dtype)


def _settings(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    """Of Megatron's configuration, as far as this would be another one, and compute otherwise."""
    from mca_models.megatron.factory.transformer_config import transformer_config

    config, made = model.config, model.args.transformer_config_overrides()
    asked = {
        name: value
        for name, value in args.transformer_config_overrides().items()
        if name not in made or made[name] != value
    }
    if not asked:
        return
    is_one, would_be = (
        transformer_config(config, each, config.layout, config.dtype)
        for each in (model.args, _with(model.args, asked))
    )
    idle = {_ALWAYS_ON, *without_effect(args, config, would_be)}
    for name in asked:
        if name not in idle and getattr(would_be, name) != getattr(is_one, name):
            yield _differs(name, getattr(would_be, name), getattr(is_one, name))


def _with(args: DistributingParallelArguments, changes: Values) -> DistributingParallelArguments:
    changed = copy.copy(args)
    extra = dict(args.additional_configs) if isinstance(args.additional_configs, dict) else {}
    for name, value in changes.items():
        if name in vars(args):
            setattr(changed, name, value)
        else:
            extra[name] = value
    changed.additional_configs = extra
    return changed
