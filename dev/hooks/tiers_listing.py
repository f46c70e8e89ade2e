"""Uses of vLLM internals by what keeps KV outside of the cache: as in :mod:`listing`."""

TIER_HOOKS = {
    "engine/tiered_stores.py": {
        "vllm.v1.core.block_pool": """
            BlockPool.get_new_blocks(num_blocks) BlockPool.free_blocks(ordered_blocks)
            BlockPool.get_num_free_blocks
        """,
        "vllm.v1.request": """
            Request.lora_request Request.num_tokens Request.kv_transfer_params
        """,
        "vllm.v1.core.kv_cache_manager": "KVCacheManager.watermark_blocks",
        "vllm.v1.core.sched.scheduler": "Scheduler.running",
    },
    "serving/offload.py": {
        "vllm.config": """
            KVTransferConfig.kv_connector KVTransferConfig.kv_role
            KVTransferConfig.kv_connector_extra_config
        """,
    },
    "serving/connectors.py": {
        "vllm.config": """
            KVTransferConfig.kv_connector KVTransferConfig.kv_connector_module_path
            VllmConfig.kv_transfer_config VllmConfig.speculative_config
            ParallelConfig.pipeline_parallel_size ModelConfig.use_mla
            ModelConfig.get_total_num_hidden_layers KVTransferConfig.enable_permute_local_kv
            KVTransferConfig.kv_connector_extra_config KVTransferConfig.kv_buffer_device
        """,
    },
    "worker/load_fence.py": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": """
            KVConnectorBase_V1.start_load_kv(forward_context)
            KVConnectorBase_V1._get_connector_metadata
        """,
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata": """
            NixlConnectorMetadata.reqs_to_recv NixlConnectorMetadata.push_registrations
        """,
        "vllm.utils.gpu_sync_debug": "gpu_sync_allowed",
    },
    "worker/failed_loads.py": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": """
            KVConnectorBase_V1.start_load_kv(forward_context)
            KVConnectorBase_V1.wait_for_save KVConnectorBase_V1.get_block_ids_with_load_errors
            KVConnectorBase_V1._get_connector_metadata
        """,
        "vllm.v1.core.sched.output": "SchedulerOutput.has_sync_kv_loads",
    },
    "engine/remote_prefill.py": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": """
            KVConnectorBase_V1.get_num_new_matched_tokens(request,num_computed_tokens)
        """,
        "vllm.v1.request": "Request.num_computed_tokens Request.num_tokens",
        "vllm.v1.core.sched.output": """
            SchedulerOutput.num_scheduled_tokens SchedulerOutput.scheduled_new_reqs
            SchedulerOutput.scheduled_cached_reqs SchedulerOutput.total_num_scheduled_tokens
            CachedRequestData.req_ids CachedRequestData.resumed_req_ids
            CachedRequestData.new_token_ids CachedRequestData.all_token_ids
            CachedRequestData.new_block_ids CachedRequestData.num_computed_tokens
            CachedRequestData.num_output_tokens
        """,
    },
    "engine/planner.py": {
        "vllm.v1.core.sched.scheduler": "Scheduler.current_step",
        "vllm.v1.request": "Request.next_decode_eligible_step",
    },
    "engine/lost_blocks.py": {
        "vllm.v1.core.sched.output": "SchedulerOutput.has_sync_kv_loads",
        "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator.single_type_managers",
        "vllm.v1.core.single_type_kv_cache_manager": """
            SingleTypeKVCacheManager.req_to_blocks SingleTypeKVCacheManager.block_size
            SingleTypeKVCacheManager.kv_cache_group_id
        """,
        "vllm.v1.core.kv_cache_utils": "KVCacheBlock.block_id KVCacheBlock.is_null",
    },
    "engine/offload.py": {
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": """
            OffloadingConnector._max_loadable_tokens(request,num_computed_tokens)
            OffloadingConnector.scheduler
        """,
        "vllm.v1.core.sched.scheduler": "Scheduler.connector Scheduler.kv_cache_config",
        "vllm.v1.kv_cache_interface": "KVCacheConfig.kv_cache_groups",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": """
            OffloadingConnectorScheduler._req_status OffloadingConnectorScheduler.config
            OffloadingConnectorScheduler._block_id_to_pending_jobs
            SchedulerOffloadConfig.kv_group_configs GroupOffloadConfig.tokens_per_chunk
            RequestOffloadState.max_offload_tokens RequestOffloadState.transfer_jobs
        """,
        "vllm.v1.request": "Request.kv_transfer_params",
    },
    "worker/cpu_offload.py": {
        "vllm.v1.kv_offload.cpu.spec": "CPUOffloadingSpec.get_worker(kv_caches)",
        "vllm.v1.kv_offload.base": """
            OffloadingWorker.submit_store(job_id,src_spec,dst_spec)
            OffloadingWorker.submit_load(job_id,src_spec,dst_spec) OffloadingWorker.get_finished
            OffloadingWorker.wait(job_ids) OffloadingWorker.shutdown CanonicalKVCaches.tensors
            CanonicalKVCaches.group_data_refs CanonicalKVCacheRef.tensor_idx
            CanonicalKVCacheTensor.page_size_bytes GPULoadStoreSpec.group_sizes
            GPULoadStoreSpec.block_indices BlockIDsLoadStoreSpec.block_ids TransferResult
        """,
    },
}
