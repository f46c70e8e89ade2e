"""Stores that requests share: what they depend on, and what they are outside the KV cache."""
