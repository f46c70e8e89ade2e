"""Which of vLLM's names the plugin hooks into, and whether a vLLM has them."""
