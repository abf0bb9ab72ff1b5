"""Tiny random HF checkpoints of every family with a vision model or an audio tower, saved by transformers itself."""

from pathlib import Path
from typing import Any

import tiny_hf
import torch
import transformers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

# transformers 5.24's Llama 4 reads it from the output of its text model, which has none
MoeCausalLMOutputWithPast.image_outputs = None
transformers.AutoModelForMultimodalLM.register(  # which has the others
    transformers.AudioFlamingo3Config, transformers.AudioFlamingo3ForConditionalGeneration, exist_ok=True
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_QWEN: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_DEEP = {**_QWEN, "deepstack_visual_indexes": [0, 1]}
_WIDE = {"hidden_size": 64, "head_dim": 16}
_IMAGE = {"image_token_id": 65, "video_token_id": 66, "vision_start_token_id": 67, "vision_end_token_id": 68}
_SECTIONS = {**_ROPE, "mrope_section": [3, 3, 2]}
_TURNS = {**_SECTIONS, "mrope_interleaved": True}
_HALF = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}

_POOLED: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2},
    "position_embedding_size": 16,
}
_GEMMA4: dict[str, Any] = {
    **{
        "image_token_id": 65,
        "video_token_id": 66,
        "audio_token_id": 67,
        "boi_token_id": 68,
        "eoi_token_id": 69,
    },
    **{"boa_token_id": 64, "eoa_token_index": 63},
}
WHISPER: dict[str, Any] = {
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "d_model": 16,
    "max_source_positions": 16,
}
_LATER_WHISPER: dict[str, Any] = {
    **{"num_mel_bins": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_source_positions": 16},
}

_OMNI = {**_IMAGE, "audio_token_id": 69, "audio_start_token_id": 64, "audio_end_token_id": 63}
_OMNI_INDEX = {
    **{key: _OMNI[key] for key in _OMNI if key not in ("image_token_id", "video_token_id", "audio_token_id")},
    **{"image_token_index": 65, "video_token_index": 66, "audio_token_index": 69},
}

Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
# name -> (model_type, what differs from SIZE in the text part, the vision part if there is one, the other keys)
CASES: dict[str, Case] = {
    "qwen2_vl": (
        "qwen2_vl",
        {**_WIDE, "rope_parameters": _SECTIONS},
        {"depth": 2, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        _IMAGE,
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {**_WIDE, "rope_parameters": _SECTIONS},
        {
            **{key: value for key, value in _QWEN.items() if key != "num_position_embeddings"},
            "depth": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 16,
        },
        _IMAGE,
    ),
    "qwen2_5_omni_thinker": (
        "qwen2_5_omni_thinker",
        {**_WIDE, "rope_parameters": _SECTIONS},
        {
            **{key: value for key, value in _QWEN.items() if key != "num_position_embeddings"},
            **{"depth": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16},
        },
        {**_OMNI_INDEX, "audio_config": {**WHISPER, "n_window": 4, "output_dim": 64}},
    ),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe_thinker",
        {**tiny_hf.EXPERTS, "rope_parameters": _TURNS},
        _DEEP,
        {**_OMNI, "audio_config": {**WHISPER, "downsample_hidden_size": 4, "output_dim": 32}},
    ),
    "qwen3_vl": ("qwen3_vl", {"rope_parameters": _TURNS}, _DEEP, _IMAGE),
    "qwen3_vl-tied": (
        "qwen3_vl",
        {"rope_parameters": _TURNS},
        _DEEP,
        {**_IMAGE, "tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", {**tiny_hf.EXPERTS, "rope_parameters": _TURNS}, _DEEP, _IMAGE),
    "qwen3_5": ("qwen3_5", {**tiny_hf.DELTA_NET, "rope_parameters": _HALF}, _QWEN, _IMAGE),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {**tiny_hf.EXPERTS, **tiny_hf.DELTA_NET, **tiny_hf.SHARED, "rope_parameters": _HALF},
        _QWEN,
        _IMAGE,
    ),
    "glm4v": (
        "glm4v",
        {**_WIDE, "rope_parameters": _HALF},
        {**_SIGLIP, "out_hidden_size": 64},
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {**tiny_hf.GROUPED, "rope_parameters": _HALF},
        {**_SIGLIP, "out_hidden_size": 32, "attention_bias": True},
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "glm46v": (
        "glm46v",
        {"model_type": "glm4v_text", **_WIDE, "rope_parameters": _HALF},
        {"model_type": "glm4v_vision", **_SIGLIP, "out_hidden_size": 64},
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "glm46v-moe": (
        "glm46v",
        {"model_type": "glm4v_moe_text", **tiny_hf.GROUPED, "rope_parameters": _HALF},
        {"model_type": "glm4v_moe_vision", **_SIGLIP, "out_hidden_size": 32, "attention_bias": True},
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "glmga": (
        "glmga",
        {"model_type": "glm4v_text", **_WIDE, "rope_parameters": _HALF},
        {"model_type": "glm4v_vision", **_SIGLIP, "out_hidden_size": 64},
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "glm_ocr": (
        "glm_ocr",
        {"head_dim": 12, "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2]}},
        {**_SIGLIP, "out_hidden_size": 32},
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "gemma3": (
        "gemma3",
        {
            "sliding_window": 3,  # an image of four tokens is longer
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
        },
        {**_SIGLIP, "vision_use_head": False},
        {"mm_tokens_per_image": 4, "image_token_index": 65},
    ),
    "internvl": (
        "internvl",
        {"model_type": "qwen2", "head_dim": 8},
        {**_SIGLIP, "patch_size": [4, 4], "image_size": [16, 16]},
        {"image_seq_length": 4, "image_token_id": 65, "tie_word_embeddings": False},
    ),
    "internvl-qwen3_moe": (
        "internvl",
        {"model_type": "qwen3_moe", **tiny_hf.EXPERTS},
        {
            **_SIGLIP,
            "patch_size": [4, 4],
            "image_size": [16, 16],
            "use_qk_norm": True,
            "norm_type": "rms_norm",
        },
        {"image_seq_length": 4, "image_token_id": 65},
    ),
    "got_ocr2": (
        "got_ocr2",
        {"model_type": "qwen2", "head_dim": 8},
        {
            **{key: value for key, value in _SIGLIP.items() if key != "intermediate_size"},
            **{"patch_size": 2, "mlp_dim": 24, "output_channels": 12},
            **{"window_size": 3, "global_attn_indexes": [1]},
        },
        {"image_token_index": 65, "tie_word_embeddings": False},
    ),
    "qianfan_ocr": (
        "qianfan_ocr",
        {"model_type": "qwen3"},
        {
            **{**_SIGLIP, "patch_size": [4, 4], "image_size": [16, 16]},
            **{"drop_path_rate": 0.0, "use_qk_norm": True},
        },
        {"image_seq_length": 4, "image_token_id": 65, "tie_word_embeddings": False},
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 65, "tie_word_embeddings": False},
    ),
    "lighton_ocr": (
        "lighton_ocr",
        {"model_type": "qwen3"},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
        {"image_token_id": 65},
    ),
    "mistral3-ministral3": (
        "mistral3",
        {"model_type": "ministral3", **tiny_hf.ALIKE["ministral3"][1]},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 65, "tie_word_embeddings": False},
    ),
    "llama4-moe": (
        "llama4",
        tiny_hf.ALL["llama4_text"][1],
        {
            **{key: value for key, value in _SIGLIP.items() if key != "intermediate_size"},
            **{"intermediate_size": 64, "projector_input_dim": 20, "projector_output_dim": 20},
            "vision_output_dim": 20,
        },
        {"image_token_index": 65, "tie_word_embeddings": False},
    ),
    "deepseek_vl": (
        "deepseek_vl",
        {"model_type": "llama"},
        {**_SIGLIP, "patch_size": 8, "vision_use_head": False},
        {"image_token_id": 65, "tie_word_embeddings": False},
    ),
    "exaone4_5": (
        "exaone4_5",
        {"model_type": "exaone4", **tiny_hf.ALL["exaone4"][1], "hidden_size": 64, "head_dim": 16},
        {
            **{key: value for key, value in _QWEN.items() if key != "num_position_embeddings"},
            **{"depth": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16},
            "num_key_value_heads": 1,
        },
        {"image_token_id": 65, "video_token_id": 66},
    ),
    "kimi_k25-moe": (
        "kimi_k25",
        {"model_type": "deepseek_v3", **tiny_hf.ALL["deepseek_v3"][1], "head_dim": 4},
        {
            **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
            **{"pos_emb_height": 3, "pos_emb_width": 3},
        },
        {
            "image_token_id": 65,
            "video_token_id": 66,
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
        },
    ),
    "llava": (
        "llava",
        {"model_type": "llama"},
        {**_SIGLIP, "model_type": "clip_vision_model", "patch_size": 8},
        {"image_token_index": 65, "tie_word_embeddings": False},
    ),
    "llava-siglip": (
        "llava",
        {"model_type": "qwen2", "head_dim": 8},
        {**_SIGLIP, "model_type": "siglip_vision_model", "patch_size": 8, "vision_use_head": False},
        {
            **{"image_token_index": 65, "tie_word_embeddings": False, "vision_feature_layer": -1},
            "vision_feature_select_strategy": "full",
        },
    ),
    "smolvlm": (
        "smolvlm",
        {"model_type": "llama"},
        dict(_SIGLIP),
        {"image_token_id": 65, "tie_word_embeddings": False},
    ),
    "idefics3": (
        "idefics3",
        {"model_type": "llama"},
        dict(_SIGLIP),
        {"image_token_id": 65, "tie_word_embeddings": False},
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {**tiny_hf.ALIKE["lfm2"][1], "model_type": "lfm2"},
        {
            **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
            **{"model_type": "siglip2_vision_model", "num_patches": 9, "vision_use_head": False},
        },
        {"image_token_id": 65, "projector_hidden_size": 20},
    ),
    "minicpmv4_6": (
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", **tiny_hf.DELTA_NET, "rope_parameters": _HALF},
        {**_SIGLIP, "num_hidden_layers": 3},
        {"image_token_id": 65, "video_token_id": 66, "insert_layer_id": 1},
    ),
    "minicpmv4_6-4x": (
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", **tiny_hf.DELTA_NET, "rope_parameters": _HALF},
        dict(_SIGLIP),
        {"image_token_id": 65, "video_token_id": 66, "downsample_mode": "4x", "merger_times": 2},
    ),
    "lfm3_vl": (
        "lfm3_vl",
        {**tiny_hf.ALIKE["lfm3"][1], "model_type": "lfm3"},
        {
            **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
            **{
                "num_hidden_layers": 3,
                "num_key_value_heads": 1,
                "layer_types": ["conv", *["full_attention"] * 2],
            },
        },
        {**_IMAGE, "projector_hidden_size": 20},
    ),
    "ovis2": (
        "ovis2",
        {"model_type": "qwen2", "head_dim": 8},
        {**_SIGLIP, "hidden_stride": 2, "vocab_size": 21, "qkv_bias": True},
        {
            **{"image_token_id": 65, "visual_indicator_token_ids": [66, 67, 68, 69, 64]},
            **{"hidden_size": tiny_hf.SIZE["hidden_size"], "vocab_size": tiny_hf.SIZE["vocab_size"]},
            "tie_word_embeddings": False,
        },
    ),
    "vipllava": (
        "vipllava",
        {"model_type": "llama"},
        {**_SIGLIP, "model_type": "clip_vision_model", "patch_size": 8},
        {"image_token_index": 65, "vision_feature_layer": [-2, 1]},
    ),
    "llava_next": (
        "llava_next",
        {"model_type": "mistral", "sliding_window": None},
        {**_SIGLIP, "model_type": "clip_vision_model", "patch_size": 8},
        {"image_token_index": 65, "image_grid_pinpoints": [[16, 16], [32, 32]]},
    ),
    "llava_next-siglip": (
        "llava_next",
        {"model_type": "qwen2", "head_dim": 8},
        {**_SIGLIP, "model_type": "siglip_vision_model", "patch_size": 8, "vision_use_head": False},
        {
            **{"image_token_index": 65, "image_grid_pinpoints": [[16, 16], [32, 32]]},
            **{"vision_feature_layer": [-1, -2], "vision_feature_select_strategy": "full"},
        },
    ),
    "llava_onevision": (
        "llava_onevision",
        {"model_type": "qwen2", "head_dim": 8},
        {**_SIGLIP, "model_type": "siglip_vision_model", "patch_size": 8, "vision_use_head": False},
        {
            **{"image_token_index": 65, "video_token_index": 66, "tie_word_embeddings": False},
            **{"image_grid_pinpoints": [[16, 16], [32, 32]], "vision_aspect_ratio": "anyres_max_1"},
        },
    ),
    "cohere2_vision": (
        "cohere2_vision",
        {**tiny_hf.ALL["cohere2"][1], "model_type": "cohere2"},
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_id": 65, "downsample_factor": 2, "alignment_intermediate_size": 24},
    ),
    "aya_vision": (
        "aya_vision",
        {**tiny_hf.ALL["cohere2"][1], "model_type": "cohere2"},
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_index": 65, "downsample_factor": 2},
    ),
    "gemma4-31b": (
        "gemma4",
        {**tiny_hf.ALL["gemma4_text"][1], "use_bidirectional_attention": "vision", "sliding_window": 3},
        {**_POOLED, "standardize": True},
        _GEMMA4,
    ),
    "gemma4-e2b": (
        "gemma4",
        {
            **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 70, "global_head_dim": 24},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {**_POOLED, "use_clipped_linears": True},
        {
            **_GEMMA4,
            "audio_config": {
                **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 20},
            },
        },
    ),
    "gemma4-moe": (
        "gemma4",
        {**tiny_hf.ALL["gemma4_text-experts"][1], "use_bidirectional_attention": "vision"},
        {**_POOLED, "standardize": True},
        _GEMMA4,
    ),
    "gemma4_unified": (
        "gemma4_unified",
        tiny_hf.ALL["gemma4_unified_text"][1],
        {
            **{"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 20, "mm_posemb_size": 8},
            "output_proj_dims": 20,
        },
        {**_GEMMA4, "audio_config": {"audio_embed_dim": 12}},
    ),
    "minimax_m3_vl-moe": (
        "minimax_m3_vl",
        tiny_hf.ALIKE["minimax_m3_vl_text"][1],
        {**_SIGLIP, "hidden_size": 24, "spatial_merge_size": 2},
        {"image_token_index": 65, "video_token_index": 66, "projector_hidden_size": 28},
    ),
    "mistral3-mistral4-moe": (
        "mistral3",
        {"model_type": "mistral4", **tiny_hf.ALL["mistral4"][1]},
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 65, "tie_word_embeddings": False},
    ),
    "qwen3_asr": (
        "qwen3_asr",
        {"model_type": "qwen3", "tie_word_embeddings": True},
        {},
        {
            "audio_config": {
                **{key: value for key, value in WHISPER.items() if key != "max_source_positions"},
                **{"output_dim": 32, "downsample_hidden_size": 4, "n_window_infer": 100},
            },
            "audio_token_id": 65,
        },
    ),
    "qwen2_audio": (
        "qwen2_audio",
        {"model_type": "qwen2", "head_dim": 8},
        {},
        {"audio_config": WHISPER, "audio_token_index": 65},
    ),
    "voxtral": (
        "voxtral",
        {"model_type": "llama", "head_dim": 8},
        {},
        {"audio_config": {**_LATER_WHISPER, "intermediate_size": 64}, "audio_token_id": 65},
    ),
    "audioflamingo3": (
        "audioflamingo3",
        {"model_type": "qwen2", "head_dim": 8},
        {},
        {"audio_config": _LATER_WHISPER, "audio_token_id": 65},
    ),
    "glmasr": (
        "glmasr",
        {"model_type": "llama", "head_dim": 8},
        {},
        {
            "audio_config": {
                **{key: value for key, value in _LATER_WHISPER.items() if key != "max_source_positions"},
                **{"intermediate_size": 64, "num_key_value_heads": 1},
            },
            "audio_token_id": 65,
        },
    ),
}


def described(case: str, **different: Any) -> dict[str, Any]:
    """Return ``config.json`` of ``case``, with ``different`` values in its text part."""
    model_type, text, vision, others = CASES[case]
    return {
        "model_type": model_type,
        "text_config": {**tiny_hf.SIZE, **text, **different},
        **({"vision_config": dict(vision)} if vision else {}),
        **{key: dict(value) if isinstance(value, dict) else value for key, value in others.items()},
    }


def model_of(case: str, **different: Any) -> Any:
    """The model of ``case`` in transformers; no weight is a constant."""
    config = transformers.AutoConfig.for_model(**described(case, **different))
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *tiny_hf.saved_buffers(model)]:
            if tensor.dim() < 2 or tensor.min() == tensor.max():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        bound_linears(model)
    return model


def bound_linears(model: Any) -> None:
    """Give each linear that clips finite bounds, which some values exceed."""
    for number, (name, bound) in enumerate(model.named_buffers()):
        if name.endswith(("put_min", "put_max")):
            bound.fill_((1 + number % 7 / 4) * (-1 if name.endswith("min") else 1))


def save(case: str, directory: Path, dtype: str = "float32", **different: Any) -> Path:
    """Writes the checkpoint of ``case`` to ``directory``."""
    return save_model(model_of(case, **different), directory, dtype)


def save_model(model: Any, directory: Path, dtype: str = "float32") -> Path:
    """Writes the checkpoint of ``model`` to ``directory``."""
    for tensor in [*model.parameters(), *tiny_hf.saved_buffers(model)]:  # not tables of complex numbers
        tensor.data = tensor.data.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory
