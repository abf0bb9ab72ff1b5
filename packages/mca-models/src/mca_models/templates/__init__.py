"""Weight templates: one short file for each model family, and the table of them."""

from dataclasses import replace

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import (
    afmoe,
    apertus,
    arcee,
    aria_text,
    bamba,
    bloom,
    cohere,
    cohere2,
    cohere2_moe,
    cwm,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    flex_olmo,
    flint,
    gemma,
    gemma2,
    gemma3,
    gemma3_text,
    gemma4_text,
    gemma4_unified_text,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v,
    glm_moe_dsa,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
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
    kimi_linear,
    llama,
    llama4_text,
    longcat_flash,
    mellum,
    mimo,
    mimo_v2_flash,
    minicpm3,
    minimax_m2,
    minimax_m3_vl,
    minimax_m3_vl_text,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    opt,
    persimmon,
    phi,
    phi3,
    phimoe,
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
from mca_models.templates.nesting import without_quantisation

__all__ = ["FAMILIES", "Family", "config_from_hf", "config_to_hf", "family_of"]

FAMILIES: dict[str, Family] = {
    "afmoe": afmoe.FAMILY,
    "apertus": apertus.FAMILY,
    "arcee": arcee.FAMILY,
    "aria_text": aria_text.FAMILY,
    "bamba": bamba.FAMILY,
    "bloom": bloom.FAMILY,
    "cohere": cohere.FAMILY,
    "cohere2": cohere2.FAMILY,
    "cohere2_moe": cohere2_moe.FAMILY,
    "cwm": cwm.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v32.FAMILY,
    "dots1": dots1.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "exaone4": exaone4.FAMILY,
    "exaone_moe": exaone_moe.FAMILY,
    "falcon": falcon.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "flex_olmo": flex_olmo.FAMILY,
    "flint": flint.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3": gemma3.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "gemma4_text": gemma4_text.FAMILY,
    "gemma4_unified_text": gemma4_unified_text.FAMILY,
    "glm": glm.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "glm4v": glm4v.FAMILY,
    "glm4v_moe": glm4v.MOE_FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gpt_bigcode": gpt_bigcode.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gptj": gptj.FAMILY,
    "granite": granite.FAMILY,
    "granite_swa": granite_swa.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoe_swa": granitemoe_swa.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
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
    "kimi_linear": kimi_linear.FAMILY,
    "llama": llama.FAMILY,
    "llama4_text": llama4_text.FAMILY,
    "longcat_flash": longcat_flash.FAMILY,
    "mellum": mellum.FAMILY,
    "mimo": mimo.FAMILY,
    "mimo_v2_flash": mimo_v2_flash.FAMILY,
    "minicpm3": minicpm3.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "minimax_m3_vl": minimax_m3_vl.FAMILY,
    "minimax_m3_vl_text": minimax_m3_vl_text.FAMILY,
    "ministral": ministral.FAMILY,
    "ministral3": ministral3.FAMILY,
    "mistral": mistral.FAMILY,
    "mistral3": mistral3.FAMILY,
    "mistral4": mistral4.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nanochat": nanochat.FAMILY,
    "nemotron": nemotron.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "olmo": olmo.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "olmo_hybrid": olmo_hybrid.FAMILY,
    "olmoe": olmoe.FAMILY,
    "opt": opt.FAMILY,
    "persimmon": persimmon.FAMILY,
    "phi": phi.FAMILY,
    "phi3": phi3.FAMILY,
    "phimoe": phimoe.FAMILY,
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
    family = family_of(hf["model_type"])
    config = head_from_hf(family.config.to_mca(hf), hf)
    family.require_own(config)
    return config


def config_to_hf(config: McaModelConfig) -> HfConfig:
    """``config.json`` of the model in plain weights: the source's own, with what changed brought up to date."""
    family = family_of(config.model_type)
    if config.num_labels is None:
        return without_quantisation(family.config.to_hf(config, family.architecture))
    before = family.config.to_mca(config.hf_config) if config.hf_config else config
    said = {name: getattr(before, name) for name in ("tie_word_embeddings", "mtp_num_layers", "pad_token_id")}
    plain = replace(config, head="causal_lm", num_labels=None, **said)
    return head_to_hf(config, without_quantisation(family.config.to_hf(plain, family.architecture)))
