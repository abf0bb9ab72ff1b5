"""MTP tensors that no model builds: they are copied from file to file unchanged, in any format.

`mtp` has the rules of MTP layers that are built.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates.family import Family
from mca_models.templates.shapes import Shape
from mca_models.weights import Param, Stage

logger = logging.getLogger(__name__)

PASSTHROUGH = "hf_carried"
"""The fact in ``extra``: which tensors, with shapes."""

PREFIX = "carried."
"""Prefix of their Megatron names."""

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""HF's keys of how many MTP layers a checkpoint has."""
_IN_FP32 = ("e_score_correction_bias", "expert_bias")


def with_mtp_passthrough(family: Family) -> Family:
    """Return ``family`` with the tensors of its MTP layers passed through."""

    def params(config: FamilyConfig) -> list[Param]:
        return [*family.params(config), *_params(config)]

    def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
        return {**family.detect_extra(config, names, shapes), **_found(config, names, shapes)}

    return replace(family, params=params, detect_extra=detect_extra)


def _params(config: McaModelConfig) -> list[Param]:
    return [
        Param(
            mca=PREFIX + name,
            hf=(name,),
            stage=Stage.PASSTHROUGH,
            shape=tuple(shape),
            keep_fp32=name.endswith(_IN_FP32),
        )
        for name, shape in config.extra.get(PASSTHROUGH, {}).items()
    ]


def _found(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Detect tensors that transformers leaves out of its models: MTP names, and the layer after the last."""
    after = f"model.layers.{config.num_layers}."
    carried = {
        name: list(shapes[name])
        for name in names
        if name in shapes and (name.startswith(after) or ".mtp." in f".{name}" or ".mtp_" in f".{name}")
    }
    carried = {name: shape for name, shape in carried.items() if not {"{", "}"} & set(name)}
    if carried:
        logger.warning(
            "%d tensors of MTP layers (%s, ...) are copied unchanged; they are not built or trained",
            len(carried),
            min(carried),
        )
    return {PASSTHROUGH: carried} if carried else {}


def without_passthrough(config: McaModelConfig) -> McaModelConfig:
    """Return ``config`` of the model as it is built; its ``config.json`` counts no MTP layers."""
    if PASSTHROUGH not in config.extra:
        return config
    extra = {key: value for key, value in config.extra.items() if key != PASSTHROUGH}
    return replace(config, extra=extra, hf_config=with_mtp_count(config.hf_config, 0))


def with_mtp_count(hf: JsonObject, count: int) -> JsonObject:
    """Return a ``config.json`` that counts at most ``count`` MTP layers, where it counts them."""

    def lowered(part: JsonObject) -> JsonObject:
        counts = {key: part[key] for key in _COUNTS if isinstance(part.get(key), int)}
        return {**part, **{key: min(value, count) for key, value in counts.items()}}

    text = hf.get("text_config")
    return lowered({**hf, "text_config": lowered(text)} if isinstance(text, dict) else hf)
