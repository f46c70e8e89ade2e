"""The stream of a pretended device, which has done what it was asked when a test says so."""

from typing import Any

import torch


class Stream:
    """Downloads and events of one device; ``waits`` names what the host waited for."""

    def __init__(self, waits: list[str]) -> None:
        self.waits = waits
        self.asked = self.done = 0
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []

    def download(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy later; until then the host reads what no result is."""
        self._arriving.append((target, source.clone()))
        kind = target.dtype
        target.fill_(float("nan") if kind.is_floating_point else kind != torch.bool and -77)

    @torch.inference_mode()
    def finish(self) -> None:
        """Reach the end of all that was asked."""
        for target, source in self._arriving:
            target.copy_(source)
        self._arriving.clear()
        self.done = self.asked

    def event(self, enable_timing: bool = False, **options: Any) -> "Event":
        return Event(self)

    def synchronize(self, device: Any = None) -> None:
        self.waits.append("synchronize")
        self.finish()


class Event:
    """In the place of ``torch.cuda.Event``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._place = 0

    def record(self, stream: Any = None) -> None:
        self._stream.asked += 1
        self._place = self._stream.asked

    def query(self) -> bool:
        return self._stream.done >= self._place

    def synchronize(self) -> None:
        self._stream.synchronize()

    def elapsed_time(self, end: "Event") -> float:
        if not (self._place and end._place and self.query() and end.query()):
            raise RuntimeError("device not ready")
        return 1.0
