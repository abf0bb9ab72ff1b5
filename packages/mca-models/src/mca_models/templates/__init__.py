"""Weight templates: one short file for each model family, and the table of them."""

from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import (
    arcee,
    cwm,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    exaone4,
    exaone_moe,
    gemma,
    gemma2,
    gemma3,
    gemma3_text,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v,
    gpt_oss,
    granite,
    granitemoe,
    granitemoeshared,
    helium,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    hy_v3,
    hyperclovax,
    internlm3,
    internvl,
    iquestcoder,
    jais2,
    kimi_k2,
    llama,
    minimax_m2,
    ministral,
    mistral,
    mistral3,
    mixtral,
    nemotron,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    vaultgemma,
    youtu,
)
from mca_models.templates.catalog import unsupported
from mca_models.templates.config_table import HfConfig
from mca_models.templates.family import Family
from mca_models.templates.heads import head_from_hf, head_to_hf

__all__ = ["FAMILIES", "Family", "config_from_hf", "config_to_hf", "family_of"]

FAMILIES: dict[str, Family] = {
    "arcee": arcee.FAMILY,
    "cwm": cwm.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "dots1": dots1.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "exaone4": exaone4.FAMILY,
    "exaone_moe": exaone_moe.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma3.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "glm": glm.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "glm4v": glm4v.FAMILY,
    "glm4v_moe": glm4v.MOE_FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "granite": granite.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoeshared": granitemoeshared.FAMILY,
    "helium": helium.FAMILY,
    "hunyuan_v1_dense": hunyuan_v1_dense.FAMILY,
    "hunyuan_v1_moe": hunyuan_v1_moe.FAMILY,
    "hy_v3": hy_v3.FAMILY,
    "hyperclovax": hyperclovax.FAMILY,
    "internlm3": internlm3.FAMILY,
    "internvl": internvl.FAMILY,
    "iquestcoder": iquestcoder.FAMILY,
    "jais2": jais2.FAMILY,
    "kimi_k2": kimi_k2.FAMILY,
    "llama": llama.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "ministral": ministral.FAMILY,
    "mistral": mistral.FAMILY,
    "mistral3": mistral3.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nemotron": nemotron.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "olmoe": olmoe.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen2_vl": qwen2_vl.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5.MOE_FAMILY,
    "qwen3_5_moe_text": qwen3_5_moe_text.FAMILY,
    "qwen3_5_text": qwen3_5_text.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl_moe.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "solar_open": solar_open.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
    "vaultgemma": vaultgemma.FAMILY,
    "youtu": youtu.FAMILY,
}


def family_of(model_type: str) -> Family:
    """The family of a HF ``model_type``.

    Raises:
        McaError: It is not supported.
    """
    if model_type not in FAMILIES:
        raise unsupported(model_type)
    return FAMILIES[model_type]


def config_from_hf(hf: JsonObject) -> McaModelConfig:
    """The model that a parsed ``config.json`` describes.

    Raises:
        McaError: Its family or one of its values cannot be represented.
    """
    if not isinstance(hf.get("model_type"), str):
        raise HfConfigError("config.json has no 'model_type'; it names the model family")
    return head_from_hf(family_of(hf["model_type"]).config.to_mca(hf), hf)


def config_to_hf(config: McaModelConfig) -> HfConfig:
    """``config.json`` of the model: the source's own, with what changed brought up to date."""
    family = family_of(config.model_type)
    if config.num_labels is None:
        return family.config.to_hf(config, family.architecture)
    before = family.config.to_mca(config.hf_config) if config.hf_config else config
    said = {name: getattr(before, name) for name in ("tie_word_embeddings", "mtp_num_layers", "pad_token_id")}
    plain = replace(config, head="causal_lm", num_labels=None, **said)
    return head_to_hf(config, family.config.to_hf(plain, family.architecture))
