"""Table of LLaMA-Factory's arguments: each one is read, ignored with a reason, or raises an error.

`unsupported` raises the errors. To write the tables of the page, run
``python -m mca_train.clients.llama_factory_keys docs/reference/llama_factory_keys.md``. A test
compares the names with those of the installed LLaMA-Factory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal

from mca_config.reference import Tables, cell, update_files
from mca_config.training_checks import IGNORED, REFUSED
from mca_config.types import Typed

_HF = "remove it, or run LLaMA-Factory without USE_MCA"
_OPTIMIZER = "set optimizer (adam, sgd, muon)"
_REFERENCE = "remove it: the reference is the initial model"


@dataclass(frozen=True, kw_only=True)
class Key:
    """Handling of an argument.

    Args:
        use: ``read``, ``ignored``, or ``error``: a value raises one.
        note: Effect, reason, or remedy.
        harmless: Values that raise no error.
        raised_by: Origin of the error: mca, or LLaMA-Factory before it calls mca.
    """

    use: Literal["read", "ignored", "error"]
    note: str
    harmless: tuple[Typed, ...] = (None, False, "", [])
    raised_by: Literal["mca", "LLaMA-Factory"] = "mca"

    def rejects(self, value: Typed) -> bool:
        """Return True if mca raises an error for ``value``."""
        return self.use == "error" and self.raised_by == "mca" and value not in self.harmless


def _read(note: str, names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), Key(use="read", note=note))


def _ignored(note: str, names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), Key(use="ignored", note=note))


def _error(note: str, names: str, harmless: tuple[Typed, ...] = Key.harmless) -> dict[str, Key]:
    return dict.fromkeys(names.split(), Key(use="error", note=note, harmless=harmless))


def _client_error(note: str, names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), Key(use="error", note=note, raised_by="LLaMA-Factory"))


MODEL: Mapping[str, Key] = {
    **_read("weights by mca, tokenizer and processor by LLaMA-Factory", "model_name_or_path"),
    **_read("one adapter, which is trained further; several raise an error", "adapter_name_or_path"),
    **_read("tokenizer", "use_fast_tokenizer split_special_tokens"),
    **_read(
        "tokenizer; a token that it lacks turns resize_vocab on, which raises an error",
        "add_tokens add_special_tokens new_special_tokens_config",
    ),
    **_read("tokenizer, processor and dataset; mca runs no code of a model", "trust_remote_code"),
    **_read("tokenizer and dataset; set HF_TOKEN too, for the weights of a gated model", "hf_hub_token"),
    **_read("download by LLaMA-Factory, before mca reads the directory", "ms_hub_token om_hub_token"),
    **_read(
        "processor",
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen",
    ),
    **_ignored(
        "media of these families (Gemma 3, InternVL), and audio, raise an error",
        "image_do_pan_and_scan crop_to_patches use_audio_in_video audio_sampling_rate",
    ),
    **_ignored(
        "loading of a Hugging Face model, which mca does not build", "low_cpu_mem_usage offload_folder"
    ),
    **_ignored("choice of a kernel; set attention_backend", "flash_attn"),
    **_ignored(
        "memory only; mca recomputes nothing unless recompute_granularity is set",
        "disable_gradient_checkpointing use_reentrant_gc",
    ),
    **_ignored("log of a Hugging Face model", "print_param_status"),
    **_ignored("tokens that the model lacks raise an error", "init_special_tokens"),
    **_ignored("with quantization_bit only", "quantization_method quantization_type double_quantization"),
    **_ignored(
        "with use_kt only",
        "kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
        "kt_lora_expert_intermediate_size",
    ),
    **_ignored(
        "inference, which training does not do",
        "infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config "
        "sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend",
    ),
    **_ignored(
        "llamafactory-cli export only",
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
    ),
    **_error("set adapter_name_or_path to that folder", "adapter_folder"),
    **_error("set the variable HF_HUB_CACHE to that directory", "cache_dir"),
    **_error(
        "mca would load main; download that revision and set model_name_or_path to its directory",
        "model_revision",
        harmless=("main",),
    ),
    **_error(
        "add_tokens and add_special_tokens turn it on; resize the checkpoint first (mca-train sft does it at load)",
        "resize_vocab",
    ),
    **_error("set rope_scaling in the checkpoint's config.json", "rope_scaling"),
    **_error("set moe_aux_loss_coeff and moe_router_load_balancing_type: aux_loss", "moe_aux_loss_coef"),
    **_error(
        _HF,
        "shift_attn mixture_of_depths use_unsloth use_unsloth_gc enable_liger_kernel upcast_layernorm "
        "upcast_lmhead_output train_from_scratch use_v1_kernels quantization_bit use_kt",
    ),
    **_client_error("training has one backend", "infer_backend quantization_device_map"),
}

DATA: Mapping[str, Key] = {
    **_read(
        "by LLaMA-Factory, which makes the samples",
        "template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history mix_strategy "
        "interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples val_size "
        "tool_format default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system",
    ),
    **_read(
        "LLaMA-Factory keeps cutoff_len + 1 tokens of a sample, which are cutoff_len targets", "cutoff_len"
    ),
    **_read("order of the samples, by LLaMA-Factory", "streaming buffer_size"),
    **_read("a loss for each dataset, eval_NAME_loss", "eval_on_each_dataset"),
    **_read("in pt; in sft only with neat_packing, else it raises an error", "packing"),
    **_read("packs of separate sequences; with streaming it raises an error", "neat_packing"),
    **_ignored("generation, which training does not do", "eval_num_beams"),
    **_error("padding is never a target; remove it", "ignore_pad_token_for_loss", harmless=(True,)),
}

FINETUNING: Mapping[str, Key] = {
    **_read("sft, pt and dpo; rm, ppo and kto raise an error", "stage"),
    **_read("full and lora; freeze and oft raise an error", "finetuning_type"),
    **_read("adapter", "lora_rank lora_alpha lora_dropout lora_target use_rslora additional_target"),
    **_read("with adapter_name_or_path it raises an error", "create_new_adapter"),
    **_read("loss of dpo", "pref_beta pref_ftx dpo_label_smoothing simpo_gamma"),
    **_read("loss of dpo; kto_pair raises an error", "pref_loss"),
    **_read(
        "trained parts of a model with images",
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
    ),
    **_read("train_sampling_strategy: sequential", "disable_shuffling"),
    **_read("callback of transformers", "early_stopping_steps"),
    **_read("loss.png, by LLaMA-Factory", "plot_loss"),
    **_read(
        "callback of LLaMA-Factory",
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
        "swanlab_lark_webhook_url swanlab_lark_secret",
    ),
    **_read(
        "in dpo; LLaMA-Factory's workflows of sft and pt do not log it", "include_effective_tokens_per_second"
    ),
    **_ignored("LLaMA-Factory overwrites it with that of the variable USE_MCA", "use_mca"),
    **_ignored("with use_hyper_parallel only", "hyper_parallel_args"),
    **_ignored(
        "with finetuning_type freeze only",
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
    ),
    **_ignored("with finetuning_type oft only", "module_dropout oft_rank oft_block_size oft_target"),
    **_ignored("with loraplus_lr_ratio only", "loraplus_lr_embedding"),
    **_ignored("with pissa_init only", "pissa_iter"),
    **_ignored("with use_asft_loss or use_eaft_loss only", "asft_alpha eaft_alpha"),
    **_ignored("with ref_model only", "ref_model_quantization_bit"),
    **_ignored("stages ppo and kto only", "kto_chosen_weight kto_rejected_weight"),
    **_ignored(
        "stage ppo only",
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters "
        "reward_model_quantization_bit reward_model_type",
    ),
    **_ignored(
        "with use_galore only",
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise",
    ),
    **_ignored(
        "with use_apollo only",
        "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
        "apollo_scale_type apollo_layerwise apollo_scale_front",
    ),
    **_ignored(
        "with use_badam only",
        "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode "
        "badam_verbose",
    ),
    **_error(_OPTIMIZER, "use_galore use_apollo use_badam use_adam_mini use_muon"),
    **_error(
        _HF,
        "use_dft_loss use_asft_loss use_eaft_loss use_llama_pro loraplus_lr_ratio pissa_init pissa_convert "
        "pref_bco_weight ld_alpha compute_accuracy",
    ),
    **_error(_REFERENCE, "ref_model ref_model_adapters"),
    **_error("set bf16: true", "pure_bf16"),
    **_error("mca has no DoRA; set it to false", "use_dora"),
    **_client_error("its trainer would ignore mca; remove it, or unset USE_MCA", "use_hyper_parallel"),
}

GENERATING: Mapping[str, Key] = _ignored(
    "generation, which training does not do",
    "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty "
    "skip_special_tokens",
)

_LIKE_HF = (
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps "
    "max_grad_norm label_smoothing_factor bf16 fp16 tf32 logging_strategy logging_steps logging_first_step "
    "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project "
    "trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay "
    "per_device_eval_batch_size eval_on_start save_only_model save_strategy save_steps save_total_limit "
    "load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip "
    "restore_callback_states_from_checkpoint seed data_seed use_cpu dataloader_drop_last dataloader_num_workers "
    "dataloader_pin_memory dataloader_prefetch_factor ddp_timeout resume_from_checkpoint"
)

_LATER = ("activation_checkpointing_kwargs", "dataloader_multiprocessing_context", "warmup_ratio")
"""Arguments of later versions of transformers, and one that the facade reads."""

TRAINING: Mapping[str, Key] = {
    **_read("as in Hugging Face", _LIKE_HF),
    **_read("timeout of collective operations in minutes; ddp_timeout", "distributed_timeout_minutes"),
    **_read("warmup_steps below 1", "warmup_ratio"),
    **_read("adamw_torch, adamw_torch_fused and sgd; others raise an error", "optim"),
    **_read("random and sequential; others raise an error", "train_sampling_strategy"),
    **_read("recompute_granularity: full", "gradient_checkpointing"),
    **_read("deterministic_mode too", "full_determinism"),
    **_read("false raises an error in sft and dpo", "do_train"),
    **_read("without eval_strategy it raises an error", "do_eval"),
    **_read("the default values; others raise an error", "accelerator_config ddp_backend"),
    **_read("true; false raises an error", "average_tokens_across_devices skip_memory_metrics"),
    **{name: Key(use="ignored", note=note) for name, note in IGNORED.items() if name not in _LATER},
    **{name: Key(use="error", note=note) for name, note in REFUSED.items() if name not in _LATER},
}
"""Arguments of Hugging Face in transformers 5.6, and that of the facade."""

MEGATRON: Mapping[str, Key] = {
    **_read("LLaMA-Factory joins it with neat_packing", "sequence_packing"),
    **_error(
        "set freeze_vision_tower, freeze_multi_modal_projector, freeze_language_model",
        "freeze",
        harmless=(None,),
    ),
}
"""Exceptions among the arguments of mca, which are read."""

OUTSIDE: Mapping[str, Key] = _client_error(
    "not a key with USE_MCA",
    "predict_with_generate generation_max_length generation_num_beams generation_config sortish_sampler "
    "ray_num_workers ray_init_kwargs master_addr master_port enable_torch_profiler profiler_output_dir "
    "profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes "
    "profiler_profile_memory profiler_with_stack profile_modules fp8_backend fp8_enable_fsdp_float8_all_gather",
)
"""Training arguments of LLaMA-Factory that its parser does not have with ``USE_MCA``."""

GROUPS: Mapping[str, Mapping[str, Key]] = {
    "ModelArguments": MODEL,
    "DataArguments": DATA,
    "FinetuningArguments": FINETUNING,
    "GeneratingArguments": GENERATING,
    "TrainingArguments": TRAINING,
    "MegatronArguments": MEGATRON,
    "other TrainingArguments": OUTSIDE,
}
"""Handling by argument, by the class that declares it; other arguments of mca are read."""


def _table(keys: Mapping[str, Key]) -> str:
    """Return the table of ``keys``; arguments with the same handling share a row."""
    lines = ["| arguments | handling | effect, reason or remedy |", "|---|---|---|"]
    for key, names in groupby(keys, key=keys.__getitem__):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {key.use} | {cell(key.note)} |")
    return "\n".join(lines)


TABLES: Tables = {f"LLaMA-Factory {name}": partial(_table, keys) for name, keys in GROUPS.items()}


if __name__ == "__main__":
    update_files(TABLES)
