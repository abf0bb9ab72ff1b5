"""GLM 4.1V, 4.5V, 4.6V and OCR: HF ``Glm4vForConditionalGeneration``, ``Glm4vMoe...``, ``Glm46V...``, ``GlmOcr...``."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject
from mca_models.templates import get_family
from mca_models.templates.config_table import HfConfig, Lens, head_dim
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.moe import AUX_LOSS, GROUPED_EXPERTS
from mca_models.templates.parts.passthrough import with_mtp_passthrough
from mca_models.templates.parts.qwen_tower import MERGERS, VISUAL, patches
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    NestedTextConfig,
    Shapes,
    VideoTokenKind,
    VisionModel,
    gated_mlp,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values

GLM4 = get_family("glm4")
GLM4_MOE = get_family("glm4_moe")

_norm, _linear = partial(norm, bias=False), partial(linear, bias=False)


def glm_vision(config: McaModelConfig) -> VisionValues:
    """Return the values of ``vision_config``; other names of keys win, as in transformers."""
    _, vision = vision_values(config)
    names = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
    said = {name: vision.values[alias] for alias, name in names.items() if alias in vision.values}
    return replace(vision, values={**vision.values, **said})


def _tower(vision: VisionValues, width: int, block: Shapes, out: int, inner: int, *norms: str) -> Shapes:
    """Return the tensors of a tower of layers ``block``, with ``norms`` of its features in front of the last one."""
    merge = vision.size("spatial_merge_size", 2)
    return {
        f"{VISUAL}patch_embed.proj.weight": patches(vision, width),
        f"{VISUAL}patch_embed.proj.bias": (width,),
        **repeat_shapes(f"{VISUAL}blocks", vision.layers("depth", 24), block),
        **_linear(f"{VISUAL}merger.proj", out, out),
        **norm(f"{VISUAL}merger.post_projection_norm", out),
        **gated_mlp(f"{VISUAL}merger.", inner, out, bias=False),
        **{f"{VISUAL}{name}.weight": (width,) for name in norms},
        f"{VISUAL}downsample.weight": (out, width, merge, merge),
        f"{VISUAL}downsample.bias": (out,),
        **_norm(f"{VISUAL}post_layernorm", width),
    }


def tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of the vision model."""
    vision = glm_vision(config)
    width, out = vision.size("hidden_size", 1536), vision.size("out_hidden_size", 4096)
    side = vision.size("image_size", 336) // vision.size("patch_size", 14)
    bias = vision.flag("attention_bias", False)
    block = {
        **_norm("norm1", width),
        **_norm("norm2", width),
        **linear("attn.qkv", 3 * width, width, bias=bias),
        **_linear("attn.proj", width, width),
        **gated_mlp("mlp.", out, width, bias=False),
    }
    return {
        f"{VISUAL}embeddings.position_embedding.weight": (side**2, width),
        **_tower(vision, width, block, out, vision.size("intermediate_size", 13696), "post_conv_layernorm"),
    }


def ocr_tensors(config: McaModelConfig) -> Shapes:
    """Every tensor of the vision model of GLM-OCR, with norms of q and k, and without a table of positions."""
    vision = glm_vision(config)
    width, out = vision.size("hidden_size", 1024), vision.size("out_hidden_size", 1536)
    bias = vision.flag("attention_bias", True)
    block = {
        **_norm("norm1", width),
        **_norm("norm2", width),
        **linear("attn.qkv", 3 * width, width, bias=bias),
        **linear("attn.proj", width, width, bias=bias),
        **_norm("attn.q_norm", width // vision.size("num_heads", 16)),
        **_norm("attn.k_norm", width // vision.size("num_heads", 16)),
        **gated_mlp("mlp.", vision.size("intermediate_size", 4096), width, bias=bias),
    }
    return _tower(vision, width, block, out, out * vision.size("in_channels", 3))


def _derive(hf: HfConfig) -> JsonObject:
    return {"kv_channels": head_dim(hf)}


def dense_text() -> Family:
    """GLM 4 as the text part: always with biases on q, k and v, and with heads that follow from the width."""
    named = ("head_dim", "attention_bias")
    config = replace(
        GLM4.table,
        fields=tuple(field for field in GLM4.table.fields if field.hf not in named),
        defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        constants={**GLM4.table.constants, "add_qkv_bias": True},
        facts=(Lens(_derive),),
    )
    return replace(GLM4, model_type="glm4v_text", config=config)


def ocr_text() -> Family:
    """GLM 4 as the text part of GLM-OCR: without biases, and with heads of any size."""
    config = replace(
        GLM4.table,
        fields=tuple(field for field in GLM4.table.fields if field.hf != "attention_bias"),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        constants={**GLM4.table.constants, "add_qkv_bias": False},
    )
    return replace(GLM4, model_type="glm_ocr_text", config=config)


def moe_text() -> Family:
    """GLM 4.5 as the text part: without norms of q and k and MTP layers, with a load-balancing loss."""
    left = ("use_qk_norm", "num_nextn_predict_layers")
    config = replace(
        GLM4_MOE.table,
        fields=tuple(field for field in GLM4_MOE.table.fields if field.hf not in left),
        defaults={
            **GLM4_MOE.table.defaults,
            **{"attention_bias": True, "num_nextn_predict_layers": 0, "router_aux_loss_coef": 1e-4},
        },
        constants={**GLM4_MOE.table.constants, "qk_layernorm": False},
        aliases={"num_local_experts": "n_routed_experts"},
        facts=(GROUPED_EXPERTS, AUX_LOSS),
    )
    return replace(GLM4_MOE, model_type="glm4v_moe_text", config=config)


def _family(
    model_type: str,
    architecture: str,
    *texts: Family,
    ties: Literal["never", "too"] = "too",
    video: VideoTokenKind = "second_after",
    shapes: Callable[[McaModelConfig], Shapes] = tensors,
) -> Family:
    return vision_language_family(
        model_type,
        architecture,
        {text.model_type: text for text in texts},
        VisionModel(
            tensors=shapes,
            spellings=(module_spelling(VISUAL),),
            projector=MERGERS,
            video_tokens=video,
        ),
        NestedTextConfig(text_ties=ties, rope=((8, 12, 12), False)),
        assumed=True,
    )


GLM4V = _family("glm4v", "Glm4vForConditionalGeneration", dense_text())
GLM4V_MOE = _family("glm4v_moe", "Glm4vMoeForConditionalGeneration", moe_text())
GLM46V = _family(
    "glm46v", "Glm46VForConditionalGeneration", dense_text(), moe_text(), ties="never", video="seconds_after"
)
GLMGA = _family(  # GLM 4.6V under another type
    "glmga", "Glm46VForConditionalGeneration", dense_text(), moe_text(), ties="never", video="seconds_after"
)
GLM_OCR = with_mtp_passthrough(
    _family(
        "glm_ocr", "GlmOcrForConditionalGeneration", ocr_text(), video="seconds_after", shapes=ocr_tensors
    )
)

FAMILIES = by_type(GLM4V, GLM4V_MOE, GLM46V, GLMGA, GLM_OCR)
