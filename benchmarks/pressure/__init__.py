"""Stock vLLM, eviction always and eviction under pressure, over HTTP (docs/pressure.md)."""
