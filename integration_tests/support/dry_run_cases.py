"""Small models, settings and checked runs for steps without memory."""

import os
from pathlib import Path
from typing import Any

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
LATENT = EXPERTS | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
IMAGES = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
    "tie_word_embeddings": False,
    "text_config": DENSE
    | {
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}
MODELS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "unnormalised": EXPERTS | {"norm_topk_prob": False},
    "latent": LATENT,
    "images": IMAGES,
}
TP, PP, VPP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
SPLIT = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LORA = {"lora_rank": 4, "lora_target_modules": ["q_proj", "down_proj"]}


def be_no_rank() -> None:
    """Hide from a process of the harness that it is a rank, as in ``mca-train plan``."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(variable, None)


def prepared(folder: Path, kind: str, changes: dict[str, Any], world_size: int) -> Any:
    """The checked run."""
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    values = {
        "model_name_or_path": str(folder),
        "output_dir": str(folder / "out"),
        "seq_length": 128,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 2,
        **changes,
    }
    findings = check(TASKS[kind], make_settings(TASKS[kind], values, "test"), lambda *_: world_size)
    assert not findings.impossible, findings.impossible
    return findings.run
