"""Weight templates: one short file for each model family, and the table of them."""

from collections.abc import Iterable, Iterator, MutableMapping
from importlib import import_module

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.catalog import unsupported
from mca_models.templates.classification_head import head_from_hf, head_to_hf
from mca_models.templates.composite_config import without_quantization
from mca_models.templates.config_table import HfConfig
from mca_models.templates.family import Family

__all__ = ["FAMILIES", "Family", "config_from_hf", "config_to_hf", "get_family"]


class _Families(MutableMapping[str, Family]):
    """Families by ``model_type``; the file of one is imported when the family is first asked for."""

    def __init__(self, table: Iterable[tuple[str, str]]) -> None:
        """``table``: each type with its module and, after a colon, the family's name there (``FAMILY``)."""
        self._entries: dict[str, Family | str] = dict(table)

    def __getitem__(self, model_type: str) -> Family:
        entry = self._entries[model_type]
        if isinstance(entry, str):
            module, _, name = entry.partition(":")
            entry = self._entries[model_type] = _family_in(f"{__name__}.{module}", name or "FAMILY")
        return entry

    def __setitem__(self, model_type: str, family: Family) -> None:
        self._entries[model_type] = family

    def __delitem__(self, model_type: str) -> None:
        del self._entries[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, model_type: object) -> bool:
        return model_type in self._entries


def _family_in(module: str, name: str) -> Family:
    found = vars(import_module(module))
    family = found[name] if name in found else found["FAMILIES"][name]
    assert isinstance(family, Family), f"{module}.{name} is no Family"
    return family


_IN_ITS_FILE = (
    "afmoe",
    "apertus",
    "aria_text",
    "audioflamingo3",
    "axk1",
    "bailing_hybrid",
    "bamba",
    "bloom",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere2_vision",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "falcon",
    "falcon_h1",
    "flex_olmo",
    "flint",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v",
    "glm_moe_dsa",
    "glmasr",
    "got_ocr2",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "idefics3",
    "internvl",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "lfm3",
    "lfm3_vl",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "mimo",
    "mimo_v2_flash",
    "minicpm3",
    "minicpmv4_6",
    "minimax",
    "minimax_m2",
    "deepseek_vl",
    "exaone4_5",
    "jamba",
    "kimi_k25",
    "lighton_ocr",
    "mamba",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "mistral3",
    "mistral4",
    "mixtral",
    "nanochat",
    "nemotron_h",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "opt",
    "ovis2",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qianfan_ocr",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3_asr",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
    "vipllava",
    "voxtral",
    "youtu",
)
"""Types whose family is ``FAMILY`` of the module of their name."""
_WITH_ANOTHER = {
    "aya_vision": "cohere2_vision:AYA_VISION",
    "falcon_mamba": "mamba:FALCON",
    "mamba2": "mamba:MAMBA2",
    "glm4v_moe": "glm4v:MOE_FAMILY",
    "glm46v": "glm4v:GLM46V",
    "glm_ocr": "glm4v:GLM_OCR",
    "glmga": "glm4v:GLMGA",
    "kimi_k2": "deepseek_v3:KIMI_K2",
    "qwen2_5_omni": "qwen2_5_omni_thinker:WHOLE",
    "qwen3_5_moe": "qwen3_5:MOE_FAMILY",
    "qwen3_5_moe_text": "qwen3_5_text:MOE_FAMILY",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker:WHOLE",
    "qwen3_vl_moe": "qwen3_vl:MOE_FAMILY",
    "smolvlm": "idefics3:SMOLVLM",
}
_LLAMA_LIKE = (
    "arcee",
    "ernie4_5",
    "exaone4",
    "gemma",
    "granite",
    "helium",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "nemotron",
    "olmo",
    "olmo2",
    "qwen2",
    "qwen3",
    "seed_oss",
    "stablelm",
)
"""Types whose family is a value of `llama_like`."""

FAMILIES = _Families(
    sorted(
        [
            *zip(_IN_ITS_FILE, _IN_ITS_FILE, strict=True),
            *_WITH_ANOTHER.items(),
            *((kind, f"llama_like:{kind}") for kind in _LLAMA_LIKE),
        ]
    )
)


def get_family(model_type: str) -> Family:
    """The family of a HF ``model_type``.

    Raises:
        McaError: It is not supported.
    """
    if model_type not in FAMILIES:
        raise unsupported(model_type)
    return FAMILIES[model_type]


def config_from_hf(hf: JsonObject) -> McaModelConfig:
    """Return the configuration of the model that a parsed ``config.json`` describes.

    Args:
        hf: The contents of ``config.json``; it is kept verbatim in the result.

    Raises:
        McaError: Its family or one of its values cannot be represented.
    """
    if not isinstance(hf.get("model_type"), str):
        raise HfConfigError("config.json has no 'model_type'; it names the model family")
    family = get_family(hf["model_type"])
    config = head_from_hf(family.config.to_mca(hf), hf)
    family.require_family(config)
    return config


def config_to_hf(config: McaModelConfig) -> HfConfig:
    """``config.json`` of the model in plain weights: the source's own, with what changed brought up to date."""
    family = get_family(config.model_type)
    if config.head.num_labels is None:
        return without_quantization(family.config.to_hf(config, family.architecture))
    before = family.config.to_mca(config.hf_config) if config.hf_config else config
    said = {
        name: before.to_fields()[name] for name in ("tie_word_embeddings", "mtp_num_layers", "pad_token_id")
    }
    plain = config.replace_fields(head_kind="causal_lm", num_labels=None, **said)
    return head_to_hf(config, without_quantization(family.config.to_hf(plain, family.architecture)))
