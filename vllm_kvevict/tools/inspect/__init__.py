"""``vllm-kvevict inspect``: one prompt, and a picture of what eviction kept of it."""
