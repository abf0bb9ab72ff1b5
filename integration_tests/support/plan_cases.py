"""The runs on which the arithmetic plan is compared with the dry run: models, and what is changed of a plain run."""

from typing import Any

from dry_run_cases import be_no_rank

Values = dict[str, Any]
_BASE: Values = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_EXPERTS: Values = {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
_LATENT: Values = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.5,
    "num_key_value_heads": 16,
    "moe_layer_freq": 1,
}
_SECTIONS: Values = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, Values] = {
    "dense": _BASE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False},
    "equal": _BASE
    | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 16}
    | {"use_sliding_window": False},
    "tied": _BASE
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "experts": _BASE
    | _EXPERTS
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": _BASE
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "latent": _BASE | _LATENT,
    "prediction": _BASE | _LATENT | {"num_nextn_predict_layers": 1},
    "layer norms": _BASE
    | {"model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "use_bias": True}
    | {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "sliding_window": None}
    | {"embedding_dropout": 0.0, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "windows": _BASE
    | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 512, "attention_dropout": 0.0}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "swiglu_limit": 7.0},
    "capped": _BASE
    | {"model_type": "vaultgemma", "architectures": ["VaultGemmaForCausalLM"], "sliding_window": 512}
    | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {"hidden_activation": "gelu_pytorch_tanh", "attention_dropout": 0.0, "tie_word_embeddings": True}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "dropped": _BASE
    | {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "attention_bias": True}
    | {"attention_out_bias": False, "attention_dropout": 0.1, "residual_dropout": 0.1, "mlp_bias": False},
    "delta net": _BASE
    | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 64}
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 64}
    | {"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}
    | {"layer_types": (["linear_attention"] * 3 + ["full_attention"])},
    "state space": _BASE
    | {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_act": None}
    | {"mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 64}
    | {"hybrid_override_pattern": "MM*-"},
    "other states": _BASE
    | {"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 2048}
    | {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
    | {"mlp_multipliers": [0.9, 0.6], "ssm_multipliers": [0.4, 0.3, 0.4, 0.5, 0.4]},
    "images": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 31990,
        "video_token_id": 31991,
        "vision_start_token_id": 31992,
        "vision_end_token_id": 31993,
        "tie_word_embeddings": False,
        "text_config": _BASE
        | {"model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS | {"mrope_section": [12, 10, 10]}},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 12,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_heads": 8,
            "patch_size": 16,
            "out_hidden_size": 1024,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [1],
        },
    },
}
_TOWER: Values = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "patch_size": 14,
}
MODELS |= {
    "tiles": {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": 31990,
        "image_seq_length": 256,
        "tie_word_embeddings": False,
        "text_config": _BASE | {"model_type": "qwen2", "use_sliding_window": False},
        "vision_config": _TOWER
        | {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]},
    },
    "sized": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 31990,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "text_config": _BASE | {"model_type": "mistral", "sliding_window": None},
        "vision_config": _TOWER | {"model_type": "pixtral", "head_dim": 64, "image_size": 1540},
    },
    "both ways": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": 31990,
        "mm_tokens_per_image": 256,
        "text_config": _BASE
        | {"model_type": "gemma3_text", "sliding_window": 512, "query_pre_attn_scalar": 64}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": _TOWER | {"model_type": "siglip_vision_model", "image_size": 896},
    },
    "inner layer": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 31990,
        "tie_word_embeddings": False,
        "text_config": _BASE | {"model_type": "llama"},
        "vision_config": _TOWER | {"model_type": "clip_vision_model", "image_size": 336},
    },
}
MODELS["tile rows"] = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "image_token_index": 31990,
    "text_config": _BASE
    | {"model_type": "llama4_text", "num_local_experts": 8, "intermediate_size_mlp": 2816, "head_dim": 64}
    | {"interleave_moe_layer_step": 2, "attention_chunk_size": 512},
    "vision_config": _TOWER
    | {"model_type": "llama4_vision_model", "image_size": 336, "projector_input_dim": 1024}
    | {"projector_output_dim": 1024, "vision_output_dim": 1024},
}
MODELS["padded patches"] = {
    "model_type": "kimi_k25",
    "architectures": ["Kimi_K25ForConditionalGeneration"],
    "image_token_id": 31990,
    "projection_hidden_size": 512,
    "tie_word_embeddings": False,
    "text_config": _BASE | _LATENT,
    "vision_config": _TOWER | {"model_type": "kimi_k25_vision"},
}
MODELS["thinker"] = {
    "model_type": "qwen2_5_omni_thinker",
    "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
    "image_token_index": 31990,
    "video_token_index": 31991,
    "audio_token_index": 31992,
    "tie_word_embeddings": False,
    "text_config": _BASE
    | {"model_type": "qwen2_5_omni_text", "rope_parameters": _SECTIONS | {"mrope_section": [12, 10, 10]}},
    "vision_config": {
        **{"model_type": "qwen2_5_omni_vision_encoder", "depth": 12, "hidden_size": 512, "num_heads": 8},
        **{"intermediate_size": 2048, "out_hidden_size": 1024, "fullatt_block_indexes": [3, 7, 11]},
    },
    "audio_config": {
        **{"model_type": "qwen2_5_omni_audio_encoder", "d_model": 512, "encoder_layers": 4},
        **{"encoder_attention_heads": 8, "encoder_ffn_dim": 2048, "output_dim": 1024},
    },
}
_HEARS: Values = {
    **{"d_model": 512, "encoder_layers": 12, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
}
MODELS["clips"] = {
    "model_type": "qwen2_audio",
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_token_index": 31990,
    "text_config": _BASE | {"model_type": "qwen2", "use_sliding_window": False},
    "audio_config": _HEARS | {"model_type": "qwen2_audio_encoder"},
}
MODELS["strided clips"] = {
    "model_type": "qwen3_asr",
    "architectures": ["Qwen3ASRForConditionalGeneration"],
    "audio_token_id": 31990,
    "tie_word_embeddings": False,
    "text_config": _BASE | {"model_type": "qwen3"},
    "audio_config": _HEARS | {"model_type": "qwen3_asr_encoder", "output_dim": 1024},
}
MODELS["grouped heads"] = {
    "model_type": "exaone4_5",
    "architectures": ["Exaone4_5_ForConditionalGeneration"],
    "image_token_id": 31990,
    "video_token_id": 31991,
    "tie_word_embeddings": False,
    "text_config": _BASE | {"model_type": "exaone4", "sliding_window": None},
    "vision_config": {
        **{"model_type": "exaone4_5_vision", "depth": 12, "hidden_size": 512, "num_heads": 8},
        **{"intermediate_size": 2048, "out_hidden_size": 1024, "fullatt_block_indexes": [3, 7, 11]},
        "num_key_value_heads": 2,
    },
}
MODELS["aligner"] = {
    "model_type": "deepseek_vl",
    "architectures": ["DeepseekVLForConditionalGeneration"],
    "image_token_id": 31990,
    "tie_word_embeddings": False,
    "text_config": _BASE | {"model_type": "llama"},
    "vision_config": _TOWER
    | {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16, "vision_use_head": False},
}
MODELS["pooled"] = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "image_token_id": 31990,
    "video_token_id": 31991,
    "audio_token_id": 31992,
    "text_config": _BASE
    | {"model_type": "gemma4_text", "sliding_window": 512, "hidden_size_per_layer_input": 0}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_bidirectional_attention": "vision"},
    "vision_config": _TOWER
    | {"model_type": "gemma4_vision", "num_key_value_heads": 8, "head_dim": 64, "patch_size": 16}
    | {"standardize": True},
}
TP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
FULL: Values = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
BLOCK = FULL | {"recompute_method": "block"}
MODULES: Values = {"recompute_granularity": "selective"}
SPLIT: Values = {"use_distributed_optimizer": True}
SP: Values = {TP: 2, "sequence_parallel": True}
LORA: Values = {"lora_rank": 8}
FP32: Values = {"bf16": False}
CASES: dict[str, tuple[str, str, int, Values]] = {
    "state space": ("state space", "sft", 8, {}),
    "other states": ("other states", "sft", 8, {}),
    "state space sp": ("state space", "sft", 8, SP | FP32),
    "plain": ("dense", "sft", 8, {}),
    "whole optimizer": ("dense", "sft", 8, {"use_distributed_optimizer": False}),
    "half gradients": (
        "dense",
        "sft",
        8,
        FULL | {"use_distributed_optimizer": False, "accumulate_allreduce_grads_in_fp32": False},
    ),
    "fp32": ("dense", "sft", 8, FP32),
    "fp32 pp": ("dense", "pretrain", 8, FP32 | {PP: 2}),
    "fp32 full": ("dense", "sft", 8, FP32 | FULL),
    "two sequences": ("dense", "sft", 8, {"per_device_train_batch_size": 2}),
    "short": ("dense", "sft", 8, {"seq_length": 512}),
    "long": ("dense", "sft", 8, {"seq_length": 8192}),
    "packed": ("dense", "sft", 8, {"sequence_packing": True}),
    "chunked": ("dense", "sft", 8, {"loss_chunk_size": 256}),
    "chunked whole": ("dense", "sft", 8, {"loss_chunk_size": 8192}),
    "chunked tp": ("dense", "sft", 8, {"loss_chunk_size": 512} | SP),
    "tp": ("dense", "sft", 8, {TP: 2}),
    "tp 4": ("dense", "sft", 8, {TP: 4}),
    "sp": ("dense", "sft", 8, SP),
    "sp pp": ("dense", "pretrain", 8, SP | {PP: 2}),
    "pp": ("dense", "pretrain", 8, {PP: 2}),
    "pp 4": ("dense", "pretrain", 8, {PP: 4, "gradient_accumulation_steps": 8}),
    "few micro-batches": ("dense", "pretrain", 8, {PP: 4, "gradient_accumulation_steps": 2}),
    "vpp": ("dense", "pretrain", 8, {PP: 2, VPP: 2}),
    "vpp sp": ("dense", "pretrain", 8, SP | {PP: 2, VPP: 2}),
    "vpp full": ("dense", "pretrain", 8, FULL | {PP: 2, VPP: 2}),
    "uneven": ("dense", "pretrain", 8, {PP: 2, "num_layers_in_first_pipeline_stage": 1}),
    "cp": ("dense", "sft", 8, {CP: 2}),
    "cp 4": ("dense", "sft", 8, {CP: 4}),
    "cp pp": ("dense", "pretrain", 8, {CP: 2, PP: 2}),
    "cp packed": ("dense", "sft", 8, {CP: 2, "sequence_packing": True}),
    "full": ("dense", "sft", 8, FULL),
    "full pp": ("dense", "pretrain", 8, FULL | {PP: 2}),
    "full by two": ("dense", "pretrain", 8, FULL | {PP: 2, "recompute_num_layers": 2}),
    "block": ("dense", "sft", 8, BLOCK | {"recompute_num_layers": 2}),
    "block pp": ("dense", "pretrain", 8, BLOCK | {PP: 2}),
    "selective": ("dense", "sft", 8, MODULES),
    "selective pp": ("dense", "pretrain", 8, MODULES | {PP: 2}),
    "mlp again": ("dense", "sft", 8, MODULES | {"recompute_modules": ["mlp"]}),
    "both again": ("dense", "pretrain", 8, MODULES | {PP: 2, "recompute_modules": ["core_attn", "mlp"]}),
    "lora": ("dense", "sft", 8, LORA),
    "lora pp": ("dense", "sft", 8, LORA | {PP: 2}),
    "lora full": ("dense", "sft", 8, LORA | FULL),
    "lora sp": ("dense", "sft", 8, LORA | SP),
    "dpo": ("dense", "dpo", 8, {}),
    "dpo pp": ("dense", "dpo", 8, {PP: 2}),
    "dpo lora": ("dense", "dpo", 8, LORA),
    "orpo": ("dense", "dpo", 8, {"dpo_loss": "orpo"}),
    "equal heads": ("equal", "sft", 8, {}),
    "equal heads pp": ("equal", "pretrain", 8, {PP: 2}),
    "equal heads selective": ("equal", "sft", 8, MODULES),
    "tied": ("tied", "sft", 8, {}),
    "tied pp": ("tied", "pretrain", 8, {PP: 2}),
    "tied vpp": ("tied", "pretrain", 8, {PP: 2, VPP: 2}),
    "experts": ("experts", "sft", 8, {}),
    "experts ep": ("experts", "sft", 8, {EP: 4}),
    "experts ep pp": ("experts", "pretrain", 8, {EP: 4, PP: 2}),
    "experts vpp": ("experts", "pretrain", 8, {EP: 2, PP: 2, VPP: 2}),
    "experts tp": ("experts", "pretrain", 8, {EP: 2, TP: 2}),
    "experts etp 1": ("experts", "pretrain", 8, {EP: 4, TP: 2, ETP: 1}),
    "experts full": ("experts", "sft", 8, {EP: 4} | FULL),
    "experts again": ("experts", "pretrain", 8, {EP: 4, PP: 2, "recompute_modules": ["moe"]} | MODULES),
    "experts lora": ("experts", "sft", 8, {EP: 4} | LORA),
    "experts cp": ("experts", "sft", 8, {EP: 4, CP: 2}),
    "mixtral ep": ("mixtral", "sft", 8, {EP: 2}),
    "mixtral pp": ("mixtral", "pretrain", 8, {EP: 2, PP: 2}),
    "latent": ("latent", "sft", 8, {EP: 4}),
    "latent pp": ("latent", "pretrain", 8, {EP: 4, PP: 2}),
    "latent tp": ("latent", "pretrain", 8, {EP: 2, TP: 2}),
    "latent full": ("latent", "sft", 8, {EP: 4} | FULL),
    "prediction": ("prediction", "sft", 8, {EP: 4}),
    "prediction pp": ("prediction", "pretrain", 8, {EP: 4, PP: 2}),
    "latent experts again": ("latent", "sft", 8, MODULES | {EP: 4, "recompute_modules": ["moe"]}),
    "experts padded": (
        "experts",
        "sft",
        8,
        {EP: 4, "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    ),
    "norms again": ("dense", "sft", 8, MODULES | {"recompute_modules": ["layernorm"]}),
    "norms again pp": (
        "experts",
        "pretrain",
        8,
        MODULES | {PP: 2, EP: 4, "recompute_modules": ["layernorm"]},
    ),
    "latent again": ("latent", "sft", 8, MODULES | {EP: 4, "recompute_modules": ["mla_up_proj"]}),
    "layer norms": ("layer norms", "sft", 8, {}),
    "windows": ("windows", "sft", 8, {EP: 4}),
    "capped": ("capped", "sft", 8, {}),
    "dropped": ("dropped", "sft", 8, {}),
    "delta net": ("delta net", "sft", 8, {}),
    "images": ("images", "sft", 8, {"freeze": []}),
    "images frozen": ("images", "sft", 8, {PP: 2}),
    "tiles": ("tiles", "sft", 8, {"freeze": []}),
    "tiles frozen": ("tiles", "sft", 8, {PP: 2}),
    "sized": ("sized", "sft", 8, {"freeze": []}),
    "sized frozen": ("sized", "sft", 8, {}),
    "both ways": ("both ways", "sft", 8, {"freeze": []}),
    "inner layer": ("inner layer", "sft", 8, {"freeze": []}),
    "tile rows": ("tile rows", "sft", 8, {"freeze": [], EP: 4}),
    "tile rows frozen": ("tile rows", "sft", 8, {PP: 2, EP: 4}),
    "padded patches": ("padded patches", "sft", 8, {"freeze": [], EP: 4}),
    "thinker": ("thinker", "sft", 8, {"freeze": []}),
    "thinker frozen": ("thinker", "sft", 8, {PP: 2}),
    "clips": ("clips", "sft", 8, {"freeze": []}),
    "clips frozen": ("clips", "sft", 8, {PP: 2}),
    "clips tp": ("clips", "sft", 8, SP | {"freeze": ["language"]}),
    "strided clips": ("strided clips", "sft", 8, {"freeze": []}),
    "strided clips frozen": ("strided clips", "sft", 8, {PP: 2}),
    "thinker hears": ("thinker", "sft", 8, {"freeze": ["vision"]}),
    "grouped heads": ("grouped heads", "sft", 8, {"freeze": []}),
    "grouped heads frozen": ("grouped heads", "sft", 8, {PP: 2}),
    "aligner": ("aligner", "sft", 8, {"freeze": []}),
    "aligner frozen": ("aligner", "sft", 8, {PP: 2}),
    "pooled": ("pooled", "sft", 8, {"freeze": []}),
    "pooled frozen": ("pooled", "sft", 8, {PP: 2}),
    "inner layer frozen": ("inner layer", "sft", 8, {PP: 2}),
    "both ways frozen": ("both ways", "sft", 8, {PP: 2}),
    "prediction full": ("prediction", "sft", 8, {EP: 4} | FULL),
    "prediction apart": ("prediction", "pretrain", 3, {PP: 3, "pipeline_model_parallel_layout": "Ett|ttm|L"}),
}
SAMPLE = ("vpp sp", "chunked tp", "experts etp 1", "prediction", "windows", "images")


def values_of(name: str, folder: str) -> Values:
    """The configuration of a case whose model's ``config.json`` is in ``folder``."""
    return {
        "model_name_or_path": folder,
        "output_dir": f"{folder}/out",
        "seq_length": 2048,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_steps": 2,
        "bf16": True,
        **SPLIT,
        **CASES[name][3],
    }


WITHIN, OF_SAMPLE = 0.10, 0.05


def checked(name: str, folder: str) -> Any:
    """The checked run of a case."""
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    _, kind, world_size, _ = CASES[name]
    be_no_rank()
    settings = make_settings(TASKS[kind], values_of(name, folder), "test")
    findings = check(TASKS[kind], settings, lambda *_: world_size)
    assert not findings.impossible
    return findings.run


def plan_and_dry_run(name: str, folder: str, stage: int) -> tuple[int, list[int]]:
    """Bytes that the dry run finds on a stage, and those that the plan says of all; runs in a process of its own."""
    from mca_train.dry_run.stages import count_micro_batches
    from mca_train.dry_run.step import measure_step
    from mca_train.plan.memory import plan_layout
    from mca_train.run.plan_input import make_plan_input, planned_media

    run = checked(name, folder)
    args, media = run.settings.training, planned_media(run)
    subject = make_plan_input(run, "local", media=media)
    plan = plan_layout(subject, args, run.layout, run.world_size)
    count = count_micro_batches(args.gradient_accumulation_steps, run.layout, stage)
    rank = run.world_size // run.layout.pp * stage
    found = measure_step(run.task, run.settings, run.model, rank, run.world_size, count, media)
    return found.peak, [needs.total for needs in plan.stages]
