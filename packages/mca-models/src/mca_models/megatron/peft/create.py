"""Create a model with an adapter: a new one from ``peft.LoraConfig``, or one from a directory."""

import enum
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_models.hub import resolve_directory
from mca_models.lora import Adapter, AdapterConfig, AdapterRules, adapter_for, rules_for_training
from mca_models.lora.adapter import require_untied
from mca_models.lora.peft_names import complete_peft_config
from mca_models.megatron.peft.compatibility import require_new_params_saved
from mca_models.megatron.peft.initialization import initial_values, require_supported_init
from mca_models.megatron.peft.models import PeftModels, Read
from mca_models.megatron.types import PeftConfig
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.templates.trainable_parts import TEXT, Part

logger = logging.getLogger(__name__)


def adapter_config(
    config: PeftConfig, models: VirtualModels, parts: Collection[Part] = TEXT
) -> AdapterConfig:
    """Return the checked configuration of a new adapter on ``models``.

    Args:
        config: A ``peft.LoraConfig``, a mapping as in ``adapter_config.json``, or an ``AdapterConfig``.
        models: The base model; ``target_modules`` default to PEFT's for its family.
        parts: Adapted parts of a vision-language model.
    """
    if isinstance(config, AdapterConfig):
        return config
    document = dict(config) if isinstance(config, Mapping) else config.to_dict()
    document = {name: _plain(value) for name, value in document.items()}
    document.setdefault("peft_type", "LORA")
    if document.get("target_modules") is None and not document.get("target_parameters"):
        document["target_modules"] = _default_targets(models.config.model_type)
    if not document.get("base_model_name_or_path") and models.source is not None:
        document["base_model_name_or_path"] = str(models.source)
    if named := complete_peft_config(document, models.config, parts):
        logger.info("LoraConfig: %s", named)
    document["inference_mode"] = True  # PEFT writes the same for saved adapters
    return AdapterConfig.from_dict(document, "LoraConfig")


def _plain(value: Typed) -> Typed:
    """Convert ``value`` to JSON types."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _default_targets(model_type: str) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    if model_type not in DEFAULTS:
        raise McaError(
            f"LoraConfig: PEFT has no default target_modules for {model_type} models; set it, e.g. all-linear"
        )
    return list(DEFAULTS[model_type])


def get_peft_model(
    models: VirtualModels, config: PeftConfig, *, seed: int = 1234, parts: Collection[Part] = TEXT
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
