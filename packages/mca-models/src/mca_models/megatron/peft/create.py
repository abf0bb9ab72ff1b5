"""Create a model with an adapter: a new one from ``peft.LoraConfig``, or one from a directory."""

import enum
import logging
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from mca_config.errors import McaError
from mca_config.types import Typed
from mca_models.hub import resolve_directory
from mca_models.lora import Adapter, AdapterConfig, AdapterRules, adapter_for, rules_for_training
from mca_models.lora.adapter import require_untied
from mca_models.lora.peft_names import complete_peft_config
from mca_models.megatron.peft.models import PeftModels, Read
from mca_models.megatron.tensors import seeded_generator, to_numpy
from mca_models.megatron.types import PeftConfig
from mca_models.megatron.virtual_models import VirtualModels
from mca_models.templates.parts.vision_language import TEXT, Part
from mca_models.weights import Param
from mca_models.weights.arrays import Array

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


def require_supported_init(adapter: AdapterConfig) -> None:
    """Raise for initialisations that need data or a decomposition of the base weights.

    Raises:
        McaError: ``init_lora_weights`` is one of them.
    """
    start = adapter.document.get("init_lora_weights", True)
    if not isinstance(start, bool) and start != "gaussian":
        raise McaError(
            f"LoraConfig: init_lora_weights {start!r} is not supported for a new adapter; use true, false or "
            "'gaussian', or make the adapter with PEFT and load it"
        )


def initial_values(adapter: AdapterConfig, seed: int) -> Callable[[Param, tuple[int, ...]], Array]:
    """Return a function that draws the full tensor of a factor's rule.

    lora_A is uniform as a linear's weight (normal with deviation 1 / rank if ``gaussian``); lora_B is zero,
    unless ``init_lora_weights`` is false.
    """
    start = adapter.document.get("init_lora_weights", True)

    def draw(param: Param, shape: tuple[int, ...]) -> Array:
        if ".lora_B." in param.mca and start is not False:
            return to_numpy(torch.zeros(shape))
        generator = seeded_generator(f"{seed}/{param.mca_name()}")
        values = torch.empty(shape)
        if start == "gaussian":
            return to_numpy(values.normal_(0.0, 1 / shape[0], generator=generator))
        bound = 1 / math.sqrt(shape[1])
        return to_numpy(values.uniform_(-bound, bound, generator=generator))

    return draw


def require_new_params_saved(models: VirtualModels, rules: AdapterRules) -> None:
    """Raise unless the adapter saves the parameters that the base model's files lack, e.g. a new head.

    Raises:
        McaError: A new head, or a vocabulary with new rows, is not among its tensors.
    """
    saved = {param.mca_name() for param in rules.full_params}
    for param in models.new_params:
        if param.mca_name() not in saved:
            raise McaError(f"{_lacking(param)}, which {models.source} does not have either; {_advice(param)}")


def _lacking(param: Param) -> str:
    missing = (
        f"the new rows of {param.hf_names()[0]}" if param.vocab else f"{param.hf_names()[0]}, the new head"
    )
    return f"the adapter does not save {missing}"


def _advice(param: Param) -> str:
    if param.vocab:
        return (
            "write a larger base model first (AutoModel.from_pretrained(..., vocab_size=...).save_pretrained_as_hf), "
            "or name the embedding and the output layer in modules_to_save (lora_modules_to_save of mca-train)"
        )
    return (
        "make a new adapter with score in modules_to_save (lora_rank of mca-train, task_type SEQ_CLS or TOKEN_CLS), on "
        "a base model that the other one is merged into (mca-convert --merge)"
    )
