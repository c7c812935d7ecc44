"""The parts of the engines that the adapters use, besides their imports, which are read from the adapters'
sources.

Every listed release must have each name, except the names with a reason in MAYBE, for which the adapters
check first.
"""

from __future__ import annotations

MLA = "vllm.model_executor.layers.attention.mla_attention"
DSA = "sglang.srt.layers.attention.dsa_backend"
SPARSE_MLA = "vllm.model_executor.layers.attention.sparse_mla_attention"

# Our classes, and their base classes in the engines.
BASES = {
    "vllm": [
        ("vllm/backend.py:AttnBackend", "vllm.v1.attention.backend:AttentionBackend"),
        ("vllm/attention.py:AttnImpl", "vllm.v1.attention.backend:AttentionImpl"),
        ("vllm/metadata.py:AttnMetadataBuilder", "vllm.v1.attention.backend:AttentionMetadataBuilder"),
        ("vllm/mla.py:MlaBackend", f"{MLA}:MLACommonBackend"),
        ("vllm/mla.py:MlaImpl", f"{MLA}:MLACommonImpl"),
        ("vllm/mla.py:MlaImpl", "vllm.v1.attention.backend:MLAAttentionImpl"),
        ("vllm/mla.py:MlaMetadataBuilder", f"{MLA}:MLACommonMetadataBuilder"),
        ("vllm/sparse_mla.py:SparseMlaBackend", f"{MLA}:MLACommonBackend"),
        ("vllm/sparse_mla.py:SparseMlaImpl", f"{SPARSE_MLA}:SparseMLACommonImpl"),
        ("vllm/sparse_mla.py:SparseMlaImpl", "vllm.v1.attention.backend:MLAAttentionImpl"),
        ("vllm/mla.py:LatentImpl", f"{SPARSE_MLA}:SparseMLACommonImpl"),
        (
            "vllm/sparse_mla.py:SparseMlaMetadataBuilder",
            f"{SPARSE_MLA}:SparseMLACommonMetadataBuilder",
        ),
        ("vllm/mla.py:MlaPrefill", "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend"),
    ],
    "sglang": [
        (
            "sglang/backend.py:SGLangAttentionBackend",
            "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        ),
        ("sglang/sparse.py:SparseBackend", f"{DSA}:DeepseekSparseAttnBackend"),
        (
            "sglang/drafts.py:DraftStepsBackend",
            "sglang.srt.layers.attention.triton_backend:TritonMultiStepDraftBackend",
        ),
        ("sglang/sampler.py:AttnSampler", "sglang.srt.layers.sampler:Sampler"),
    ],
}

# Attributes and methods of the engines' objects.
MEMBERS = {
    "vllm": {
        "vllm.v1.attention.backend:CommonAttentionMetadata": (
            "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_actual_tokens "
            "max_query_len max_seq_len block_table_tensor "
            "slot_mapping causal mm_req_doc_ranges is_prefilling"
        ),
        "vllm.v1.attention.backend:AttentionType": "DECODER ENCODER_ONLY ENCODER_DECODER",
        "vllm.v1.attention.backend:AttentionCGSupport": "ALWAYS UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE",
        "vllm.v1.attention.backend:AttentionImpl": (
            "process_weights_after_loading supports_quant_query_input fused_output_quant_supported "
            "supports_dcp can_return_lse_for_decode supports_mtp_with_cp_non_trivial_interleave_size "
            "dcp_world_size get_impl_variants"
        ),
        "vllm.v1.attention.backend:AttentionBackend": "supported_kv_cache_dtypes "
        "supports_per_head_quant_scales",
        "vllm.v1.attention.backend:AttentionMetadataBuilder": "supports_draft_decode_metadata_update "
        "get_cudagraph_support",
        "vllm.config.cache:CacheConfig": "cache_dtype",
        "vllm.v1.kv_cache_interface:KVQuantMode": "is_custom_mode CUSTOM",
        "vllm.model_executor.layers.attention.attention:Attention": (
            "impl mm_prefix_clamp_sliding_window kv_sharing_target_layer_name"
        ),
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CUSTOM CPU_ATTN CPU_MLA AMX_MLA "
        "FLASH_ATTN_DIFFKV TRITON_ATTN_DIFFKV is_overridden get_path register",
        "vllm.v1.worker.worker_base:WorkerWrapperBase": "worker vllm_config",
        f"{MLA}:MLACommonMetadataBuilder": "query_len_support reorder_batch_threshold mla_dims num_heads "
        "page_size _prefill_backend _build_decode",
        f"{MLA}:QueryLenSupport": "VARLEN",
        f"{MLA}:MLADims": "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
        f"{MLA}:MLACommonDecodeMetadata": "block_table seq_lens",
        f"{MLA}:MLACommonMetadata": "decode",
        f"{MLA}:MLACommonPrefillMetadata": "query_start_loc chunked_context",
        f"{MLA}:MLACommonImpl": "kv_lora_rank scale supports_quant_query_input",
        f"{SPARSE_MLA}:SparseMLACommonImpl": "is_sparse topk_indices_buffer kv_lora_rank scale "
        "need_to_return_lse_for_decode",
        f"{SPARSE_MLA}:SparseMLACommonMetadataBuilder": "metadata_cls reorder_batch_threshold topk_tokens "
        "mla_dims _prefill_backend",
        "vllm.v1.attention.backend:MLAAttentionImpl": "need_to_return_lse_for_decode "
        "can_return_lse_for_decode supports_pcp",
        "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend": (
            "num_heads scale kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim vllm_config "
            "prepare_metadata"
        ),
        "vllm.v1.attention.backends.mla.prefill.registry:MLAPrefillBackendEnum": "CUSTOM is_overridden",
        "vllm.config.attention:AttentionConfig": "mla_prefill_backend hisparse_config backend "
        "backend_per_kind use_non_causal",
        "vllm.v1.kv_cache_interface:MLAAttentionSpec": "block_size dtype block_stride_alignment "
        "state_content_size_bytes",
        "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size num_kv_heads head_size head_size_v dtype "
        "sliding_window attention_chunk_size dcp_sharded kv_quant_mode state_content_bytes",
        "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": "block_size num_kv_heads head_size dtype "
        "attention_chunk_size",
        "vllm.v1.kv_cache_interface:EncoderOnlyAttentionSpec": "block_size num_kv_heads head_size dtype",
        "vllm.v1.kv_cache_interface:CrossAttentionSpec": "block_size num_kv_heads head_size dtype",
        "vllm.config.model:ModelConfig": "dtype is_mm_prefix_lm get_num_attention_heads "
        "get_total_num_kv_heads seed use_mla hf_config rswa_window",
        "vllm.config.scheduler:SchedulerConfig": "max_num_seqs max_num_batched_tokens "
        "disable_chunked_mm_input",
        "vllm.config.compilation:CompilationConfig": "max_cudagraph_capture_size pass_config cudagraph_mode",
        "vllm.config.compilation:CUDAGraphMode": "FULL mixed_mode",
        "vllm.config.compilation:PassConfig": "fuse_attn_quant",
        "vllm.config.parallel:ParallelConfig": (
            "decode_context_parallel_size prefill_context_parallel_size data_parallel_rank "
            "tensor_parallel_size cp_kv_cache_interleave_size dcp_comm_backend"
        ),
        "vllm.config.speculative:SpeculativeConfig": "num_speculative_tokens attention_backend",
        "vllm.config.vllm:VllmConfig": (
            "model_config scheduler_config compilation_config parallel_config speculative_config "
            "diffusion_config cache_config attention_config"
        ),
        "vllm.v1.worker.gpu.sample.sampler:Sampler": "sample apply_sampling_params sampling_states "
        "logprobs_mode return_sampling_mask",
        "vllm.v1.worker.gpu.sample.states:SamplingStates": "add_request apply_temperature apply_min_p "
        "temperature top_k top_p min_p seeds vocab_size",
        "vllm.v1.sample.sampler:Sampler": "sample apply_temperature logprobs_mode",
        "vllm.v1.sample.metadata:SamplingMetadata": (
            "all_greedy all_random temperature top_k top_p generators max_num_logprobs logprob_token_ids "
            "logitsprocs"
        ),
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor": "min_p min_p_count apply",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "_sample _bookkeeping_sync input_batch requests "
        "sampler seq_lens device",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "num_reqs req_ids sampling_metadata generators",
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": "generator",
    },
    "sglang": {
        "sglang.srt.layers.radix_attention:RadixAttention": (
            "tp_q_head_num tp_k_head_num head_dim v_head_dim scaling layer_id logit_cap sliding_window_size "
            "is_cross_attention use_irope attn_type logit_capping_method xai_temperature_len k_scale v_scale"
        ),
        "sglang.srt.layers.radix_attention:AttentionType": "DECODER ENCODER_ONLY",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
            "forward_mode batch_size req_pool_indices seq_lens out_cache_loc positions extend_seq_lens "
            "extend_seq_lens_cpu _attn_output "
            "extend_prefix_lens_cpu encoder_lens encoder_out_cache_loc spec_info mm_inputs "
            "multi_item_delimiter_indices"
        ),
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend": "verify_mask "
        "update_verify_buffers_to_fill_after_draft",
        "sglang.srt.layers.attention.triton_backend:TritonMultiStepDraftBackend": (
            "needs_cpu_seq_lens topk speculative_num_steps attn_backends init_forward_metadata "
            "init_forward_metadata_out_graph "
            "init_forward_metadata_in_graph init_cuda_graph_state"
        ),
        "sglang.srt.layers.attention.verify_mask:VerifyMask": "buffer mode max_bs is_read fits",
        "sglang.srt.speculative.eagle_utils:TreeMaskMode": "QLEN_ONLY",
        "sglang.srt.speculative.eagle_info:EagleVerifyInput": "topk draft_token_num custom_mask",
        "sglang.srt.speculative.ngram_info:NgramVerifyInput": "draft_token_num custom_mask",
        "sglang.srt.speculative.draft_utils:DraftBackendFactory": (
            "_create_backend _create_triton_decode_backend draft_model_runner topk speculative_num_steps"
        ),
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": (
            "is_decode is_idle is_target_verify is_decode_or_idle is_extend is_dllm_extend"
        ),
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": (
            "set_kv_buffer get_kv_buffer _store_kv_layer store_dtype dtype kv_cache_layout "
            "is_quantized_kv_cache requires_physical_write_loc get_raw_kv_buffer get_kv_cache_quant_method "
            "layer_transfer_counter start_layer"
        ),
        "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool": (
            "get_raw_kv_buffer get_kv_cache_quant_method layer_transfer_counter start_layer"
        ),
        "sglang.srt.layers.quantization.fp4_kv_cache_quant_method:FP4MXBlock16KVCacheMethod": "name",
        "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool": "get_kv_buffer store_dtype dtype kv_cache_dim "
        "kv_lora_rank qk_rope_head_dim",
        "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool": "kv_cache_dim dsa_kv_cache_store_fp8 "
        "kv_lora_rank qk_rope_head_dim dtype",
        f"{DSA}:DeepseekSparseAttnBackend": (
            "device num_q_heads dsa_kv_cache_store_fp8 dsa_prefill_impl dsa_decode_impl "
            "enable_auto_select_prefill_impl _forward_flashmla_sparse "
            "prefill_attention_backend_str decode_attention_backend_str forward_decode forward_extend"
        ),
        "sglang.srt.mem_cache.memory_pool:ReqToTokenPool": "req_to_token size",
        "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool": "layers_mapping full_to_swa_index_mapping "
        "get_kv_buffer set_kv_buffer",
        "sglang.srt.model_executor.model_runner:ModelRunner": (
            "device dtype kv_cache_dtype kv_cache_dtype_str page_size is_draft_worker model model_config "
            "req_to_token_pool token_to_kv_pool "
            "hisparse_coordinator attn_backend server_args"
        ),
        # what SGLang wraps around a backend
        "sglang.srt.layers.attention.hybrid_attn_backend:HybridAttnBackend": "prefill_backend decode_backend",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend": "full_attn_backend",
        "sglang.srt.layers.attention.minimax_sparse_backend:MiniMaxHybridAttnBackend": "dense sparse "
        "sparse_layer_ids",
        "sglang.srt.configs.model_config:ModelConfig": (
            "attention_arch is_encoder_decoder context_len is_multimodal attention_chunk_size hf_config "
            "hf_text_config is_hybrid_swa"
        ),
        "sglang.srt.configs.model_config:AttentionArch": "MHA MLA",
        "sglang.srt.managers.schedule_batch:MultimodalDataItem": "is_image offsets",
        "sglang.srt.managers.schedule_batch:MultimodalInputs": "mm_items",
        "sglang.srt.layers.sampler:Sampler": "_preprocess_logits _sync_token_ids_across_tp "
        "_sample_from_probs _sample_from_logprobs",
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo": (
            "temperatures top_ks top_ps min_ps is_all_greedy need_top_k_sampling need_top_p_sampling "
            "need_min_p_sampling "
            "sampling_seed adjusted_from_schedule_batch return_sampling_masks"
        ),
        "sglang.srt.models.gemma3_mm:Gemma3ForConditionalGeneration": "prepare_attn_masks",
        "sglang.srt.models.gemma4_mm:Gemma4ForConditionalGeneration": "prepare_attn_masks",
        "sglang.srt.models.gemma4_unified:Gemma4UnifiedForConditionalGeneration": "prepare_attn_masks",
        "sglang.srt.models.gpt_oss:GptOssAttention": "sinks",
        "sglang.srt.models.mimo_v2:MiMoV2Attention": "attention_sink_bias",
        "sglang.srt.models.dflash:DFlashAttention": "attention_sink_bias",
        "sglang.srt.models.baichuan:BaiChuanAttention": "alibi_slopes",
        "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA": "attn_mha attn_mqa",
        "sglang.srt.models.deepseek_v2:DeepseekV2Model": "llama_4_scaling_config",
        "sglang.srt.plugins.hook_registry:HookRegistry": "register _hooks",
        "sglang.srt.plugins.hook_registry:HookType": "AROUND",
    },
}

