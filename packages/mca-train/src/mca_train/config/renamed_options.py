"""`RENAMED`: messages about keys of LLaMA-Factory, TRL, `transformers` and Megatron-LM with another name in mca.

Keys are not translated; the message names the key to set instead.
"""

from collections.abc import Mapping

_SET = {
    "seq_length": "cutoff_len max_seq_length max_seq_len max_length block_size seq_len encoder_seq_length",
    "train_file": "train_data_path data_path train_files",
    "eval_file": "eval_dataset validation_file valid_data_path",
    "text_column": "dataset_text_field",
    "sequence_packing": "packing neat_packing",
    "max_train_samples": "max_samples",
    "preprocessing_num_workers": "dataset_num_proc",
    "tokenized_cache": "tokenized_path",
    "lora_rank": "lora_r",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "additional_target modules_to_save",
    "adapter_name_or_path": "adapter_path",
    "dpo_beta": "pref_beta",
    "dpo_loss": "pref_loss",
    "dpo_label_smoothing": "label_smoothing",
    "rpo_alpha": "pref_ftx",
    "desirable_weight": "kto_chosen_weight",
    "undesirable_weight": "kto_rejected_weight",
    "reference_model_name_or_path": "ref_model ref_model_name_or_path",
    "model_name_or_path": "model model_path model_name pretrained_model_name_or_path",
    "tokenizer_name_or_path": "tokenizer tokenizer_name tokenizer_path tokenizer_model",
    "attention_backend": "attn_implementation flash_attn use_flash_attn use_flash_attention_2",
    "per_device_train_batch_size": "micro_batch_size batch_size train_batch_size mbs",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps accumulate_grad_batches",
    "max_steps": "train_iters total_steps",
    "num_train_epochs": "epochs num_epochs",
    "learning_rate": "lr",
    "max_grad_norm": "clip_grad",
    "lr_scheduler_type": "lr_decay_style",
    "warmup_steps": "lr_warmup_iters num_warmup_steps",
    "output_dir": "save save_path",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "logging_steps": "log_interval",
    "resume_from_checkpoint": "resume",
    "tensor_model_parallel_size": "tp tp_size",
    "pipeline_model_parallel_size": "pp pp_size",
    "virtual_pipeline_model_parallel_size": "vpp vpp_size",
    "context_parallel_size": "cp cp_size",
    "expert_model_parallel_size": "ep ep_size",
    "use_audio_in_video": "load_audio_from_video",
    "nproc_per_node": "local_ranks num_processes",
}
_DATASET = "set train_file for a file, or datasets: [{path: org/name}] for a dataset of the Hub"
_DTYPE = (
    "the dtype of config.json is trained unless bf16 or fp16 is true; set one of the two, or write the model in "
    "another dtype first (mca-convert --fp32)"
)
_QUANTISED = (
    "quantized weights cannot be trained; for less memory use lora_rank, more ranks, or optimizer_cpu_offload"
)
_TARGETS = "the answers of conversations are the targets, in mca-train pretrain every token; remove the key"
_MIXED = "in proportion to weights: set weight in the entries of datasets"
_PIXELS = "images have the sizes that the model's preprocessor_config.json allows; change them there"
_LENGTHS = "prompt and answer together have at most seq_length tokens; set that instead"
_PARTS = "set freeze to a list of the parts that are not trained: vision, audio, projector, language"
_ANOTHER_WAY = {
    "stage": "the kind of run is the word after mca-train, and mca-train --help lists the kinds; remove the key",
    "finetuning_type": "full fine-tuning is the default; set lora_rank for an adapter, or remove the key",
    "use_peft": "full fine-tuning is the default; set lora_rank for an adapter, or remove the key",
    "template": "the tokenizer's chat template renders conversations; remove the key",
    "trust_remote_code": "no code of a checkpoint is executed; remove the key",
    "val_size": "name a file for evaluation: eval_file",
    **dict.fromkeys(("dataset", "dataset_name", "dataset_path"), _DATASET),
    "dataset_dir": "train_file has full paths; remove the key",
    **dict.fromkeys(("torch_dtype", "dtype", "model_dtype"), _DTYPE),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit"), _QUANTISED),
    "mask_history": "every answer of a conversation is a target; for the last one alone give rows with prompt and "
    "completion",
    **dict.fromkeys(("train_on_prompt", "assistant_only_loss", "completion_only_loss"), _TARGETS),
    **dict.fromkeys(("mix_strategy", "interleave_probs"), _MIXED),
    **dict.fromkeys(("image_max_pixels", "image_min_pixels"), _PIXELS),
    **dict.fromkeys(("max_prompt_length", "max_completion_length"), _LENGTHS),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), _PARTS),
    "padding_free": "packs have no padding between their samples: set sequence_packing to true",
    "plot_loss": "loss.png is drawn at the end of every run where matplotlib is installed; remove the key",
    "enable_liger_kernel": "the model's layers are Megatron's; remove the key",
    "beta": "each job has its own: set dpo_beta or kto_beta instead",
    "loss_type": "set dpo_loss instead; kto has one loss, there remove the key",
    "warmup_ratio": "set warmup_steps: below 1 it is a fraction of the run",
    "num_layers_per_virtual_pipeline_stage": "set virtual_pipeline_model_parallel_size: "
    "num_layers / (pp x that number)",
    "recompute_activations": "set recompute_granularity: selective",
    "make_vocab_size_divisible_by": "vocabularies of any size are padded for the layout; remove the key",
    "load": "to start from its weights set model_name_or_path, to continue a run of mca set resume_from_checkpoint",
    "global_batch_size": "a step takes per_device_train_batch_size x gradient_accumulation_steps x data-parallel size "
    "samples; set gradient_accumulation_steps instead",
}

RENAMED: Mapping[str, str] = {
    **{
        other: f"is called {name} here; set that instead"
        for name, words in _SET.items()
        for other in words.split()
    },
    **_ANOTHER_WAY,
}
"""Message about each key."""
