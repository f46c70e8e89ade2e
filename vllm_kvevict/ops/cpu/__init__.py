"""Operations compiled by Numba, which vLLM brings: evictions on CPUs, one core.

Each has the contract of the reference operation that it is named after; ``ops/host.py`` chooses.
"""
