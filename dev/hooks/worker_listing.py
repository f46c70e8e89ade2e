"""The names of vLLM's that workers, attention and calibrate touch: a part of ``listing.py``."""

WORKER_HOOKS = {
    "worker/meter.py": {
        "vllm.v1.outputs": """
            EMPTY_MODEL_RUNNER_OUTPUT ModelRunnerOutput AsyncModelRunnerOutput.get_output
        """,
    },
    "worker/mixin.py": {
        "vllm.v1.worker.gpu_worker": """
            Worker.get_kv_cache_spec Worker.determine_available_memory
            Worker.initialize_from_config(kv_cache_config) Worker.execute_model(scheduler_output)
            Worker.sample_tokens Worker.model_runner Worker.use_v2_model_runner
            Worker.sleep(level) Worker.wake_up(tags) Worker.discard(tags)
            Worker._maybe_get_memory_pool_context(tag)
        """,
        "vllm.v1.worker.gpu_model_runner": """
            GPUModelRunner.attn_groups GPUModelRunner.get_model GPUModelRunner.drafter
        """,
        "vllm.v1.spec_decode.llm_base_proposer": """
            SpecDecodeBaseProposer.draft_attn_groups
            SpecDecodeBaseProposer.net_num_new_slots_per_request
        """,
        "vllm.v1.worker.utils": "AttentionGroup.kv_cache_group_id",
        "vllm.distributed.kv_transfer": "get_kv_transfer_group",
        "vllm.distributed.parallel_state": """
            get_pp_group GroupCoordinator.rank_in_group GroupCoordinator.is_last_rank
        """,
        "vllm.v1.worker.gpu.model_runner": "GPUModelRunner.get_model",
        "vllm.model_executor.models.interfaces_base": """
            VllmModelForTextGeneration.compute_logits(hidden_states)
        """,
        "vllm.model_executor.layers.attention.attention": """
            Attention.kv_sharing_target_layer_name Attention.head_size Attention.head_size_v
        """,
        "vllm.model_executor.layers.attention.mla_attention": "MLAAttention.use_sparse",
        "vllm.config": "CompilationConfig.static_forward_context CacheConfig.enable_prefix_caching",
        "vllm.v1.kv_cache_interface": """
            AttentionSpec MLAAttentionSpec MambaSpec KVCacheConfig.kv_cache_groups
            KVCacheConfig.num_blocks
        """,
        "vllm.model_executor.models.utils": "extract_layer_index",
        "vllm.utils.gpu_sync_debug": "with_gpu_sync_check",
    },
    "worker/weights.py": {
        "vllm.v1.worker.gpu_worker": """
            Worker.reload_weights Worker.update_weights(update_info) Worker.start_weight_update()
            Worker.reset_weights() Worker.model_runner
        """,
        "vllm.v1.worker.gpu_model_runner": """
            GPUModelRunner.reload_weights GPUModelRunner.get_model
        """,
        "vllm.utils.gpu_sync_debug": "gpu_sync_allowed",
    },
    "worker/settle.py": {
        "vllm.distributed.kv_transfer": "get_kv_transfer_group",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": """
            OffloadingConnectorMetadata
        """,
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": """
            OffloadingConnector.handle_preemptions(kv_connector_metadata)
        """,
        "vllm.v1.core.sched.output": "SchedulerOutput.kv_connector_metadata",
    },
    "worker/cpu.py": {
        "vllm.v1.worker.cpu_worker": "CPUWorker",
        "vllm.v1.attention.selector": "_cached_get_attn_backend",
        "vllm.v1.attention.backends.registry": """
            AttentionBackendEnum.CPU_ATTN AttentionBackendEnum.CPU_MLA register_backend
        """,
        "vllm._custom_ops": "cpu_attn_reshape_and_cache(kv_cache_dtype)",
        "vllm.v1.attention.backend": "AttentionLayer._k_scale_float AttentionLayer._v_scale_float",
    },
    "worker/gpu.py": {
        "vllm.v1.worker.gpu_worker": "Worker.compile_or_warm_up_model",
        "vllm.v1.worker.worker_base": "CompilationTimes",
        "vllm.v1.attention.backends.registry": """
            AttentionBackendEnum.FLASH_ATTN AttentionBackendEnum.TRITON_ATTN register_backend
        """,
        "vllm.v1.attention.backend": "AttentionLayer._q_scale_float",
        "vllm.model_executor.layers.attention.attention": "Attention.query_quant",
    },
    "worker/runners.py": {
        "vllm.v1.worker.gpu_model_runner": """
            GPUModelRunner.input_batch GPUModelRunner.requests GPUModelRunner.execute_model_state
            ExecuteModelState.hidden_states
        """,
        "vllm.v1.worker.gpu_input_batch": """
            InputBatch.req_ids CachedRequestState.mrope_positions
            CachedRequestState.mrope_position_delta
        """,
        "vllm.v1.worker.gpu.model_runner": """
            GPUModelRunner.req_states GPUModelRunner.model_state GPUModelRunner.execute_model_state
            ExecuteModelState.hidden_states ExecuteModelState.input_batch
        """,
        "vllm.v1.worker.gpu.model_states.interface": "ModelState.prepare_attn(input_batch)",
        "vllm.v1.worker.gpu.input_batch": "InputBatch.idx_mapping_np InputBatch.req_ids",
        "vllm.v1.worker.gpu.states": "RequestState.req_id_to_index",
        "vllm.v1.core.sched.output": """
            SchedulerOutput.num_scheduled_tokens
            SchedulerOutput.finished_req_ids SchedulerOutput.preempted_req_ids
            CachedRequestData.resumed_req_ids
        """,
    },
    "worker/centres.py": {
        "vllm.model_executor.layers.linear": """
            QKVParallelLinear.num_heads QKVParallelLinear.num_kv_heads QKVParallelLinear.head_size
            QKVParallelLinear.hidden_size QKVParallelLinear.forward(input_)
        """,
    },
    "worker/rotary.py": {
        "vllm.model_executor.layers.rotary_embedding.base": """
            RotaryEmbedding.rotary_dim RotaryEmbedding.is_neox_style RotaryEmbedding.head_size
            RotaryEmbedding.forward(positions,query,key)
        """,
        "vllm.model_executor.layers.attention.mla_attention": "MLAAttention.kv_lora_rank",
    },
    "worker/prompts.py": {
        "vllm.v1.core.sched.output": """
            SchedulerOutput.scheduled_new_reqs NewRequestData.prompt_token_ids
        """,
    },
    "worker/ranks.py": {
        "vllm.distributed": """
            tensor_model_parallel_all_reduce tensor_model_parallel_all_gather
            get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_tp_group
        """,
        "vllm.distributed.parallel_state": "GroupCoordinator.cpu_group",
    },
    "attention/choice.py": {
        "vllm.config": "AttentionConfig.backend AttentionConfig.flash_attn_version",
        "vllm.vllm_flash_attn.flash_attn_interface": "is_fa_version_supported",
    },
    "attention/gpu_backend.py": {
        "vllm.v1.attention.backend": """
            AttentionBackend.supported_kv_cache_layouts AttentionBackend.supports_batch_invariance
        """,
        "vllm.v1.kv_cache_layout": "KVCacheLayout.LBHNC",
    },
    "attention/gpu_step.py": {
        "vllm.v1.attention.backend": """
            AttentionMetadataBuilder.get_cudagraph_support(vllm_config,kv_cache_spec)
            AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata)
            AttentionMetadataBuilder.build(common_prefix_len,common_attn_metadata)
            AttentionCGSupport
        """,
    },
    "attention/gpu_buffers.py": {
        "vllm.v1.attention.backend": "CommonAttentionMetadata.seq_lens_cpu_upper_bound",
    },
    "attention/cpu_backend.py": {
        "vllm.envs": "VLLM_CPU_ATTN_SPLIT_KV",
        "vllm.v1.attention.backends.cpu_attn": """
            CPUAttentionBackend CPUAttentionMetadataBuilder.build CPUAttentionBackendImpl.forward
            CPUAttentionMetadataBuilder.build_for_drafting(common_attn_metadata,draft_index)
            CPUAttentionBackendImpl.sinks
        """,
        "vllm._custom_ops": """
            cpu_attn_get_scheduler_metadata(kv_cache_dtype) cpu_attention_with_kv_cache(s_aux,
            k_scale,v_scale,kv_cache_dtype)
        """,
    },
    "attention/latent.py": {
        "vllm.model_executor.layers.attention.mla_attention": """
            MLACommonMetadata.num_decode_tokens MLAAttention.layer_name
            MLAAttention.process_weights_after_loading
            MLACommonMetadataBuilder.__init__(metadata_cls)
            MLACommonMetadataBuilder.build(common_prefix_len,common_attn_metadata,fast_build)
        """,
        "vllm.v1.attention.backends.mla.cpu_mla": """
            CPUMLABackend CPUMLAImpl.qk_nope_head_dim CPUMLAImpl.qk_rope_head_dim
            CPUMLAImpl.forward_mqa(q,kv_c_and_k_pe_cache,attn_metadata,layer)
            CPUMLAImpl.forward_mha(q,kv_c_normed,k_pe,kv_c_and_k_pe_cache,attn_metadata,k_scale,
            output,output_scale)
        """,
        "vllm.v1.attention.backend": "CommonAttentionMetadata.replace",
    },
    "attention/flash.py": {
        "vllm.v1.attention.backends.flash_attn": """
            FlashAttentionBackend FlashAttentionMetadataBuilder.build FlashAttentionImpl.forward
            FlashAttentionImpl.sinks
        """,
        "vllm.vllm_flash_attn.flash_attn_interface": "flash_attn_varlen_func(return_softmax_lse)",
    },
    "attention/triton.py": {
        "vllm.v1.attention.backends.triton_attn": """
            TritonAttentionBackend TritonAttentionMetadataBuilder.build TritonAttentionImpl.forward
            TritonAttentionImpl.sinks
        """,
        "vllm.v1.attention.ops.triton_unified_attention": "unified_attention(sinks)",
    },
    "attention/per_head.py": {
        "vllm.v1.attention.backend": """
            CommonAttentionMetadata.query_start_loc CommonAttentionMetadata.seq_lens
            CommonAttentionMetadata.block_table_tensor CommonAttentionMetadata.slot_mapping
            CommonAttentionMetadata.num_actual_tokens
        """,
    },
    "calibrate/extension.py": {
        "vllm.forward_context": "set_forward_context",
        "vllm.model_executor.layers.attention": "Attention MLAAttention",
        "vllm.model_executor.layers.attention_layer_base": "AttentionLayerBase",
        "vllm.model_executor.models.utils": "extract_layer_index",
        "vllm.config": "ParallelConfig.worker_extension_cls",
    },
    "calibrate/layers.py": {
        "vllm.model_executor.layers.attention.attention": "Attention.forward(query,key,value)",
        "vllm.model_executor.layers.attention.mla_attention": """
            MLAAttention.forward(q,kv_c_normed,k_pe) MLAAttention.process_weights_after_loading
            MLAAttention.kv_lora_rank MLAAttention.qk_nope_head_dim MLAAttention.qk_rope_head_dim
        """,
    },
}
