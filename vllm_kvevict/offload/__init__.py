"""vLLM's own offload of KV blocks to host memory, beside eviction."""
