"""vLLM's real schedulers on machines that we do not have (docs/dev/simulator.md)."""
