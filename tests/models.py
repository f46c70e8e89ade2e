"""The models and prompts that tests use are those of the benchmarks."""

from benchmarks.tiny_model import cached_tiny_llama, random_prompt, random_text, tiny_llama

__all__ = ["cached_tiny_llama", "random_prompt", "random_text", "tiny_llama"]
