"""The alternatives to eviction at equal KV-cache memory: ``python -m benchmarks.alternatives``."""
