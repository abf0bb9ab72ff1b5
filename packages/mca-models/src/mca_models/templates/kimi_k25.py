"""Kimi K2.5, K2.6: HF ``Kimi_K25ForConditionalGeneration``: MoonViT with fused q, k and v, and the text model of K2."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_models.templates import get_family
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    NestedTextConfig,
    Shapes,
    Spelling,
    VisionModel,
    linear,
    module_spelling,
    norm,
    repeat_shapes,
)
from mca_models.templates.parts.vision_values import vision_values

_PROJECTOR = "mm_projector."
_FILES = Spelling(
    "language_model.model.",
    "language_model.lm_head.",
    {
        f"{TOWER}layers.": f"{TOWER}encoder.blocks.",
        f"{TOWER}final_layernorm.": f"{TOWER}encoder.final_layernorm.",
        f"{TOWER}patch_embed.pos_emb.position_embeddings": f"{TOWER}patch_embed.pos_emb.weight",
        f"{_PROJECTOR}in_proj.": f"{_PROJECTOR}proj.0.",
        f"{_PROJECTOR}out_proj.": f"{_PROJECTOR}proj.2.",
        TOWER: TOWER,
        _PROJECTOR: _PROJECTOR,
    },
    (
        *(
            (".norm1.", ".norm0."),
            (".norm2.", ".norm1."),
            (".mlp.fc1.", ".mlp.fc0."),
            (".mlp.fc2.", ".mlp.fc1."),
        ),
        *((".attn.proj.", ".wo."), (".attn.wqkv.", ".wqkv.")),
    ),
)
_SAVED = replace(  # by transformers 5.23, which reads both
    _FILES,
    vision={
        **dict(list(_FILES.vision.items())[:-2]),
        f"{TOWER}patch_embed.proj.": f"{TOWER}encoder.patch_embed.proj.",
        f"{_PROJECTOR}pre_norm.": f"model.{_PROJECTOR}pre_norm.",
    },
    layers="blocks.",
)
_TOKENS = {
    **{"image_token_id": 163605, "video_token_id": 163840},
    **{"vision_start_token_id": 163602, "vision_end_token_id": 163604},
}


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and projector."""
    about, vision = vision_values(config)
    width, inner = vision.size("hidden_size", 1152), vision.size("intermediate_size", 4304)
    high, wide = vision.sides("patch_size", 14)
    rows, columns = vision.sides("merge_kernel_size", 2)
    merged = width * rows * columns
    layer = {
        **norm("norm1", width),
        **norm("norm2", width),
        **linear("attn.proj", width, width),
        **linear("attn.wqkv", 3 * width, width),
        **linear("mlp.fc1", inner, width),
        **linear("mlp.fc2", width, inner),
    }
    positions = (vision.size("pos_emb_height", 64), vision.size("pos_emb_width", 64), width)
    tower = {
        "patch_embed.proj.weight": (width, 3, high, wide),
        "patch_embed.proj.bias": (width,),
        "patch_embed.pos_emb.position_embeddings": positions,
        **norm("final_layernorm", width),
        **repeat_shapes("layers", vision.layers("num_hidden_layers", 27), layer),
    }
    return {
        **{TOWER + name: shape for name, shape in tower.items()},
        **norm(f"{_PROJECTOR}pre_norm", about.size("projection_hidden_size", 1152)),
        **linear(f"{_PROJECTOR}in_proj", merged, merged),
        **linear(f"{_PROJECTOR}out_proj", config.hidden_size, merged),
    }


FAMILY = vision_language_family(
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    {kind: get_family(kind) for kind in ("deepseek_v3", "kimi_k2")},
    VisionModel(
        tensors=tensors,
        spellings=(_FILES, _SAVED, module_spelling(TOWER, _PROJECTOR)),
        projector=(_PROJECTOR,),
        image_tokens="padded_patches",
        fused_qkv="rope pairs",
    ),
    NestedTextConfig(text_model_type="", tied=True, defaults=_TOKENS),
    assumed=True,
)
