"""Tensors that no model builds: they are copied from file to file unchanged, in any format.

MTP layers of some families, and whole models next to the one that mca trains.

`mtp` has the rules of MTP layers that are built.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import FamilyConfig, JsonObject, Values
from mca_models.templates import get_family
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
_VOCODER_IN_FP32 = "token2wav."
"""Qwen 2.5 Omni's vocoder, which transformers runs in fp32."""


def with_mtp_passthrough(family: Family) -> Family:
    """Return ``family`` with the tensors of its MTP layers passed through."""

    def params(config: FamilyConfig) -> list[Param]:
        return [*family.params(config), *_params(config)]

    def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
        return {**family.detect_extra(config, names, shapes), **_found(config, names, shapes)}

    return replace(family, params=params, detect_extra=detect_extra)


def with_passthrough(
    family: Family, prefixes: tuple[str, ...], built: Callable[[McaModelConfig], McaModelConfig]
) -> Family:
    """Return ``family`` with the tensors whose names begin with ``prefixes`` passed through.

    Args:
        family: The family of the complete checkpoint.
        prefixes: Beginnings of the names of tensors that are not built.
        built: Function that returns the configuration of the model that is built.
    """

    def params(config: FamilyConfig) -> list[Param]:
        return [*family.params(config), *_params(config)]

    def detect_extra(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
        carried = {name: list(shapes[name]) for name in names if name in shapes and name.startswith(prefixes)}
        return {PASSTHROUGH: carried} if carried else {}

    return replace(family, params=params, detect_extra=detect_extra, built=built)


def _params(config: McaModelConfig) -> list[Param]:
    return [
        Param(
            mca=PREFIX + name,
            hf=(name,),
            stage=Stage.PASSTHROUGH,
            shape=tuple(shape),
            keep_fp32=name.endswith(_IN_FP32) or name.startswith(_VOCODER_IN_FP32),
        )
        for name, shape in config.extra.get(PASSTHROUGH, {}).items()
    ]


def _found(config: McaModelConfig, names: Collection[str], shapes: Mapping[str, Shape]) -> Values:
    """Detect tensors that transformers leaves out of its models: MTP names, and the layer after the last."""
    after = tuple(f"model.{text}layers.{config.num_layers}." for text in ("", "language_model."))
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
    carried = config.extra.get(PASSTHROUGH)
    if built := get_family(config.model_type).built:
        config = built(config)
    elif carried:
        config = replace(config, hf_config=with_mtp_count(config.hf_config, 0))
    extra = {key: value for key, value in config.extra.items() if key != PASSTHROUGH}
    return replace(config, extra=extra) if carried else config


def passthrough_notice(config: McaModelConfig) -> str | None:
    """Return a notice of the tensors that a model does not build; None: it builds all."""
    carried = config.extra.get(PASSTHROUGH)
    if not carried:
        return None
    count, built = len(carried), without_passthrough(config).model_type
    if built != config.model_type:
        parts = ", ".join(sorted({name.partition(".")[0] for name in carried}))
        return f"{count} tensors of {parts} are not loaded: a checkpoint saved from this model is that of {built} alone"
    return (
        f"{count} tensors of MTP layers ({min(carried)}, ...) are not loaded, because mca does not build MTP layers "
        "for this family; a checkpoint saved from this model has none, and its config.json counts none"
    )


def with_mtp_count(hf: JsonObject, count: int) -> JsonObject:
    """Return a ``config.json`` that counts at most ``count`` MTP layers, where it counts them."""

    def lowered(part: JsonObject) -> JsonObject:
        counts = {key: part[key] for key in _COUNTS if isinstance(part.get(key), int)}
        return {**part, **{key: min(value, count) for key, value in counts.items()}}

    text = hf.get("text_config")
    return lowered({**hf, "text_config": lowered(text)} if isinstance(text, dict) else hf)
