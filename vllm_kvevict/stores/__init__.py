"""Stores that requests share: their keys, and their form outside the KV cache."""
