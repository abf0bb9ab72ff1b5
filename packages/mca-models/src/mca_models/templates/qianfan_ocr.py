"""Qianfan-OCR: HF ``QianfanOCRForConditionalGeneration``: InternVL's vision model with fused q, k and v, and Qwen 3."""

from dataclasses import replace

from mca_models.templates import get_family
from mca_models.templates.parts.intern_vit import intern_vit, tokens_per_tile
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    PROJECTOR,
    TOWER,
    NestedTextConfig,
    Spelling,
    VisionModel,
    module_spelling,
)

_FILES = Spelling(
    "language_model.model.",
    "language_model.lm_head.",
    {
        f"{TOWER}layers.": "vision_model.encoder.layers.",
        f"{TOWER}embeddings.cls_token": "vision_model.embeddings.class_embedding",
        f"{TOWER}embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
        f"{TOWER}embeddings.patch_embeddings.projection.": "vision_model.embeddings.patch_embedding.",
        TOWER: "vision_model.",
        f"{PROJECTOR}layer_norm.": "mlp1.0.",
        f"{PROJECTOR}linear_1.": "mlp1.1.",
        f"{PROJECTOR}linear_2.": "mlp1.3.",
    },
    (
        *((".attention.wqkv.", ".attn.qkv."), (".attention.projection_layer.", ".attn.proj.")),
        *((".layernorm_before.", ".norm1."), (".layernorm_after.", ".norm2.")),
        *((".lambda_1", ".ls1"), (".lambda_2", ".ls2")),
    ),
)
_SAVED = replace(_FILES, layers="encoder.layers.")  # by transformers 5.23, which reads both

FAMILY = vision_language_family(
    "qianfan_ocr",
    "QianfanOCRForConditionalGeneration",
    {"qwen3": get_family("qwen3")},
    VisionModel(
        tensors=lambda config: intern_vit(config, "layers", fused=True, biased=True),
        spellings=(_FILES, _SAVED, module_spelling(TOWER, PROJECTOR)),
        projector=(PROJECTOR,),
        image_tokens="word_tiles",
        tokens_per_image=tokens_per_tile,
        fused_qkv="one after the other",
    ),
    NestedTextConfig(text_model_type=""),
)
