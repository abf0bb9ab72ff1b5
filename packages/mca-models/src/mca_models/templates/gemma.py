"""Gemma 1 to 3: zero-centered norms, scaled embeddings."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import (
    GELU,
    GELU_ONLY,
    GELU_SANDWICH,
    NO_ATTENTION_BIAS,
    NO_BIDIRECTIONAL,
    ConfigTable,
    Field,
    Fixed,
    HfConfig,
    Lens,
    dense_fields,
)
from mca_models.templates.family import Family, by_type
from mca_models.templates.parts.clip_tower import CLIP_SPELLINGS, siglip_tower
from mca_models.templates.parts.common import dense_layers, renamed
from mca_models.templates.parts.rope import FULL, SLIDING, derive_dual_rope, layer_types, write_dual_rope
from mca_models.templates.parts.vision_language import vision_language_family
from mca_models.templates.parts.vision_tower import PROJECTOR, TOWER, NestedTextConfig, Shapes, VisionModel
from mca_models.templates.parts.vision_values import vision_values
from mca_models.weights import Param


def scales(hf: HfConfig) -> JsonObject:
    """The factors on scores and embeddings that HF computes from sizes."""
    return {
        "softmax_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": hf["hidden_size"] ** 0.5,
    }


def write_scale(values: Values) -> HfConfig:
    """Write the HF keys."""
    return {"hidden_activation": GELU, "query_pre_attn_scalar": round((values["softmax_scale"] or 1.0) ** -2)}


EMBEDDING_SCALE = Lens(lambda hf: {"embedding_multiplier": hf["hidden_size"] ** 0.5})
"""The factor on embeddings, which HF computes from the size."""


QUERY_SCALE = Lens(scales, write_scale)


# Gemma 1: HF `GemmaForCausalLM`: zero-centered norms, scaled embeddings.
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    config=ConfigTable(
        fields=dense_fields(tied=True),
        defaults={"head_dim": 256, "num_key_value_heads": 16, "pad_token_id": 0, "hidden_act": GELU},
        constants={"hidden_act": GELU, "layernorm_zero_centered_gamma": True},
        fixed=(
            NO_ATTENTION_BIAS,
            Fixed("hidden_act", (GELU, "gelu"), "Gemma's gated MLP"),
            NO_BIDIRECTIONAL,
        ),
        facts=(EMBEDDING_SCALE,),
    ),
    params=dense_layers,
)


# Gemma 2: HF `Gemma2ForCausalLM`: soft-capped scores and logits, pre- and post-norms, alternating windows.
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    config=ConfigTable(
        fields=(
            *dense_fields(tied=True),
            Field("window_size", "sliding_window", 4096),
            Field("attn_logit_softcapping", "attn_logit_softcapping", None),
            Field("final_logit_softcapping", "final_logit_softcapping", None),
        ),
        defaults={
            **{"head_dim": 256, "num_key_value_heads": 4, "pad_token_id": 0},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        },
        constants=GELU_SANDWICH,
        fixed=(NO_ATTENTION_BIAS, GELU_ONLY, NO_BIDIRECTIONAL),
        facts=(layer_types(lambda layer: layer % 2 == 1), QUERY_SCALE),
    ),
    params=dense_layers,
)


# VaultGemma: HF `VaultGemmaForCausalLM`: Gemma 2 without the post-norms.
def _params(config: McaModelConfig) -> list[Param]:
    return renamed(dense_layers(config), {"post_attention_layernorm": "pre_feedforward_layernorm"})


VAULTGEMMA = Family(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    config=replace(GEMMA2.table, constants={**GEMMA2.table.constants, "norm_placement": "pre"}),
    params=_params,
)


# Gemma 3, the text model: HF `Gemma3ForCausalLM`: pre- and post-norms, windows, two RoPEs.
def derive(hf: HfConfig) -> JsonObject:
    """Kinds of layers, a rope for each kind, and the scales that HF computes from sizes."""
    step = hf.get("sliding_window_pattern") or 6
    kinds = hf.get("layer_types") or [
        SLIDING if (i + 1) % step else FULL for i in range(hf["num_hidden_layers"])
    ]
    return {
        **derive_dual_rope(hf, hf.get("rope_theta", 1e6), hf.get("rope_local_base_freq", 1e4)),
        "layer_types": tuple(kinds),
        **scales(hf),
    }


def _write(values: Values) -> HfConfig:
    return {
        **write_dual_rope(values),
        "layer_types": list(values["layer_types"] or ()),
        **write_scale(values),
    }


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    config=ConfigTable(
        fields=(*dense_fields(tied=True), Field("window_size", "sliding_window", None)),
        defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "pad_token_id": 0},
        constants={**GELU_SANDWICH, "qk_layernorm": True},
        fixed=(
            NO_ATTENTION_BIAS,
            GELU_ONLY,
            Fixed("attn_logit_softcapping", (None,), "Gemma 3 has none"),
            Fixed("final_logit_softcapping", (None,), "Gemma 3 has none"),
            NO_BIDIRECTIONAL,
        ),
        facts=(Lens(derive, _write),),
    ),
    params=dense_layers,
)


# Gemma 3: HF `Gemma3ForConditionalGeneration`: a SigLIP tower and the text model.
def _tensors(config: McaModelConfig) -> Shapes:
    _, vision = vision_values(config)
    width = vision.size("hidden_size", 768)
    return {
        **{TOWER + name: shape for name, shape in siglip_tower(vision).items()},
        f"{PROJECTOR}mm_input_projection_weight": (width, config.hidden_size),
        f"{PROJECTOR}mm_soft_emb_norm.weight": (width,),
    }


def tokens_per_image(config: McaModelConfig) -> int:
    """Return the features of an image, which attend to each other in both directions."""
    return vision_values(config)[0].size("mm_tokens_per_image", 256)


_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
"""Keys that published files leave out."""
GEMMA3 = vision_language_family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    {"gemma3_text": GEMMA3_TEXT.with_defaults(_DEFAULTS)},
    VisionModel(
        tensors=_tensors,
        spellings=CLIP_SPELLINGS,
        projector=(PROJECTOR,),
        unused=lambda config: (f"{TOWER}head.",),
        image_tokens="fixed",
        tokens_per_image=tokens_per_image,
        reach=lambda config: tokens_per_image(config) - 1,
    ),
    NestedTextConfig(tied=True, defaults={"mm_tokens_per_image": 256}),
)

FAMILIES = by_type(GEMMA, GEMMA2, VAULTGEMMA, GEMMA3_TEXT, GEMMA3)
