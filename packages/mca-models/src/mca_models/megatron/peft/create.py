"""A model with an adapter is made here: a new one, or one that a directory holds."""

from collections.abc import Collection
from pathlib import Path

from mca_config.errors import McaError
from mca_models.hub import resolve_directory
from mca_models.lora import Adapter, AdapterConfig, AdapterRules, adapter_for, rules_for_training
from mca_models.lora.adapter import require_untied
from mca_models.megatron.families.vision_tower import TEXT, Part
from mca_models.megatron.peft.compatibility import require_new_params_saved
from mca_models.megatron.peft.initialization import initial_values, require_supported_init
from mca_models.megatron.peft.models import PeftModels, Read
from mca_models.megatron.peft.settings import adapter_config
from mca_models.megatron.types import PeftConfig
from mca_models.megatron.virtual_models import VirtualModels


def get_peft_model(
    models: VirtualModels,
    config: PeftConfig,
    *,
    seed: int = 1234,
    parts: Collection[Part] = TEXT,
) -> PeftModels:
    """``models`` with a new LoRA adapter; its values are the same on every layout for the same seed.

    Args:
        models: The base model, which is frozen; it is shared, not copied.
        config: A ``peft.LoraConfig`` with HF module names, or the contents of an ``adapter_config.json``.
        seed: Of the adapter's random values.
        parts: Of a vision-language model, those that are adapted; modules of others are excluded.

    Raises:
        McaError: A setting cannot be represented, or names nothing of this model.
    """
    adapter = adapter_config(config, models, parts)
    require_supported_init(adapter)
    rules = rules_for_training(models.config, adapter)
    return _filled(models, adapter, rules, initial_values(adapter, seed), saved=False)


def attach_adapter(models: VirtualModels, config: AdapterConfig, rules: AdapterRules) -> PeftModels:
    """``models`` with an adapter that has no values yet, of ``rules`` made for the layout.

    Raises:
        McaError: The model has an adapter, or cannot be trained with this one.
    """
    if models.has_adapter:
        raise McaError(
            "this model has an adapter already; call merge_and_unload on what get_peft_model or load_adapter returned, "
            "or load the base model again"
        )
    require_new_params_saved(models, rules)
    require_untied(Adapter(models.config, config, rules, lambda param: None), "training it")
    return PeftModels(models, config, rules)


def load_adapter(models: VirtualModels, path: str | Path) -> PeftModels:
    """``models`` with the adapter of a PEFT or MCA directory or of the Hub, whatever layout that has."""
    found = adapter_for(resolve_directory(path), models.config)
    return _filled(models, found.config, found.rules, lambda param, shape: found.read(param), saved=True)


def _filled(
    models: VirtualModels, config: AdapterConfig, rules: AdapterRules, read: Read, *, saved: bool
) -> PeftModels:
    """``models`` with an adapter and its values; without them ``models`` are left as they were."""
    peft = attach_adapter(models, config, rules)
    try:
        peft.fill(read, saved=saved)
    except BaseException:
        peft.detach()
        raise
    return peft
