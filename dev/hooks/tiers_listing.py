"""Uses of vLLM internals by what keeps KV outside of the cache: as in :mod:`listing`."""

TIER_HOOKS = {
    "tiers/stores.py": {
        "vllm.v1.core.block_pool": """
            BlockPool.get_new_blocks(num_blocks) BlockPool.free_blocks(ordered_blocks)
            BlockPool.get_num_free_blocks
        """,
        "vllm.v1.request": """
            Request.lora_request Request.num_tokens Request.kv_transfer_params
            Request.arrival_time Request.is_finished
        """,
    },
    "tiers/scheduler.py": {
        "vllm.v1.core.sched.scheduler": """
            Scheduler.add_request(request) Scheduler.schedule Scheduler._free_request(request)
            Scheduler._handle_blocked_waiting_request(request)
        """,
    },
    "tiers/overtaking.py": {
        "vllm.v1.core.sched.scheduler": """
            Scheduler.running Scheduler.waiting Scheduler.max_num_active_reqs Scheduler.policy
            Scheduler.kv_cache_manager
        """,
        "vllm.v1.core.sched.request_queue": """
            SchedulingPolicy.FCFS RequestQueue.remove_requests(requests)
            RequestQueue.prepend_request(request)
        """,
        "vllm.v1.core.kv_cache_manager": """
            KVCacheManager.watermark_blocks KVCacheManager.block_pool
        """,
        "vllm.v1.core.block_pool": "BlockPool.get_num_free_blocks",
        "vllm.v1.request": "Request.num_preemptions Request.num_tokens",
    },
    "front/offload.py": {
        "vllm.config": """
            KVTransferConfig.kv_connector KVTransferConfig.kv_role
            KVTransferConfig.kv_connector_extra_config
        """,
    },
    "offload/scheduler.py": {
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": "OffloadingConnector",
        "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
        "vllm.v1.core.sched.scheduler": """
            Scheduler._get_local_prefix_cache_hit(request)
            Scheduler.reset_prefix_cache(reset_running_requests,reset_connector)
        """,
    },
    "offload/blocks.py": {
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": """
            OffloadingConnector._max_loadable_tokens(request,num_computed_tokens)
            OffloadingConnector.scheduler
        """,
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": """
            OffloadingConnectorScheduler._req_status OffloadingConnectorScheduler.config
            OffloadingConnectorScheduler._block_id_to_pending_jobs
            SchedulerOffloadConfig.kv_group_configs GroupOffloadConfig.tokens_per_chunk
            RequestOffloadState.max_offload_tokens RequestOffloadState.transfer_jobs
        """,
        "vllm.v1.request": "Request.kv_transfer_params",
    },
    "offload/spec.py": {
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