# The names that are read from the engines' modules.
MODULES = {
    "vllm": {
        "vllm.envs": "VLLM_BATCH_INVARIANT",
        "vllm.config.cache": "register_kv_cache_dtype is_known_kv_cache_dtype",
    },
    "sglang": {
        "sglang.srt.server_args": "ATTENTION_BACKEND_CHOICES DETERMINISTIC_ATTENTION_BACKEND_CHOICES "
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND DRAFT_ATTENTION_BACKEND_CHOICES "
        "add_draft_attention_backend_choices",
        "sglang.srt.layers.sampler": "_CUSTOM_SAMPLER_FACTORIES _SamplingMaskCapture "
        "top_k_top_p_min_p_sampling_from_probs_torch",
        "sglang.srt.layers.attention.base_attn_backend": "SharedReadEnds",
    },
}

# Functions that are called: how many positional arguments, and which named ones.
CALLS = {
    "vllm": {
        "vllm.v1.attention.backends.registry:register_backend": (2, ""),
        "vllm.v1.attention.backends.mla.prefill.registry:register_mla_prefill_backend": (2, ""),
        "vllm.config:get_layers_from_vllm_config": (3, ""),
        "vllm.config:get_current_vllm_config_or_none": (0, ""),
        "vllm.v1.attention.backends.utils:get_dcp_local_seq_lens": (4, ""),
        f"{MLA}:MLACommonImpl.__init__": (
            10,
            "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim kv_b_proj "
            "indexer",
        ),
        f"{MLA}:MLACommonMetadataBuilder.__init__": (4, ""),
        f"{SPARSE_MLA}:SparseMLACommonImpl.__init__": (
            10,
            "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim kv_b_proj "
            "indexer topk_indices_buffer",
        ),
        f"{SPARSE_MLA}:SparseMLACommonMetadataBuilder.__init__": (4, ""),
        f"{SPARSE_MLA}:SparseMLACommonMetadataBuilder.build": (3, ""),
        "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend.__init__": (
            0,
            "num_heads scale kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim vllm_config",
        ),
    },
    "sglang": {
        "sglang.srt.layers.attention.attention_registry:register_attention_backend": (1, ""),
        "sglang.srt.server_args:add_attention_backend_choices": (1, ""),
        "sglang.srt.server_args:add_deterministic_attention_backend_choices": (1, ""),
        "sglang.srt.server_args:add_radix_supported_deterministic_attention_backend_choices": (1, ""),
        "sglang.srt.layers.attention.attention_registry:attn_backend_wrapper": (2, ""),
        "sglang.srt.layers.sampler:register_sampler_backend": (2, ""),
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer": (4, ""),
        "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.set_kv_buffer": (4, ""),
        "sglang.srt.configs.model_config:is_deepseek_dsa": (1, ""),
        "sglang.srt.configs.model_config:get_dsa_index_topk": (1, ""),
        f"{DSA}:DeepseekSparseAttnBackend.__init__": (1, ""),
        "sglang.srt.utils.common:support_triton": (1, ""),
        "sglang.srt.utils.common:is_pin_memory_available": (1, ""),
        "sglang.srt.plugins.hook_registry:HookRegistry.register": (3, ""),
    },
}

