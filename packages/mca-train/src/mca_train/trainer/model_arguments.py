"""Check that the trainer's arguments match those that the model was built with.

Arguments that shape a model are read when it is built. Those that the trainer's arguments omit stay as they were.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mca_config.arguments import DistributingParallelArguments
from mca_config.arguments.distributing import LAYOUT_FIELDS
from mca_config.errors import McaError
from mca_config.layout import SIZE_FIELDS, ParallelLayout
from mca_config.types import Typed, Values
from mca_train.trainer.unused_options import unused_option_names
from mca_train.types import VirtualModels

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

_ALWAYS_ON = "calculate_per_token_loss"
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
_SHORT = {name: short for short, name in SIZE_FIELDS.items()}


def require_matching_model(model: VirtualModels, args: "TrainingArguments") -> None:
    """Raise if ``args`` ask for another model than ``model``.

    Raises:
        McaError: They do; names every difference.
    """
    if args is model.args:
        return
    differences = [*_layout(model, args), *_precision(model, args), *_settings(model, args)]
    if differences:
        raise McaError(
            f"args differ from those that the model was built with: {', '.join(differences)}; pass the same args to "
            "AutoModel, or remove them here"
        )


def _differs(name: str, requested: Typed, current: Typed) -> str:
    return (
        f"{name} {getattr(requested, 'name', requested)} (the model has {getattr(current, 'name', current)})"
    )


def _layout(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    current = model.config.layout
    requested = args.layout(current)
    for name in LAYOUT_FIELDS:
        if getattr(args, name) is not None and _entry(requested, name) != _entry(current, name):
            yield _differs(name, _entry(requested, name), _entry(current, name))


def _entry(layout: ParallelLayout, name: str) -> Typed:
    """Return a field of ``layout``; a size of None reads as 1."""
    return getattr(layout, _SHORT.get(name, name))


def _precision(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    for name, dtype in _PRECISIONS.items():
        if getattr(args, name) and model.config.dtype != dtype:
            yield _differs(name, True, model.config.dtype)


def _settings(model: VirtualModels, args: "TrainingArguments") -> Iterator[str]:
    """Yield differences of Megatron's configuration that would change the computation."""
    from mca_models.megatron.factory.transformer_config import transformer_config

    config, current = model.config, model.args.transformer_config_overrides()
    requested = {
        name: value
        for name, value in args.transformer_config_overrides().items()
        if name not in current or current[name] != value
    }
    if not requested:
        return
    before, after = (
        transformer_config(config, arguments, config.layout, config.dtype)
        for arguments in (model.args, _with(model.args, requested))
    )
    idle = {_ALWAYS_ON, *unused_option_names(args, config, after)}
    for name in requested:
        if name not in idle and getattr(after, name) != getattr(before, name):
            yield _differs(name, getattr(after, name), getattr(before, name))


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
