"""A GPU that only its compute capability tells of."""

from typing import Any

import pytest
from vllm.platforms.interface import DeviceCapability

from vllm_kvevict.attention import choice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.platforms import current_platform

    # The CPU build has no FlashAttention of any version.
    monkeypatch.setattr(choice, "loads", lambda version: True)

    def set_capability(*capability: int) -> None:
        found = DeviceCapability(*capability)
        monkeypatch.setattr(current_platform, "get_device_capability", lambda: found)
        monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
        monkeypatch.setattr(current_platform, "is_cuda", lambda: True)

    return set_capability