# Names that some releases lack: the adapters check before they use them.
MAYBE = {
    "vllm.v1.kv_cache_interface:FullAttentionSpec.dcp_sharded": "compat.dcp_group asks",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.state_content_bytes": "compat.with_bytes_of_scales asks",
    "vllm.v1.kv_cache_interface:KVQuantMode.is_custom_mode": "compat.with_bytes_of_scales asks: since "
    "releases that register names of caches",
    "vllm.v1.kv_cache_interface:KVQuantMode.CUSTOM": "compat.OwnCacheHandler returns it: since the same "
    "releases",
    **dict.fromkeys(
        ("vllm.config.cache:register_kv_cache_dtype", "vllm.config.cache:is_known_kv_cache_dtype"),
        "compat.takes_cache_names asks",
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.supports_draft_decode_metadata_update": "set; read "
    "since the releases that capture draft loops",
    "vllm.v1.attention.backends.utils:get_kv_cache_layout": "compat.kv_cache_stride_order: later releases "
    "lay out the cache themselves",
    "vllm.config.vllm:VllmConfig.diffusion_config": "compat.unsupported_feature: since the releases that "
    "have diffusion models",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_MLA": "register: since the releases that "
    "serve MLA on a CPU",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.AMX_MLA": "the same",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.register": "compat.register_names asks",
    "vllm.config.attention:AttentionConfig.hisparse_config": "compat.unsupported_sparse_feature: since the "
    "releases that have it",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec.block_stride_alignment": (
        "compat.with_whole_rows_between_blocks asks"
    ),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec.state_content_size_bytes": "the same: older than "
    "block_stride_alignment",
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": "`attn-backend bench`: comes with "
    "vLLM's CUDA wheels alone",
    "vllm.vllm_flash_attn.flash_attn_interface:get_scheduler_metadata": "the same",
    "vllm.v1.attention.backend:AttentionImpl.get_impl_variants": "compat.attention_impls asks",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.return_sampling_mask": "since the releases that report such "
    "masks",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._store_kv_layer": "compat.copies_to_slots compares it "
    "only where it is",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.requires_physical_write_loc": "the same asks: since "
    "the releases that have pools of virtual slots",
    "sglang.srt.models.dflash:DFlashAttention.attention_sink_bias": "support.layer_spec: since the drafts "
    "that have sinks",
    "sglang.srt.server_args:DRAFT_ATTENTION_BACKEND_CHOICES": "compat.register_draft_backend asks",
    "sglang.srt.server_args:add_draft_attention_backend_choices": "the same asks: comes with that list",
    "sglang.srt.layers.sampler:_SamplingMaskCapture": "sampler.py asks: since 0.5.20",
    "sglang.srt.layers.attention.base_attn_backend:SharedReadEnds": "compat.shared_reads_end_after_replay: "
    "later releases ask",
    "ExaoneMoeForCausalLM": "plugin.SERVED: another spelling, since 0.5.22",
}

