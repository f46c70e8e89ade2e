"""The CUDA operations: thin wrappers around the extension of ``csrc/`` (docs/kernels.md).

Every function has the contract of its counterpart in ``ops/reference``, but for what would need
a host synchronisation: sizes that depend on data are given by the caller, and preconditions that
only the device can see are asserted there.
"""
