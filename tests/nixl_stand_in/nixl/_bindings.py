"""The one class that vLLM imports from NIXL's bindings."""

from dataclasses import dataclass


@dataclass
class nixlXferTelemetry:
    """Times in microseconds and sizes in bytes of one transfer."""

    xferDuration: float = 1.0
    postDuration: float = 1.0
    totalBytes: int = 0
    descCount: int = 0