# Names that getattr or hasattr looks for and that are not in the tables above.
ASKED = {
    "chunks": "vLLM's metadata of MLA: test_mla_names_what_ours_reads has both forms",
    "index_topk": "of a checkpoint's configuration: so does vLLM (ModelConfig)",
    "index_kpool": "of a checkpoint's configuration: so does SGLang (configs/model_config.py)",
    "learnable_sink": "of a checkpoint's configuration: so does SGLang (arg_groups/overrides.py)",
    "use_bidirectional_attention": "of transformers' configuration of Gemma 4",
    "VLLM_USE_RUST_FRONTEND": "of vllm/envs.py, in releases that have this frontend",
    "name": "of every enum",
    "forward": "of every module",
    "_attn_backend": "ours",
    "spec": "ours",
}

# Places in which the name is a variable.
ASKED_BY_VARIABLE = {
    ("sglang/compat.py", "f'get_{group}'"): "test_settings_have_the_names_that_are_asked_for",
    ("sglang/compat.py", "f'{phase}_attention_backend'"): "test_checks_of_names_are_where_the_hooks_look",
    ("sglang/compat.py", "name"): "the same, and methods of MHATokenToKVPool",
    ("sglang/plugin.py", "name"): "test_checks_of_names_are_where_the_hooks_look",
    ("sglang/plugin.py", "field"): "the same",
    ("sglang/plugin.py", "_MARK"): "an attribute of ours",
    ("sglang/support.py", "sinks"): "sinks, attention_sink_bias",
    ("vllm/attention.py", "stored.scales or ''"): "torch's dtypes",
    ("vllm/compat.py", "class_name"): "what AttentionBackendEnum says",
    (
        "vllm/compat.py",
        "part",
    ): "test_what_the_adapters_ask_for_is_in_the_tables, from the calls of setting()",
    ("vllm/sampler.py", "owner"): "test_functions_that_the_sampler_replaces_have_known_arguments",
    ("vllm/sampler.py", "function"): "the same",
    ("vllm/sampler.py", "name"): "the same, and top_k, top_p, min_p of SamplingStates",
}

# How vLLM's layer creates an implementation, by position.
IMPL_ARGUMENTS = (
    "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
    "logits_soft_cap attn_type kv_sharing_target_layer_name"
)
