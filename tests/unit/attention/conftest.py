"""A GPU that only its compute capability tells of."""

from typing import Any

import pytest
from vllm.platforms.interface import DeviceCapability


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.platforms import current_platform

    def set_capability(*capability: int) -> None:
        found = DeviceCapability(*capability)
        monkeypatch.setattr(current_platform, "get_device_capability", lambda: found)
        monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
        monkeypatch.setattr(current_platform, "is_cuda", lambda: True)

    return set_capability
