"""The options of vLLM that somebody has looked at: does one change what KV bytes are, or what their key says?

Those that do are in the namespace (``identity.describe``, ``adapters.options_of``) or in the engine's block hashes. A
new version's further options come here once that has been decided for each; docs/vllm-versions.md says how.
"""

KNOWN = {
    "VllmConfig": """
        additional_config attention_config aux_output_config cache_config compilation_config device_config
        diffusion_config ec_manager_config ec_transfer_config engram_config instance_id kernel_config
        kv_events_config kv_transfer_config load_config logging_config lora_config mamba_config model_config
        observability_config offload_config optimization_level parallel_config performance_mode
        profiler_config quant_config reasoning_config scheduler_config shutdown_timeout speculative_config
        structured_outputs_config watchdog_config watermark_config weight_transfer_config
    """,
    "CacheConfig": """
        _block_size_resolved block_size cache_dtype cache_hit_alignment_tokens effective_attention_block_size
        enable_mamba_shared_prefix_checkpoint enable_prefix_caching gpu_memory_utilization hash_block_size
        is_attention_free kv_cache_dtype_skip_layers kv_cache_layout kv_cache_max_concurrency
        kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend kv_offloading_size
        kv_sharing_fast_prefill mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_page_size_padded
        mamba_ssm_cache_dtype num_cpu_blocks num_gpu_blocks num_gpu_blocks_override
        prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len
        simple_cpu_offload_num_blocks skip_page_size_padded sliding_window swa_bounded_replay
        use_kda_recoverssm use_replayssm user_specified_block_size
    """,
    "ModelConfig": """
        allow_deprecated_quantization allowed_local_media_path allowed_media_domains code_revision
        config_format convert disable_cascade_attn disable_sliding_window dtype enable_cumem_allocator
        enable_nccl_comm_suspend enable_prompt_embeds enable_sleep_mode enable_trace_replay enforce_eager
        generation_config hf_config hf_config_path hf_overrides hf_text_config hf_token io_processor_plugin
        is_submodel_config logits_processors logprobs_mode max_logprobs max_model_len model
        model_class_overrides model_impl model_weights multimodal_config override_generation_config
        pooler_config quantization quantization_config renderer_num_workers return_sampling_mask revision
        runner seed served_model_name skip_tokenizer_init sleep_mode_backend sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names spec_target_max_model_len tokenizer tokenizer_mode tokenizer_revision
        trust_remote_code use_fp64_gumbel word_embeddings_untied_by_checkpoint
    """,
    "AttentionConfig": """
        backend backend_per_kind disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph
        flash_attn_version flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size
        hisparse_config indexer_kv_dtype indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp
        minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        trtllm_ragged_backend use_non_causal use_prefill_query_quantization use_trtllm_attention
    """,
    "ParallelConfig": """
        _allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank _coord_store_port
        _data_parallel_master_port_list all2all_backend assigned_physical_gpu_ids cp_kv_cache_interleave_size
        cpu_distributed_timeout_seconds data_parallel_backend data_parallel_external_lb
        data_parallel_hybrid_lb data_parallel_index data_parallel_master_ip data_parallel_master_port
        data_parallel_rank data_parallel_rank_local data_parallel_rpc_port data_parallel_size
        data_parallel_size_local dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
        dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size disable_custom_all_reduce
        disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds
        dp_sync_interval elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo enable_elastic_ep
        enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance enable_hc_sp
        enable_shm_tensor_arena eplb_config expert_placement_strategy fault_tolerance_config is_moe_model
        master_addr master_port max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus
        numa_bind_nodes pipeline_parallel_size placement_group prefill_context_parallel_size rank
        ray_runtime_env ray_workers_use_nsight tensor_parallel_size ubatch_size worker_cls
        worker_extension_cls world_size
    """,
    "SpeculativeConfig": """
        attention_backend code_revision disable_eagle_block_drop disable_lookahead_block_hashes
        disable_padded_drafter_batch draft_lm_head_quantization draft_load_config draft_model_config
        draft_parallel_config draft_sample_method draft_tensor_parallel_size dspark_draft_topk
        enable_adaptive_verification enforce_eager fly_entropy_threshold fly_entropy_top_k fly_window_size
        index_share_for_mtp_iteration kv_cache_dtype max_model_len method model moe_backend
        num_speculative_tokens num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max
        prompt_lookup_min quantization rejection_sample_method revision suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth suffix_decoding_min_token_prob
        synthetic_acceptance_length synthetic_acceptance_rates target_model_config target_parallel_config
        tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction xpress_topc
    """,
    "LoRAConfig": """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras lora_dtype max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
        specialize_active_lora target_modules
    """,
    "MultiModalConfig": """
        allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings language_model_only
        limit_per_prompt media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
        mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
        mm_processor_cache_type mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
        skip_mm_profiling video_pruning_method video_pruning_rate
    """,
    "LoadConfig": """
        device download_dir ignore_patterns load_format model_loader_extra_config pt_load_map_location
        safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
        use_tqdm_on_load
    """,
    "MambaConfig": """
        backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds
    """,
    "EngramConfig": """
        cpu_offload dp_shared_memory embedding_across_dp use_thp
    """,
    "KernelConfig": """
        enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup enable_rocm_segmented_attn_autotune
        ir_op_priority linear_backend linear_backend_per_quant moe_backend monokernel
        sparse_indexer_topk_backend
    """,
    "HiSparseConfig": """
        device_buffer_size eager_host_mirror
    """,
}
"""Names by class of ``vllm.config``, of all versions that are served."""
