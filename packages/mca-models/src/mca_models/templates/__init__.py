"""Weight templates: a file for each line of models, and the table of them."""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates.catalog import unsupported
from mca_models.templates.classification_head import head_from_hf, head_to_hf
from mca_models.templates.config_table import HfConfig, without_quantization
from mca_models.templates.family import Family

__all__ = ["FAMILIES", "Family", "config_from_hf", "config_to_hf", "get_family"]


class _Families(MutableMapping[str, Family]):
    """Families by ``model_type``; the file of one is imported when the family is first asked for."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """``files``: that of each type."""
        self._entries: dict[str, Family | str] = {kind: files[kind] for kind in sorted(files)}

    def __getitem__(self, model_type: str) -> Family:
        entry = self._entries[model_type]
        if isinstance(entry, str):
            found = vars(import_module(f"{__name__}.{entry}"))
            entry = self._entries[model_type] = (
                found["FAMILY"] if "FAMILY" in found else found["FAMILIES"][model_type]
            )
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


FILES = {
    "bailing_hybrid": "bailing_hybrid",
    "cohere": "aya_vision cohere cohere2 cohere2_moe cohere2_vision",
    "deepseek": "axk1 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl kimi_k2 youtu",
    "exaone": "exaone exaone4 exaone4_5 exaone_moe",
    "gemma": "gemma gemma2 gemma3 gemma3_text vaultgemma",
    "gemma4": "gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    "glm": "glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa solar_open",
    "glm4v": "glm46v glm4v glm4v_moe glm_ocr glmga",
    "gpt": "bloom falcon gpt2 gpt_bigcode gpt_neox gptj opt persimmon starcoder2",
    "gpt_oss": "gpt_oss",
    "granite": "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hyperclovax",
    "hunyuan": "hunyuan_v1_dense hunyuan_v1_moe hy_v3",
    "internvl": "internvl qianfan_ocr",
    "kimi": "kimi_k25 kimi_linear",
    "lfm": "lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl",
    "llama4": "llama4 llama4_text",
    "llama_like": "apertus arcee cwm ernie4_5 helium internlm3 iquestcoder jais2 llama nanochat nemotron seed_oss "
    "smollm3 stablelm",
    "llama_moe_like": "afmoe aria_text dots1 ernie4_5_moe flint",
    "llava_like": "got_ocr2 idefics3 llava llava_next llava_onevision ovis2 smolvlm vipllava",
    "longcat_flash": "longcat_flash",
    "mamba": "bamba falcon_h1 falcon_mamba jamba mamba mamba2",
    "mimo": "mimo mimo_v2_flash",
    "minicpm": "minicpm3 minicpmv4_6",
    "minimax": "minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text",
    "mistral": "lighton_ocr ministral ministral3 mistral mistral3 mistral4 mixtral",
    "nemotron_h": "nemotron_h",
    "olmo": "flex_olmo olmo olmo2 olmo3 olmo_hybrid olmoe",
    "phi": "phi phi3 phimoe",
    "qwen": "mellum qwen2 qwen2_moe qwen3 qwen3_moe",
    "qwen3_5": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next",
    "qwen_omni": "qwen2_5_omni qwen2_5_omni_thinker qwen3_asr qwen3_omni_moe qwen3_omni_moe_thinker",
    "qwen_vl": "qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe",
    "sarvam": "sarvam_mla sarvam_moe",
    "whisper_like": "audioflamingo3 glmasr qwen2_audio voxtral",
}
"""The types of each file of this package that has families."""
FAMILIES = _Families({kind: file for file, kinds in FILES.items() for kind in kinds.split()})


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
