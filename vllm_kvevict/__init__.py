"""Per-head KV-cache eviction for vLLM that gives whole blocks back to the block pool."""

__version__ = "0.1.0"
