"""Every name of vLLM's that the plugin touches: docs/dev/vllm-hooks.md says why, file by file.

By our file, then by vLLM's module. ``Class.member`` may be inherited or assigned to ``self``;
parentheses hold parameters that we pass by name or override. Workers, attention and
calibrate have a file of their own in this folder.
"""

from dev.hooks.tiers_listing import TIER_HOOKS
from dev.hooks.worker_listing import WORKER_HOOKS

HOOKS = {
    "serving/plugin.py": {
        "vllm.engine.arg_utils": """
            EngineArgs.add_cli_args(parser) EngineArgs.from_cli_args(args)
            EngineArgs.create_engine_config(headless) EngineArgs.additional_config
            AsyncEngineArgs.add_cli_args
        """,
        "vllm.plugins": "load_general_plugins",
    },
    "serving/calibrate.py": {
        "vllm.engine.arg_utils": """
            EngineArgs.tokenizer EngineArgs.tokenizer_mode EngineArgs.tokenizer_revision
            EngineArgs.trust_remote_code EngineArgs.revision EngineArgs.code_revision
            EngineArgs.hf_config_path EngineArgs.hf_overrides EngineArgs.config_format
            EngineArgs.load_format EngineArgs.download_dir EngineArgs.dtype
            EngineArgs.quantization EngineArgs.tensor_parallel_size
            EngineArgs.distributed_executor_backend EngineArgs.gpu_memory_utilization
        """,
        "vllm.config": """
            ParallelConfig.nnodes ParallelConfig.data_parallel_size
            ParallelConfig.data_parallel_size_local ParallelConfig.data_parallel_backend
        """,
    },
    "serving/activate.py": {
        "vllm.config": """
            VllmConfig.additional_config VllmConfig.parallel_config VllmConfig.scheduler_config
            VllmConfig.model_config VllmConfig.cache_config VllmConfig.lora_config
            CacheConfig.enable_prefix_caching ParallelConfig.worker_cls
            ParallelConfig.distributed_executor_backend ParallelConfig.world_size
            ParallelConfig._api_process_count ParallelConfig._api_process_rank
            SchedulerConfig.scheduler_cls SchedulerConfig.async_scheduling
        """,
    },
    "serving/context.py": {
        "vllm.renderers.online_renderer": """
            OnlineRenderer.render_chat(request,skip_mm_cache)
            OnlineRenderer.render_completion(request,skip_mm_cache)
            OnlineRenderer.create_error_response(message,param) OnlineRenderer.renderer
        """,
        "vllm.renderers.base": "BaseRenderer.config",
        "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest.vllm_xargs",
        "vllm.entrypoints.openai.chat_completion.protocol": """
            ChatCompletionRequest.vllm_xargs ChatCompletionRequest.messages
            ChatCompletionRequest.add_generation_prompt ChatCompletionRequest.continue_final_message
            ChatCompletionRequest.truncate_prompt_tokens ChatCompletionRequest.use_beam_search
        """,
        "vllm.entrypoints.openai.completion.protocol": """
            CompletionRequest.vllm_xargs CompletionRequest.prompt CompletionRequest.suffix
            CompletionRequest.prompt_embeds CompletionRequest.truncate_prompt_tokens
            CompletionRequest.use_beam_search
        """,
        "vllm.entrypoints.serve.engine.protocol": "ErrorResponse.error",
    },
    "serving/switched_off.py": {
        "vllm.entrypoints.launchers.api_server.entry": "run_server",
        "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest.vllm_xargs",
        "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest.vllm_xargs",
        "vllm.entrypoints.openai.completion.protocol": "CompletionRequest.vllm_xargs",
        "vllm.entrypoints.anthropic.protocol": "AnthropicMessagesRequest.vllm_xargs",
        "vllm.entrypoints.speech_to_text.transcription.protocol": """
            TranscriptionRequest.vllm_xargs
        """,
        "vllm.entrypoints.speech_to_text.translation.protocol": "TranslationRequest.vllm_xargs",
    },
    "serving/admission.py": {
        "vllm.v1.engine.input_processor": "InputProcessor.process_inputs",
        "vllm.v1.engine.async_llm": "AsyncLLM.generate(prompt,sampling_params,request_id)",
        "vllm.entrypoints.openai.responses.serving": """
            OpenAIServingResponses._generate_with_builtin_tools
        """,
        "vllm.entrypoints.launchers.api_server.entry": "run_server",
        "vllm.v1.engine": "EngineCoreRequest.resumable",
        "vllm.config": """
            VllmConfig.speculative_config VllmConfig.kv_transfer_config
            KVTransferConfig.kv_connector
        """,
        "vllm.envs": "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "vllm.utils": "length_from_prompt_token_ids_or_embeds",
    },
    "serving/rules.py": {
        "vllm.config": "CacheConfig.effective_attention_block_size CacheConfig.block_size",
    },
    "serving/beam_search.py": {
        "vllm.entrypoints.generate.beam_search.offline": "BeamSearchOfflineMixin.beam_search",
        "vllm.entrypoints.generate.beam_search.online": """
            BeamSearchOnlineMixin.beam_search(prompt,request_id,params)
        """,
        "vllm.entrypoints.openai.chat_completion.protocol": """
            ChatCompletionRequest.to_beam_search_params ChatCompletionRequest.vllm_xargs
        """,
        "vllm.entrypoints.openai.completion.protocol": """
            CompletionRequest.to_beam_search_params CompletionRequest.vllm_xargs
        """,
        "vllm.sampling_params": "BeamSearchParams.max_tokens SamplingParams.extra_args",
    },
    "serving/capacity.py": {
        "vllm.config": """
            CacheConfig.kv_cache_max_concurrency CacheConfig.num_gpu_blocks
            ModelConfig.max_model_len
        """,
    },
    "serving/latent.py": {
        "vllm.config": """
            ModelConfig.hf_text_config ModelConfig.is_hybrid CacheConfig.cache_dtype
            VllmConfig.attention_config VllmConfig.speculative_config AttentionConfig.backend
            VllmConfig.use_v2_model_runner ParallelConfig.pipeline_parallel_size
        """,
    },
    "serving/support.py": {
        "vllm.config": """
            ModelConfig.runner_type ModelConfig.is_encoder_decoder ModelConfig.is_diffusion
            ModelConfig.is_attention_free ModelConfig.is_hybrid ModelConfig.use_mla
            ModelConfig.is_deepseek_mla ModelConfig.get_head_size ModelConfig.rswa_window
            ModelConfig.is_mm_prefix_lm ModelConfig.uses_alibi ModelConfig.hf_text_config
            ModelConfig.uses_mrope ModelConfig.get_sliding_window ModelConfig.attention_chunk_size
            CacheConfig.cache_dtype
            CacheConfig.sliding_window CacheConfig.block_size CacheConfig.kv_sharing_fast_prefill
            CacheConfig.user_specified_block_size CacheConfig.prefix_match_unit
            CacheConfig.kv_cache_dtype_skip_layers VllmConfig.aux_output_config
            ModelConfig.multimodal_config MultiModalConfig.video_pruning_rate
            VllmConfig.speculative_config
            VllmConfig.kv_transfer_config VllmConfig.ec_transfer_config VllmConfig.diffusion_config
            VllmConfig.attention_config ParallelConfig.decode_context_parallel_size
            ParallelConfig.prefill_context_parallel_size ParallelConfig.use_ubatching
            ParallelConfig.enable_elastic_ep ParallelConfig.enable_fault_tolerance
            AttentionConfig.use_non_causal AttentionConfig.hisparse_config
            VllmConfig.use_v2_model_runner
            SchedulerConfig.disable_hybrid_kv_cache_manager
        """,
        "vllm.config.aux_output": "AuxOutputConfig.enabled",
        "vllm.config.speculative": """
            SpeculativeConfig.uses_dynamic_speculative_decoding SpeculativeMethod
        """,
        "vllm.envs": "VLLM_KV_CACHE_LAYOUT",
    },
    "serving/profile.py": {"vllm.envs": "VLLM_CACHE_ROOT"},
    "metrics/totals.py": {"vllm.envs": "VLLM_LOG_STATS_INTERVAL"},
    "serving/drafting.py": {
        "vllm.config": """
            SpeculativeConfig.method SpeculativeConfig.draft_model_config
            SpeculativeConfig.kv_cache_dtype SpeculativeConfig.parallel_drafting
            SpeculativeConfig.use_gemma4_mtp SpeculativeConfig.use_step3p5_mtp
            SpeculativeConfig.use_multi_module_mtp
            VllmConfig.use_v2_model_runner
            ModelConfig.get_num_kv_heads(parallel_config) ModelConfig.is_multimodal_model
            ParallelConfig.world_size_across_dp
        """,
    },
    "config/memory_budget.py": {
        "vllm.config": """
            ModelConfig.get_total_num_hidden_layers ModelConfig.get_head_size
            ModelConfig.get_num_attention_heads(parallel_config)
            ParallelConfig.pipeline_parallel_size
            SpeculativeConfig.uses_draft_kv_cache SpeculativeConfig.draft_model_config
        """,
        "vllm.distributed.utils": "get_pp_indices(num_hidden_layers,pp_rank,pp_size)",
    },
    "serving/identity.py": {
        "vllm.config": """
            ModelConfig.architecture ModelConfig.get_total_num_kv_heads ModelConfig.model
            ModelConfig.revision ModelConfig.hf_text_config VllmConfig.load_config
            LoadConfig.load_format LoadConfig.download_dir
        """,
        "vllm.model_executor.model_loader": "get_model_loader",
        "vllm.model_executor.model_loader.base_loader": """
            BaseModelLoader.download_model(model_config)
        """,
        "vllm.tokenizers": "cached_tokenizer_from_config",
    },
    "cache/spec.py": {
        "vllm.v1.kv_cache_interface": """
            FullAttentionSpec.merge(specs) KVCacheSpec replace_as
            FullAttentionSpec.is_uniform_with_collection FullAttentionSpec.sliding_window
            AttentionSpec.num_kv_heads FullAttentionSpec.attention_chunk_size
            AttentionSpec.head_size FullAttentionSpec.max_memory_usage_bytes(vllm_config)
            MLAAttentionSpec.merge(specs) MLAAttentionSpec.head_size_v MLAAttentionSpec.alignment
            MLAAttentionSpec.model_version MLAAttentionSpec.is_index_group_leader
            MLAAttentionSpec.non_causal_multi_token_decode
        """,
    },
    "engine/blocks.py": {
        "vllm.v1.kv_cache_spec_registry": """
            KVCacheSpecRegistry.register(uniform_type_base_spec)
            KVCacheSpecRegistry._ensure_registered
        """,
        "vllm.v1.core.single_type_kv_cache_manager": """
            FullAttentionManager.req_to_blocks
            FullAttentionManager.get_num_blocks_to_allocate(request_id,num_tokens,
            new_computed_blocks,total_computed_tokens,num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap) FullAttentionManager._has_partial_local_hit
            FullAttentionManager.pop_blocks_for_free(request_id)
            FullAttentionManager.add_local_computed_blocks(request_id)
            FullAttentionManager.kv_cache_group_id FullAttentionManager._null_block
        """,
        "vllm.v1.core.kv_cache_utils": """
            KVCacheBlock.block_id KVCacheBlock.ref_cnt KVCacheBlock.block_hash
        """,
        "vllm.v1.core.block_pool": """
            BlockPool.get_new_blocks(num_blocks) BlockPool.free_blocks(ordered_blocks)
            BlockPool.evict_blocks(block_ids) BlockPool.touch(blocks) BlockPool.get_num_free_blocks
            BlockPool.num_gpu_blocks
        """,
        "vllm.v1.core.sched.scheduler": """
            Scheduler.running Scheduler.max_num_scheduled_tokens Scheduler._inflight_prefills
        """,
        "vllm.v1.core.kv_cache_manager": "KVCacheManager.block_pool",
        "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator.group_block_sizes",
    },
    "engine/published.py": {
        "vllm.v1.core.kv_cache_utils": "KVCacheBlock.block_hash KVCacheBlock.ref_cnt",
    },
    "stores/retention.py": {
        "vllm.v1.core.kv_cache_utils": """
            KVCacheBlock.block_id KVCacheBlock.ref_cnt KVCacheBlock.block_hash
            KVCacheBlock.next_free_block FreeKVCacheBlockQueue.fake_free_list_head
            FreeKVCacheBlockQueue.remove(block) FreeKVCacheBlockQueue.prepend_n(blocks)
        """,
        "vllm.v1.core.block_pool": """
            BlockPool.touch(blocks) BlockPool.free_blocks(ordered_blocks)
            BlockPool.free_block_queue BlockPool.blocks
        """,
    },
    "stores/key.py": {
        "vllm.v1.core.kv_cache_utils": "generate_block_hash_extra_keys",
        "vllm.v1.request": "Request.block_hashes Request.all_token_ids Request.num_tokens",
    },
    "engine/stores.py": {
        "vllm.v1.core.kv_cache_manager": """
            KVCacheManager.create_kv_cache_blocks(blocks) KVCacheManager.enable_caching
            KVCacheManager.prefix_cache_lookup_enabled(request) KVCacheManager.block_pool
        """,
        "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator.single_type_managers",
        "vllm.v1.core.block_pool": """
            BlockPool.null_block BlockPool.hash_block_size BlockPool.evict_blocks(block_ids)
        """,
        "vllm.v1.core.kv_cache_utils": """
            KVCacheBlock.set_block_hash(block_hash) make_block_hash_with_group_id BlockHash
        """,
        "vllm.v1.core.single_type_kv_cache_manager": "FullAttentionManager.req_to_blocks",
        "vllm.v1.request": "Request.num_computed_tokens Request.block_hashes",
    },
    "engine/suffix_cache.py": {
        "vllm.v1.core.kv_cache_utils": """
            KVCacheBlock.set_block_hash(block_hash) KVCacheBlock.is_null
            make_block_hash_with_group_id BlockHash
        """,
        "vllm.v1.core.single_type_kv_cache_manager": """
            SingleTypeKVCacheManager.req_to_blocks SingleTypeKVCacheManager.block_size
        """,
        "vllm.v1.request": "Request.block_hashes",
    },
    "engine/windows.py": {
        "vllm.v1.core.kv_cache_coordinator": """
            KVCacheCoordinator.single_type_managers KVCacheCoordinator.group_block_sizes
        """,
        "vllm.v1.core.single_type_kv_cache_manager": """
            SlidingWindowManager.get_num_skipped_tokens(num_computed_tokens)
            ChunkedLocalAttentionManager.get_num_skipped_tokens(num_computed_tokens)
            SingleTypeKVCacheManager.req_to_blocks SingleTypeKVCacheManager.block_size
            SingleTypeKVCacheManager.kv_cache_group_id
        """,
        "vllm.v1.core.block_pool": """
            BlockPool.touch(blocks) BlockPool.free_blocks(ordered_blocks)
        """,
        "vllm.v1.core.sched.scheduler": "Scheduler.running Scheduler.max_num_scheduled_tokens",
    },
    "engine/scheduler.py": {
        "vllm.v1.core.sched.scheduler": """
            Scheduler.schedule Scheduler._update_after_schedule(scheduler_output)
            Scheduler.update_from_output(scheduler_output,model_runner_output)
            Scheduler.reset_prefix_cache(reset_running_requests,reset_connector)
            Scheduler.shutdown() Scheduler.add_request(request)
            Scheduler.kv_cache_config Scheduler.cache_config Scheduler.vllm_config
            Scheduler.finish_requests(request_ids,finished_status) Scheduler._free_request(request)
            Scheduler._free_blocks(request) Scheduler._free_request_blocks(request)
            Scheduler._get_local_prefix_cache_hit(request)
            Scheduler._mamba_block_aligned_split(request,num_new_tokens)
            Scheduler.need_mamba_block_aligned_split Scheduler.requests
            Scheduler.update_draft_token_ids(draft_token_ids) Scheduler.block_size
            Scheduler.kv_cache_manager Scheduler.num_spec_tokens Scheduler.connector
            Scheduler.num_lookahead_tokens Scheduler.prefix_replay_tokens
            Scheduler._handle_blocked_waiting_request(request) Scheduler._holds_kv_blocks(request)
            Scheduler._mark_prefix_replay(request,num_hit_tokens,window_loaded)
            Scheduler._build_kv_connector_meta(connector,scheduler_output)
            Scheduler._update_waiting_for_remote_kv(request)
            Scheduler._handle_invalid_blocks(invalid_block_ids,num_scheduled_tokens)
            Scheduler.waiting Scheduler.running
            Scheduler._preempt_request(request,timestamp,drop_stale_output)
            Scheduler.prev_step_scheduled_req_ids
        """,
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": "OffloadingConnector",
        "vllm.v1.core.sched.async_scheduler": """
            AsyncScheduler._update_after_schedule(scheduler_output)
        """,
        "vllm.v1.kv_cache_interface": """
            KVCacheConfig.kv_cache_groups KVCacheGroupSpec.layer_names
        """,
        "vllm.v1.core.kv_cache_manager": "KVCacheManager.coordinator",
        "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator.single_type_managers",
        "vllm.v1.request": "RequestStatus.RUNNING",
    },
    "engine/grouped_events.py": {
        "vllm.distributed.kv_events": """
            AllBlocksCleared BlockRemoved.block_hashes BlockRemoved.group_idx
            BlockStored.block_hashes BlockStored.parent_block_hash BlockStored.token_ids
            BlockStored.block_size BlockStored.extra_keys BlockStored.group_idx BlockStored.lora_id
            BlockStored.lora_name BlockStored.medium BlockStored.session_id
        """,
        "vllm.v1.core.kv_cache_manager": """
            KVCacheManager.take_events() KVCacheManager.block_pool
        """,
        "vllm.v1.core.block_pool": """
            BlockPool._emit_block_removed_events(block_hashes) BlockPool.emit_cached_block_events
            BlockPool.enable_kv_cache_events BlockPool.kv_event_queue
            BlockPool.cached_block_hash_to_block BlockHashToBlockMap.get_one_block(key)
        """,
    },
    "engine/waiting_queue.py": {
        "vllm.v1.core.sched.request_queue": """
            FCFSRequestQueue RequestQueue.add_request(request) RequestQueue.pop_request()
            RequestQueue.peek_request() RequestQueue.prepend_request(request)
            RequestQueue.prepend_requests(requests) RequestQueue.remove_request(request)
            RequestQueue.remove_requests(requests)
        """,
        "vllm.v1.request": "Request.arrival_time",
    },
    "engine/prefix.py": {
        "vllm.v1.core.kv_cache_manager": """
            KVCacheManager.block_pool KVCacheManager.coordinator
            KVCacheManager.prefix_cache_lookup_enabled(request)
        """,
        "vllm.v1.core.kv_cache_coordinator": """
            KVCacheCoordinator.cache_blocks(request,num_computed_tokens)
            KVCacheCoordinator.find_longest_cache_hit(block_hashes,max_cache_hit_length)
            KVCacheCoordinator.allocate_new_blocks(request_id,num_tokens,num_tokens_main_model)
        """,
        "vllm.v1.core.block_pool": """
            BlockPool.get_cached_block(block_hash,kv_cache_group_ids) BlockPool.hash_block_size
        """,
        "vllm.v1.request": "Request.block_hashes",
    },
    "engine/memory_pressure.py": {
        "vllm.v1.core.sched.scheduler": """
            Scheduler.running Scheduler.waiting Scheduler.requests Scheduler.max_num_active_reqs
            Scheduler.policy Scheduler.kv_cache_manager
        """,
        "vllm.v1.core.sched.request_queue": "SchedulingPolicy.PRIORITY",
        "vllm.v1.core.kv_cache_manager": """
            KVCacheManager.watermark_blocks KVCacheManager.block_pool
        """,
        "vllm.v1.core.kv_cache_coordinator": """
            KVCacheCoordinator.group_block_sizes
            KVCacheCoordinator.find_longest_cache_hit(block_hashes,max_cache_hit_length)
        """,
        "vllm.v1.core.block_pool": "BlockPool.num_gpu_blocks",
        "vllm.v1.request": """
            Request.num_tokens Request.num_computed_tokens Request.block_hashes Request.priority
        """,
    },
    "engine/replays.py": {
        "vllm.v1.core.sched.scheduler": """
            Scheduler.requests Scheduler.running Scheduler.waiting Scheduler.num_spec_tokens
            Scheduler.add_request(request) Scheduler.finish_requests(request_ids,finished_status)
            Scheduler.kv_cache_config Scheduler.log_stats
        """,
        "vllm.v1.kv_cache_interface": """
            KVCacheConfig.kv_cache_groups KVCacheGroupSpec.layer_names
        """,
        "vllm.v1.core.sched.request_queue": """
            RequestQueue.remove_request(request) RequestQueue.prepend_request(request)
        """,
        "vllm.v1.core.kv_cache_manager": "KVCacheManager.block_pool",
        "vllm.v1.core.block_pool": """
            BlockPool.touch(blocks) BlockPool.free_blocks(ordered_blocks)
        """,
        "vllm.v1.core.single_type_kv_cache_manager": """
            FullAttentionManager.req_to_blocks FullAttentionManager.block_size
        """,
        "vllm.v1.core.kv_cache_utils": "KVCacheBlock.block_id",
        "vllm.v1.request": """
            Request.__init__(request_id,prompt_token_ids,sampling_params,pooling_params,
            client_index,arrival_time,cache_salt,priority) Request.all_token_ids Request.num_tokens
            Request.num_computed_tokens Request.mm_features Request.prompt_embeds
            Request.lora_request Request.skip_reading_prefix_cache
            RequestStatus.FINISHED_ABORTED
        """,
    },
    "engine/table.py": {
        "vllm.v1.request": """
            Request.num_prompt_tokens Request.max_tokens Request.resumable Request.pooling_params
        """,
    },
    "engine/request.py": {"vllm.v1.request": "Request.num_computed_tokens Request.num_tokens"},
    "config/core_options.py": {
        "vllm.v1.request": "Request.sampling_params Request.mm_features Request.prompt_embeds"
    },
    "metrics/report.py": {
        "vllm.v1.metrics.stats": "SchedulerStats.kv_connector_stats",
        "vllm.v1.engine": "EngineCoreOutputs.scheduler_stats",
    },
    "metrics/logger.py": {
        "vllm.v1.metrics.loggers": """
            StatLoggerManager.__init__(vllm_config,engine_idxs,custom_stat_loggers)
            AggregateStatLoggerBase PrometheusStatLogger._gauge_cls
            PrometheusStatLogger._counter_cls PrometheusStatLogger._histogram_cls
        """,
    },
    "rules/step_plan.py": {"vllm.v1.core.sched.output": "SchedulerOutput.num_scheduled_tokens"},
    "compat/vllm_0_32.py": {
        "vllm.envs": "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        "vllm.v1.core.kv_cache_utils": """
            get_kv_cache_configs(vllm_config,kv_cache_specs,available_memory)
        """,
    },
    "compat/vllm_0_33.py": {
        "vllm.v1.core.kv_cache_planning": """
            get_global_kv_cache_groups(vllm_config,kv_cache_specs) get_kv_cache_configs(vllm_config,
            kv_cache_specs,available_memory,global_kv_cache_groups)
        """,
        "vllm.config": "CacheConfig.user_specified_block_size CacheConfig.block_size",
    },
    "tools/plan/memory.py": {
        "vllm.v1.core.kv_cache_utils": "get_kv_cache_capacity",
        "vllm.distributed.utils": "get_pp_indices",
    },
    "tools/plan/model.py": {
        "vllm.utils.torch_utils": "kv_cache_dtype_str_to_dtype",
        "vllm.v1.kv_cache_interface": "get_kv_quant_mode AttentionSpec.kv_quant_mode",
    },
    "serving/cpu_dtype.py": {"vllm.engine.arg_utils": "EngineArgs.create_model_config"},
    "calibrate/local_engine.py": {
        "vllm.engine.arg_utils": "EngineArgs.create_model_config",
        "vllm.tokenizers": "get_tokenizer",
    },
    **TIER_HOOKS,
    **WORKER_HOOKS,
}
