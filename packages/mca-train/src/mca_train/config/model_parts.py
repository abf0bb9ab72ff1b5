"""Which parts of a vision-language model a run trains, and what stands against it.

How parts are frozen is known to ``mca_models``; their learning rates come to the optimizer in `engine.part_rates`.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from mca_config.model_config import McaModelConfig
from mca_train.config.arguments import LoraArguments

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments
    from mca_models.lora import AdapterRules
    from mca_models.megatron.types import MegatronConfig

Part = Literal["vision", "projector", "language"]
PARTS: tuple[Part, ...] = get_args(Part)
SEEING: tuple[Part, ...] = ("vision", "projector")
"""The parts that only images need; they are frozen unless a run says otherwise."""
_KEYS = ("freeze", "vision_learning_rate", "projector_learning_rate")


def trained_parts(training: "TrainingArguments") -> frozenset[Part]:
    """The parts that are trained."""
    frozen = SEEING if training.freeze is None else training.freeze
    return frozenset(part for part in PARTS if part not in frozen)


def adapted_parts(directory: str, config: McaModelConfig) -> frozenset[Part]:
    """The parts that the adapter in ``directory`` is on."""
    from mca_models.lora import load_adapter_rules

    return adapter_parts(load_adapter_rules(Path(directory), config)[1], config)


def adapter_parts(rules: "AdapterRules", config: McaModelConfig) -> frozenset[Part]:
    """The parts that an adapter of ``rules`` trains something of."""
    from mca_models.megatron.families.vision_tower import model_part

    trained = (*(pair.target.base for pair in rules.factors), *rules.saved)
    found = {model_part(param, config) for param in trained}
    return frozenset(part for part in PARTS if part in found)


def part_problems(
    training: "TrainingArguments", lora: LoraArguments, config: McaModelConfig, megatron: "MegatronConfig"
) -> Iterator[str]:
    """Keys about parts that the model does not have, that are not trained, or that cannot be trained so."""
    given = [key for key in _KEYS if getattr(training, key) is not None]
    if config.vision is None:
        if given:
            yield f"{', '.join(given)}: a {config.model_type} model has no vision part; remove the key"
        return
    path = lora.adapter_name_or_path
    if path is not None and given:
        yield f"{', '.join(given)}: the adapter of adapter_name_or_path has its own settings; remove the key"
        return
    trained = trained_parts(training) if path is None else adapted_parts(path, config)
    if not trained:
        yield f"freeze: {', '.join(PARTS)} are all parts, so nothing is left to train; remove one of them"
    yield from trained_problems(training, trained, adapted=lora.wanted)
    if trained - {"language"}:
        from mca_models.megatron.families.image_limits import image_problems

        yield from image_problems(config, config.layout, megatron)


def trained_problems(
    training: "TrainingArguments", trained: Collection[Part], *, adapted: bool
) -> Iterator[str]:
    """Rates of parts that do not have them, and weights that ranks would gather in different orders.

    Args:
        training: Of a vision-language model.
        trained: Its parts that are trained.
        adapted: It has an adapter, which alone is trained.
    """
    rates = {part: f"{part}_learning_rate" for part in SEEING}
    given = {part: key for part, key in rates.items() if getattr(training, key) is not None}
    if adapted and given:
        yield f"{', '.join(given.values())}: an adapter has one learning rate; remove the key"
    for part, key in given.items():
        if not adapted and part not in trained:
            yield f"{key}: {part} is frozen; set freeze to a list without it, or remove the key"
    if training.overlap_param_gather and not set(SEEING).isdisjoint(trained):
        yield (
            "overlap_param_gather: ranks without an image do not run the vision model, and would gather weights in "
            "another order than those with one; set it to false, or freeze vision and projector"
        )
