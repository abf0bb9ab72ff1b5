"""Classification heads: Hugging Face's ``...ForSequenceClassification`` and ``...ForTokenClassification``.

Both have one linear, ``score``, on the hidden states after the last norm; that of tokens has a bias. A reward model is
the first with one label, a value head the second with one label. The parameters are made in `common`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mca_config.errors import HfConfigError, McaError, UsageError
from mca_config.model.head import HeadKind
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject

SCORE = "score"
_ENDS: dict[str, HeadKind] = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
}
_SEQUENCE = {
    "apertus": "Apertus",
    "arcee": "Arcee",
    "axk1": "AXK1",
    "bloom": "Bloom",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "exaone4": "Exaone4",
    "falcon": "Falcon",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3Text",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt2": "GPT2",
    "gpt_bigcode": "GPTBigCode",
    "gpt_neox": "GPTNeoX",
    "gpt_oss": "GptOss",
    "gptj": "GPTJ",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "jamba": "Jamba",
    "llama": "Llama",
    "minicpm3": "MiniCPM3",
    "minimax": "MiniMax",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mistral4": "Mistral4",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "opt": "OPT",
    "persimmon": "Persimmon",
    "phi": "Phi",
    "phi3": "Phi3",
    "phimoe": "Phimoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
"""Prefix of the names of transformers' sequence or token classification classes, by family."""
_NOT_OF_TOKENS = frozenset(
    {
        *("deepseek_v2", "gemma3", "gemma3_text", "gptj", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        "jamba",
        *("minicpm3", "olmo", "olmo2", "olmo3", "opt", "phimoe", "qwen3_5_text"),
    }
)
_NOT_OF_SEQUENCES = frozenset({"apertus"})


@dataclass(frozen=True, kw_only=True)
class Head:
    """Classification head of a model.

    Args:
        kind: Sequences or tokens.
        labels: Names of the scores; LABEL_0, LABEL_1, ... stand for no names: those of a head that is there stay.
        problem_type: As in ``config.json``: ``regression``, ``single_label_classification``,
            ``multi_label_classification``; None: it is left open.
        pad_token_id: What ``config.json`` shall say, by which transformers finds the last token; None: as it is.
    """

    kind: HeadKind
    labels: tuple[str, ...]
    problem_type: str | None = None
    pad_token_id: int | None = None


def class_name(model_type: str, kind: HeadKind) -> str:
    """Return transformers' class of a family's models with a classification head.

    Raises:
        McaError: It has none.
    """
    end = next(end for end, known in _ENDS.items() if known == kind)
    without = _NOT_OF_TOKENS if kind == "token_classification" else _NOT_OF_SEQUENCES
    if model_type not in _SEQUENCE or model_type in without:
        raise McaError(
            f"there is no {end} of {model_type} models in mca, only of families for which transformers has the "
            "class (with images: gemma3, qwen3_5); choose a model of another family"
        )
    return _SEQUENCE[model_type] + end


def with_head(config: McaModelConfig, head: Head) -> McaModelConfig:
    """``config`` with ``head`` instead of the vocabulary's; the weights of a head that it has already must fit.

    Raises:
        UsageError: It has a head of another kind or size, or with other labels, or transformers has no class for it.
    """
    try:
        name = class_name(config.model_type, head.kind)
    except McaError as error:
        raise UsageError(str(error)) from None
    old = config.head
    if old.head_kind != "causal_lm" and (old.head_kind, old.num_labels) != (head.kind, len(head.labels)):
        raise UsageError(
            f"the model has a {old.head_kind} head with {old.num_labels} labels, the run needs {head.kind} with "
            f"{len(head.labels)}; name a model that fits"
        )
    names = (
        head.labels
        if config.head.head_kind == "causal_lm"
        else _merge_labels(label_names(config), head.labels)
    )
    facts = {"problem_type": head.problem_type, "pad_token_id": head.pad_token_id}
    changes: JsonObject = {key: value for key, value in facts.items() if value is not None}
    if "text_config" in config.hf_config and "pad_token_id" in changes:
        padding = {"pad_token_id": changes.pop("pad_token_id")}
        changes["text_config"] = {**config.hf_config["text_config"], **padding}
    extra = {key: value for key, value in config.extra.items() if key != "hf_duplicates"}
    return config.replace_fields(
        head_kind=head.kind,
        num_labels=len(head.labels),
        tie_word_embeddings=False,
        mtp_num_layers=0,
        extra=extra,
        hf_config={**config.hf_config, "architectures": [name], **_labels(names), **changes}
        if config.hf_config
        else {},
    )


def label_names(config: McaModelConfig) -> tuple[str, ...]:
    """Names of a model's scores, in their order; where ``config.json`` has none, those of transformers."""
    named = config.hf_config.get("id2label") or {}
    unnamed = _unnamed(config.head.num_labels or 0)
    return tuple(str(named.get(str(number), name)) for number, name in enumerate(unnamed))


def _merge_labels(known: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    unnamed = _unnamed(len(known))
    if known not in (given, unnamed) and given != unnamed:
        raise UsageError(
            f"labels: the model's are {', '.join(known)}, in this order, not {', '.join(given)}; name them so, or give "
            "only their number"
        )
    return known if given == unnamed else given


def _unnamed(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(count))


def head_from_hf(config: McaModelConfig, hf: JsonObject) -> McaModelConfig:
    """``config`` with the head that ``architectures`` names, if it is not the vocabulary's.

    Raises:
        HfConfigError: The family has no such class.
    """
    architectures = hf.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    kind = next((kind for end, kind in _ENDS.items() if named.endswith(end)), None)
    if kind is None:
        return config
    try:
        class_name(config.model_type, kind)
    except McaError as error:
        raise HfConfigError(f"config.json: {error}") from None
    labels = hf.get("id2label")
    count = len(labels) if isinstance(labels, dict) else hf.get("num_labels", 2)
    return config.replace_fields(
        head_kind=kind, num_labels=count, tie_word_embeddings=False, mtp_num_layers=0
    )


def head_to_hf(config: McaModelConfig, hf: JsonObject) -> JsonObject:
    """``hf`` of the model without its head, with it."""
    if config.head.num_labels is None:
        return hf
    labels = hf.get("id2label")
    if not isinstance(labels, dict) or len(labels) != config.head.num_labels:
        hf = {**hf, **_labels(_unnamed(config.head.num_labels))}
    return {**hf, "architectures": [class_name(config.model_type, config.head.head_kind)]}


def _labels(names: Sequence[str]) -> JsonObject:
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
