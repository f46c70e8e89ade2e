"""The emulated CUDA kernels, and one rank, for tests of what runs evictions."""

from tests.ranks import one_rank  # noqa: F401
from tests.unit.ops.cuda.conftest import emulated, emulation  # noqa: F401
