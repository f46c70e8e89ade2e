"""The commands of `vllm-kvevict`. Nothing else in the package imports them."""
