"""Convert ``peft.LoraConfig`` to the contents of ``adapter_config.json``.

`mca_models.lora.config` defines their meaning.
"""

import enum
import logging
from collections.abc import Collection, Mapping

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_models.lora import AdapterConfig
from mca_models.lora.peft_names import complete_peft_config
from mca_models.megatron.features.vision_tower import TEXT, Part
from mca_models.megatron.types import PeftConfig
from mca_models.megatron.virtual_models import VirtualModels

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
