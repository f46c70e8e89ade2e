"""Measure which share of the budget each layer and KV head of a model needs."""

import time

BEGAN = time.monotonic()
"""When this process began to calibrate, but for the start of Python."""
