"""Tiny complete checkpoints of Qwen's omni models: a thinker, a talker and a vocoder."""

import copy
from pathlib import Path
from typing import Any

import tiny_vision
import torch
import transformers

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_SIZE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _ROPE},
}
_DIT: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "num_embeds": 32},
    **{"emb_dim": 8, "mel_dim": 8, "enc_emb_dim": 8, "enc_dim": 8, "enc_channels": [8, 8, 8, 8, 16]},
    **{"enc_attention_channels": 4, "enc_res2net_scale": 2, "enc_se_channels": 4},
}
_BIGVGAN: dict[str, Any] = {
    **{"mel_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [2], "upsample_kernel_sizes": [4]},
    **{"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]},
}
_CODE2WAV: dict[str, Any] = {
    **{"codebook_size": 16, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 16, "num_hidden_layers": 1, "num_quantizers": 2, "upsample_rates": [2, 2]},
    **{"upsampling_ratios": [2, 2], "decoder_dim": 16},
}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
WHOLE: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {
        "talker_config": {
            **{**_SIZE, "embedding_size": 64},
            "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        },
        "token2wav_config": {"dit_config": _DIT, "bigvgan_config": _BIGVGAN},
    },
    "qwen3_omni_moe": {
        "talker_config": {
            "text_config": {
                **{**_SIZE, **_EXPERTS, "shared_expert_intermediate_size": 8, "num_hidden_layers": 2},
                "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]},
            },
            "code_predictor_config": {**_SIZE, "num_code_groups": 4},
            **{
                "num_code_groups": 4,
                "thinker_hidden_size": 32,
                "accept_hidden_layer": 2,
                "spatial_merge_size": 2,
            },
        },
        "code2wav_config": _CODE2WAV,
    },
}
"""By ``model_type``: the configurations next to that of the thinker."""
SPEAKERS = "spk_dict.pt"


def described(kind: str) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    thinker = tiny_vision.described(f"{kind}_thinker")
    return {"model_type": kind, "thinker_config": thinker, **copy.deepcopy(WHOLE[kind])}


def save_whole(kind: str, directory: Path, dtype: str = "float32") -> Path:
    """Write a complete checkpoint as transformers does, with the voices of its talker."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**described(kind))
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # transformers leaves those of the talker as they are in memory
            parameter.data.normal_(std=0.02)
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    torch.save({"Chelsie": {"bos_token": 1}}, directory / SPEAKERS)
    return directory
