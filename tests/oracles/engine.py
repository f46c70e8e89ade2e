"""The engine whose evictions are recorded is that of the benchmarks."""

from benchmarks.oracles.engine import Engine, Recorder, engine, layers_by_depth, set_aside
from tests import kernels_once

assert kernels_once
__all__ = ["Engine", "Recorder", "engine", "layers_by_depth", "set_aside"]
