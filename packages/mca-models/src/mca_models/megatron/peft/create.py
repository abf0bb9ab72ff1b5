"""Create a model with an adapter: a new one, or one from a directory."""

from collections.abc import Collection
from pathlib import Path

from mca_config.errors import McaError
from mca_models.hub import resolve_directory
from mca_models.lora import Adapter, AdapterConfig, AdapterRules, adapter_for, rules_for_training
from mca_models.lora.adapter import require_untied
from mca_models.megatron.features.vision_tower import TEXT, Part
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
    """Attach a new LoRA adapter to ``models``; its values are the same on every layout for the same seed.

    Args:
        models: The base model, which is frozen; it is shared, not copied.
        config: A ``peft.LoraConfig`` with HF module names, or the contents of an ``adapter_config.json``.
        seed: Seed of the adapter's random values.
        parts: Adapted parts of a vision-language model; modules of other parts are excluded.

    Raises:
        McaError: A setting is not supported, or names no module of this model.
    """
    adapter = adapter_config(config, models, parts)
    require_supported_init(adapter)
    rules = rules_for_training(models.config, adapter)
    return _filled(models, adapter, rules, initial_values(adapter, seed), saved=False)


def attach_adapter(models: VirtualModels, config: AdapterConfig, rules: AdapterRules) -> PeftModels:
    """Attach an adapter of ``rules``, made for the layout, without values.

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
    """Attach the adapter of a PEFT or MCA directory, or of the Hub, saved on any layout."""
    adapter = adapter_for(resolve_directory(path), models.config)
    return _filled(
        models, adapter.config, adapter.rules, lambda param, shape: adapter.read(param), saved=True
    )


def _filled(
    models: VirtualModels, config: AdapterConfig, rules: AdapterRules, read: Read, *, saved: bool
) -> PeftModels:
    """Attach an adapter and its values; on an error ``models`` are unchanged."""
    peft = attach_adapter(models, config, rules)
    try:
        peft.fill(read, saved=saved)
    except BaseException:
        peft.detach()
        raise
    return peft
