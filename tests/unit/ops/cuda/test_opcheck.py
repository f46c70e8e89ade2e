"""torch.library.opcheck on the emulated operations."""

import pytest

from tests.emulation.build import NAMESPACE
from tests.kernels import opcheck

pytestmark = [pytest.mark.usefixtures("emulation"), pytest.mark.slow]


def test_opcheck():
    opcheck.check("cpu", NAMESPACE)
