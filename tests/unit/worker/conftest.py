"""The emulated CUDA kernels, for tests of what runs them."""

from tests.unit.ops.cuda.conftest import emulated, emulation  # noqa: F401
