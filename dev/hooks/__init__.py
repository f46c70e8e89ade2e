"""The names of vLLM that the plugin touches, and a check of a vLLM's source for them."""
