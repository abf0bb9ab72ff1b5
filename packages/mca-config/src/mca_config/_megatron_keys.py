"""Field names of megatron-core's ``TransformerConfig`` and ``MLATransformerConfig``, by version.

The lists hold only fields that a JSON value can set: no callables, dtypes or other objects. A test
compares the lists with the installed megatron-core and prints the lines to write here when they differ.
"""

COMMON = frozenset(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func_clamp_value
    activation_func_fp8_input_store add_bias_linear add_qkv_bias apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm apply_rope_fusion attention_backend attention_dropout
    attention_output_gate attention_softmax_in_fp32 barrier_with_L1_time batch_invariant_mode batch_p2p_comm
    batch_p2p_sync beta_fast beta_slow bf16 bias_activation_fusion bias_dropout_fusion cache_mla_latents
    calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir context_parallel_size
    cp_comm_type cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
    cpu_offloading_num_layers cpu_offloading_weights cross_entropy_fusion_impl cross_entropy_loss_fusion
    cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
    cuda_graph_warmup_steps deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute
    deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
    distribute_saved_activations dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads
    dsa_indexer_topk dsa_indexer_use_sparse_loss embedding_init_method_std enable_autocast enable_cuda_graph
    ep_overlap_early_attn_memory_release experimental_attention_variant expert_model_parallel_size
    expert_tensor_parallel_size external_cuda_graph ffn_hidden_size fine_grained_activation_offloading
    first_last_layers_bf16 flash_decode fp16 fp32_residual_connection fp4 fp4_param fp4_quantizer_factory
    fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval
    fp8_margin fp8_multi_head_attention fp8_param fp8_quantizer_factory fp8_recipe fp8_wgrad
    fused_single_qkv_rope gated_linear_unit glu_linear_offset gradient_accumulation_fusion
    hetereogenous_dist_checkpoint heterogeneous_block_specs hidden_dropout hidden_size
    hierarchical_context_parallel_sizes hybrid_context_parallel inference_fuse_tp_communication
    inference_rng_tracker inference_sampling_seed init_method_std init_model_with_meta_device
    is_hybrid_model kitchen_attention_backend kv_channels kv_lora_rank layernorm_epsilon
    layernorm_zero_centered_gamma linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim log_max_attention_logit mamba_head_dim
    mamba_num_groups mamba_num_heads mamba_state_dim masked_softmax_fusion max_seqlen_per_dp_cp_rank
    memory_efficient_layer_norm microbatch_group_size_per_vp_stage min_offloaded_tensor_size
    mlp_chunks_for_prefill moe_apply_probs_on_input moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep
    moe_enable_routing_replay moe_expert_capacity_factor moe_ffn_hidden_size moe_flex_dispatcher_backend
    moe_grouped_gemm moe_hybridep_num_sms moe_input_jitter_eps moe_latent_size moe_layer_freq
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_per_layer_logging moe_permute_fusion
    moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
    moe_router_force_load_balancing moe_router_fusion moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization
    moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size
    moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
    moe_z_loss_coeff mrope_section mscale mscale_all_dim mtp_loss_scaling_factor mtp_num_layers
    mtp_standalone multi_latent_attention no_rope_freq normalization num_attention_heads num_layers
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints num_moe_experts
    num_query_groups offload_modules original_max_position_embeddings overlap_moe_expert_parallel_comm
    overlap_p2p_comm overlap_p2p_comm_warmup_flush perform_initialization persist_layer_norm
    pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_size
    q_lora_rank qk_clip qk_clip_alpha qk_clip_threshold qk_head_dim qk_l2_norm qk_layernorm
    qk_pos_emb_head_dim recompute_granularity recompute_method recompute_modules recompute_num_layers
    rope_type rotary_base rotary_interleaved rotary_percent rotary_scaling_factor sequence_parallel
    softmax_scale softmax_type symmetric_ar_type tensor_model_parallel_size test_mode tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
    tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red transformer_impl
    use_cpu_initialization use_fused_weighted_squared_relu use_inference_optimized_layers use_kitchen
    use_kitchen_attention use_mamba_mem_eff_path use_ring_exchange_p2p use_te_activation_func
    use_te_rng_tracker v_head_dim variable_seq_lengths virtual_pipeline_model_parallel_size
    wgrad_deferral_limit window_attn_skip_freq window_size
    """.split()
)
"""In every supported version."""

ONLY_0_16 = frozenset(
    """
    async_tensor_model_parallel_allreduce moe_extended_tp moe_use_legacy_grouped_gemm
    """.split()
)
"""In megatron-core 0.16 only."""

ONLY_0_19 = frozenset(
    """
    activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules
    delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
    expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
    fine_grained_offloading_max_inflight_offloads flash_attention_version fp8_output_proj
    fused_residual_rmsnorm gtp_weight_remat_size high_priority_a2a_comm_stream
    inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type mla_down_proj_fusion
    mlp_chunks_for_training moe_expert_rank_capacity_factor moe_flex_dispatcher_num_sms
    moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
    moe_hybridep_pad_uneven_dispatch_inputs moe_mlp_glu_interleave_size moe_ncclep_static_shape
    moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference moe_paged_stash
    moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
    moe_permute_fusion_into_hybridep moe_router_force_biased moe_router_quantile_balancing_ema
    moe_shared_expert_glu_interleave_size moe_single_grouped_bias moe_single_grouped_weight mtp_detach_heads
    mtp_hybrid_override_pattern mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim
    mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult nccl_all_reduce_for_prefill
    overlap_dispatch_backward_with_experts_wgrad tensor_parallel_num_weight_shards
    use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_mup
    use_transformer_engine_op_fuser
    """.split()
)
"""In megatron-core 0.19 only."""

ARCHITECTURE = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm normalization num_moe_experts
    moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    attention_output_gate experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_topk
    dsa_indexer_use_sparse_loss heterogeneous_block_specs is_hybrid_model mamba_head_dim mamba_num_groups
    mamba_num_heads mamba_state_dim use_mamba_mem_eff_path moe_latent_size moe_router_enable_expert_bias
    mrope_section mtp_standalone qk_l2_norm window_size window_attn_skip_freq moe_router_topk_limited_devices
    dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
    mla_down_proj_fusion moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size moe_single_grouped_bias
    moe_single_grouped_weight mtp_hybrid_override_pattern mtp_use_repeated_layer mup_attn_scale_power
    mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult use_mup
    moe_router_topk moe_router_topk_scaling_factor moe_router_pre_softmax moe_router_score_function
    moe_router_num_groups moe_router_group_topk
    layernorm_epsilon layernorm_zero_centered_gamma activation_func_clamp_value glu_linear_offset
    moe_apply_probs_on_input no_rope_freq softmax_scale softmax_type rotary_interleaved rotary_base rotary_percent
    rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    """.split()
)
"""Fields that decide the model's tensors or their meaning; only the checkpoint sets them."""
