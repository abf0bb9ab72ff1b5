"""MiniCPM 3 and MiniCPM-V 4.6."""

from math import sqrt

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates import get_family
from mca_models.templates.config_table import (
    SWIGLU_WITHOUT_BIASES,
    ConfigTable,
    Field,
    HfConfig,
    Lens,
    dense_fields,
    head_dim,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import siglip_tower
from mca_models.templates.parts.mla import LATENT_FIELDS, key_channels, mla_dense_params
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import (
    TOWER,
    NestedTextConfig,
    Shapes,
    VisionModel,
    linear,
    module_spelling,
    norm,
)
from mca_models.templates.parts.vision_values import VisionValues, vision_values


# MiniCPM 3: HF `MiniCPM3ForCausalLM`: MLA with non-interleaved RoPE, factors as Granite's.
def derive(hf: HfConfig) -> JsonObject:
    """Heads, and the factors on residuals and logits."""
    layers, base = hf["num_hidden_layers"], hf.get("dim_model_base") or hf["hidden_size"]
    depth = hf["scale_depth"]
    return {
        **key_channels(hf),
        "residual_multiplier": 1.0 if depth is None else depth / sqrt(layers),
        "logits_scaling": hf["hidden_size"] / base,
    }


def _write(values: Values) -> HfConfig:
    depth = round(values["residual_multiplier"] * sqrt(values["num_layers"]), 9)
    return {"scale_depth": depth, "dim_model_base": round(values["hidden_size"] / values["logits_scaling"])}


MINICPM3 = Family(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    config=ConfigTable(
        fields=(
            *(its for its in dense_fields(tied=True, eps=1e-5) if its.mca != "kv_channels"),
            *(its for its in LATENT_FIELDS if its.mca != "v_head_dim"),
            Field("v_head_dim", "v_head_dim", head_dim),
            Field("embedding_multiplier", "scale_emb", 12),
        ),
        defaults={
            **{"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
            **{
                "scale_depth": 1.4,
                "dim_model_base": 256,
                "num_key_value_heads": 40,
                "initializer_range": 0.1,
            },
        },
        constants={"qk_layernorm": True, "rotary_halves": True},
        fixed=SWIGLU_WITHOUT_BIASES,
        facts=(Lens(derive, _write),),
    ),
    params=mla_dense_params,
)


# MiniCPM-V 4.6: HF `MiniCPMV4_6ForConditionalGeneration`: SigLIP, which merges windows halfway, and Qwen 3.5.
MERGER, WINDOWS = "merger.", f"{TOWER}vit_merger."


def window_merger(vision: VisionValues) -> Shapes:
    """Return the tensors of the attention within windows of patches, and of the MLP that merges each window."""
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 3072)
    merged = 4 * width
    found = {**norm("layer_norm1", width), **norm("pre_norm", merged)}
    for x in ("q", "k", "v", "out"):
        found |= linear(f"self_attn.{x}_proj", width, width)
    found |= linear("linear_1", 4 * inner, merged)
    return found | linear("linear_2", width, 4 * inner)


def require_two_by_two(values: VisionValues, key: str) -> None:
    """Raise if ``key`` is another size than that of the merging linears, which transformers fixes.

    Raises:
        McaError: It is.
    """
    if (sides := values.sides(key, (2, 2))) != (2, 2):
        raise McaError(f"'{key}' of config.json is {list(sides)}; expected [2, 2]")


def tensors(config: McaModelConfig) -> Shapes:
    """Return every tensor of tower and merger."""
    about, vision = vision_values(config)
    require_two_by_two(about, "merge_kernel_size")
    require_two_by_two(vision, "window_kernel_size")
    width, times = vision.size("hidden_size", 768), about.layers("merger_times", 1)
    found = {TOWER + name: shape for name, shape in siglip_tower(vision, head=False).items()}
    found |= {WINDOWS + name: shape for name, shape in window_merger(vision).items()}
    for i in range(times):
        found |= norm(f"{MERGER}mlp.{i}.pre_norm", 4 * width)
        found |= linear(f"{MERGER}mlp.{i}.linear_1", 4 * width, 4 * width)
        found |= linear(
            f"{MERGER}mlp.{i}.linear_2", width if i < times - 1 else config.hidden_size, 4 * width
        )
    return found


def merges_windows(config: McaModelConfig) -> bool:
    """Return whether the tower merges windows, after a layer that it must have."""
    about, vision = vision_values(config)
    if about.choice("downsample_mode", "16x", "4x") == "4x":
        return False
    last = vision.layers("num_hidden_layers", 12) - 1
    layer = about.values.get("insert_layer_id", 6)
    if type(layer) is not int or not 0 <= layer <= last:
        raise McaError(
            f"'insert_layer_id' of config.json is {layer!r}; expected a layer of the vision tower, 0 to {last}, where "
            "downsample_mode is 16x"
        )
    return True


def tokens_of_size(config: McaModelConfig, rows: int, columns: int) -> int:
    """Return the features of an image or a slice of ``rows`` times ``columns`` patches."""
    about, _ = vision_values(config)
    merged: int = 2 ** (about.layers("merger_times", 1) + merges_windows(config))
    return (rows // merged) * (columns // merged)


MINICPMV4_6 = vision_language_family(
    "minicpmv4_6",
    "MiniCPMV4_6ForConditionalGeneration",
    {"qwen3_5_text": get_family("qwen3_5_text")},
    VisionModel(
        tensors=tensors,
        spellings=(module_spelling(TOWER, MERGER),),
        projector=(MERGER,),
        unused=lambda config: () if merges_windows(config) else (WINDOWS,),
        image_tokens="numbered_slices",
        video_tokens="slices",
        tokens_of_size=tokens_of_size,
    ),
    NestedTextConfig(),
)

FAMILIES = by_type(MINICPM3, MINICPMV4_6)
