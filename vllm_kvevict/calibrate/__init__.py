"""Measure which share of the budget each layer and KV head of a model needs."""
