"""Qwen 3.5, the text model: HF ``Qwen3_5ForCausalLM``: gated delta nets and gated attention."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import Values
from mca_models.templates.config_table import (
    NO_ATTENTION_BIAS,
    SILU,
    ConfigTable,
    Fixed,
    dense_fields,
)
from mca_models.templates.family import Family
from mca_models.templates.lens import Lens
from mca_models.templates.parts import gated_delta_net as delta
from mca_models.templates.parts.common import attention, dense_mlp, embedding, head
from mca_models.templates.parts.mtp import mtp_params
from mca_models.templates.parts.names import HF
from mca_models.templates.parts.vision_tower import Spelling
from mca_models.templates.shapes import Shape
from mca_models.weights import Concat, Param, expand_rules

OWN_EMBEDDING = Fixed(
    "mtp_use_dedicated_embeddings", (False,), "Megatron's prediction layers share the model's embedding"
)

CONFIG = ConfigTable(
    fields=(*dense_fields(), *delta.FIELDS),
    defaults={**delta.DEFAULTS, "num_key_value_heads": 4},
    constants=delta.CONSTANTS,
    fixed=(SILU, NO_ATTENTION_BIAS, OWN_EMBEDDING),
    facts=(Lens(delta.mixed_layers, delta.write_layers),),
    partial_rotary=True,
)


PREFIX = "model.language_model."
"""Prefix of names where transformers saved the text part of a larger model."""
PREFIX_KEY = "hf_prefix"
"""The fact in ``extra`` that they do."""


def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Detect whether the names have the prefix of a vision-language checkpoint."""
    return {PREFIX_KEY: PREFIX} if any(name.startswith(PREFIX) for name in names) else {}


def prefixed(config: McaModelConfig, params: list[Param]) -> list[Param]:
    """``params`` under the names that the checkpoint has."""
    if not config.extra.get(PREFIX_KEY):
        return params
    spelled = Spelling(PREFIX, "lm_head.", {}).text_to_file
    return [replace(param, hf=tuple(map(spelled, param.hf))) for param in params]


def in_proj(config: McaModelConfig) -> Param:
    """The input projection: HF has q, k, v in one tensor."""
    q, k, v, *others = delta.segments(config)
    names = tuple(f"{HF}linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    return Param(mca="", hf=names, layout=Concat((q + k + v, *others)))


def params(config: McaModelConfig) -> list[Param]:
    """Every parameter of the model, in checkpoint order."""
    inside = [*attention(config), *dense_mlp(config)]
    mtp = mtp_params(config, inside, delta.MTP_NAMES, delta.MTP_PREFIX)
    layers = delta.mixed_attention(config, in_proj(config))
    mlp = expand_rules(dense_mlp(config), layers=range(config.num_layers))
    return prefixed(config, [embedding(), *layers, *mlp, *mtp, *head(config)])


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    config=CONFIG,
    params=params,
    detect_extra=detect_extra,
    count_mtp=delta.detect_mtp_layers,
    module_names={PREFIX_KEY: ""},
)
