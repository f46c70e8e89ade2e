"""The CUDA operations: thin wrappers around the extension of ``csrc/`` (docs/dev/kernels.md).

Every function has the interface of its counterpart in ``ops/torch``, with two exceptions that avoid
host synchronisation: the caller passes sizes that depend on data, and preconditions on device data
are asserted on the device.
"""
