"""Serving load: a sweep over policies, budgets and KV memory, and ratios to stock vLLM."""
