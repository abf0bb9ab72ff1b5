"""Trained parts of a multimodal model: selection and checks.

``mca_models`` freezes the other parts, and ``engine`` sets the learning rates of the parts.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.model_config import McaModelConfig
from mca_models.lora import load_adapter_rules
from mca_models.templates.parts.vision_language import PARTS, Part, model_part, model_parts
from mca_train.config.arguments import LoraArguments

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments
    from mca_models.lora import AdapterRules
    from mca_models.megatron.types import MegatronConfig

MEDIA_PARTS: tuple[Part, ...] = ("vision", "audio", "projector")
"""Parts that only media need; they are frozen by default."""
PART_RATES: Mapping[Part, str] = {part: f"{part}_learning_rate" for part in MEDIA_PARTS}
_KEYS = ("freeze", *PART_RATES.values())


def trained_parts(training: "TrainingArguments", config: McaModelConfig) -> frozenset[Part]:
    """Return the trained parts of a model."""
    frozen = MEDIA_PARTS if training.freeze is None else training.freeze
    return frozenset(part for part in model_parts(config) if part not in frozen)


def adapted_parts(directory: str, config: McaModelConfig) -> frozenset[Part]:
    """Return the parts with weights of the adapter in ``directory``."""
    return adapter_parts(load_adapter_rules(Path(directory), config)[1], config)


def adapter_parts(rules: "AdapterRules", config: McaModelConfig) -> frozenset[Part]:
    """Return the parts in which an adapter with ``rules`` has trained weights."""
    trained = (*(pair.target.base for pair in rules.factors), *rules.saved)
    parts = {model_part(param, config) for param in trained}
    return frozenset(part for part in PARTS if part in parts)


def part_problems(
    training: "TrainingArguments", lora: LoraArguments, config: McaModelConfig, megatron: "MegatronConfig"
) -> Iterator[str]:
    """Yield problems of keys about parts: absent or frozen parts, and parts that cannot be trained in this way."""
    yield from early_part_problems(training, lora, config)
    path = lora.adapter_name_or_path
    if config.vision is None or (path is not None and _part_keys(training)):
        return
    if _trained_parts(training, path, config) - {"language"}:
        from mca_models.megatron.features.media import image_problems

        yield from image_problems(config, config.layout, megatron)


def early_part_problems(
    training: "TrainingArguments", lora: LoraArguments, config: McaModelConfig
) -> Iterator[str]:
    """Yield the problems of `part_problems` that need no torch."""
    yield from absent_parts(training, config)
    if config.vision is None:
        return
    path, keys = lora.adapter_name_or_path, _part_keys(training)
    if path is not None and keys:
        yield f"{', '.join(keys)}: the adapter of adapter_name_or_path has its own settings; remove the key"
        return
    trained = _trained_parts(training, path, config)
    if not trained:
        parts = ", ".join(model_parts(config))
        yield f"freeze: {parts} are all parts, so no parameter would be trained; remove one of them"
    yield from trained_problems(training, trained, adapted=lora.is_enabled)


def _part_keys(training: "TrainingArguments") -> list[str]:
    return [key for key in _KEYS if getattr(training, key) is not None]


def _trained_parts(
    training: "TrainingArguments", adapter: str | None, config: McaModelConfig
) -> frozenset[Part]:
    return trained_parts(training, config) if adapter is None else adapted_parts(adapter, config)


def absent_parts(training: "TrainingArguments", config: McaModelConfig) -> Iterator[str]:
    """Yield problems of keys about parts that a model does not have."""
    parts = model_parts(config)
    if len(parts) == 1:
        if keys := _part_keys(training):
            yield f"{', '.join(keys)}: a {config.model_type} model has one part; remove the key"
        return
    having = f"a {config.model_type} model has no such part, only {', '.join(parts)}"
    if absent := [part for part in training.freeze or () if part not in parts]:
        yield f"freeze: {', '.join(absent)}: {having}; remove it"
    for part, key in PART_RATES.items():
        if getattr(training, key) is not None and part not in parts:
            yield f"{key}: {having}; remove the key"


def trained_problems(
    training: "TrainingArguments", trained: Collection[Part], *, adapted: bool
) -> Iterator[str]:
    """Yield problems of learning rates of parts, and of overlap_param_gather with a trained tower.

    Args:
        training: Arguments of a multimodal model.
        trained: Its trained parts.
        adapted: Only an adapter is trained.
    """
    keys = {part: key for part, key in PART_RATES.items() if getattr(training, key) is not None}
    if adapted and keys:
        yield f"{', '.join(keys.values())}: an adapter has one learning rate; remove the key"
    for part, key in keys.items():
        if not adapted and part not in trained:
            yield f"{key}: {part} is frozen; set freeze to a list without it, or remove the key"
    if training.overlap_param_gather and not set(MEDIA_PARTS).isdisjoint(trained):
        yield (
            "overlap_param_gather is not supported with a trained vision or audio tower, which ranks without media do "
            "not run, so that they would gather weights in another order; set it to false, or remove freeze"
        )
