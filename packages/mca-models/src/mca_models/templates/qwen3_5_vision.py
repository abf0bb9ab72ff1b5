"""The text part of Qwen 3.5's published files, which hold a vision model beside it."""

import logging
from collections.abc import Collection
from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.config_table import HfConfig
from mca_models.weights import Param

logger = logging.getLogger(__name__)

TEXT_PART = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ARCHITECTURES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
TEXT, PREFIX, VISION = "model.", "model.language_model.", "model.visual."


def text_config(hf: HfConfig) -> HfConfig:
    """``config.json`` of the text part: the file itself if it describes nothing else."""
    kind = hf.get("model_type")
    if kind not in TEXT_PART:
        return hf
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise HfConfigError(f"config.json has no 'text_config'; a {kind} model needs it")
    shared = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
    named: HfConfig = {"architectures": [ARCHITECTURES[kind]], "model_type": TEXT_PART[kind]}
    # the whole model is tied or not as the file itself says, whatever its text part says
    named["tie_word_embeddings"] = hf.get("tie_word_embeddings") or False
    return {**shared, **text, **named}


def found(config: McaModelConfig, names: Collection[str]) -> JsonObject:
    """Whether the text model's names have the prefix that they have beside a vision model, and what is left."""
    if not any(name.startswith(PREFIX) for name in names):
        return {}
    vision = sorted(name for name in names if name.startswith(VISION))
    if vision:
        logger.warning(
            "%d tensors of the vision model are left behind (%s*): only the text model is converted, and an "
            "export has only it",
            len(vision),
            VISION,
        )
    return {"hf_prefix": PREFIX, "hf_left_behind": vision}


def left_behind(config: McaModelConfig) -> frozenset[str]:
    """The vision model's tensors."""
    return frozenset(config.extra.get("hf_left_behind", ()))


def prefixed(config: McaModelConfig, params: list[Param]) -> list[Param]:
    """``params`` under the names that the checkpoint has."""
    prefix = config.extra.get("hf_prefix")
    if not prefix:
        return params
    return [replace(param, hf=tuple(_under(prefix, name) for name in param.hf)) for param in params]


def _under(prefix: str, name: str) -> str:
    return prefix + name.removeprefix(TEXT) if name.startswith(TEXT) else name
