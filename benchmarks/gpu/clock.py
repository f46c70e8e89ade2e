"""Times on a GPU, and what its memory can move; on a CPU the same calls, to try the scripts."""

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20
AHEAD_CYCLES = 20_000_000
"""What the GPU idles before each run, about 10 ms, in which the host queues all of it."""


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Times of ``run`` on the GPU, each from a flushed L2 cache, after three warm-ups.

    The host is ahead of the GPU, so launches are not timed unless ``run`` waits for the GPU.
    """
    for _ in range(3 if device.type == "cuda" else 1):
        run()
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return [(time.perf_counter() - started) * 1000]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def spread(times: list[float]) -> dict[str, float]:
    """Median and the middle half of some times."""
    times = sorted(times)
    quarter = len(times) // 4
    return {
        "median_ms": statistics.median(times),
        "low_ms": times[quarter],
        "high_ms": times[-1 - quarter],
    }


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written per second by a large copy, median of 20."""
    source = torch.empty(num_bytes // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), device, 20)
    return 2 * source.numel() / statistics.median(times) * 1000


def describe(device: torch.device) -> str:
    """The card, or that there was none."""
    if device.type != "cuda":
        return "CPU: a trial of the script, whose times mean nothing"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.multi_processor_count} SMs, {found.total_memory >> 30} GiB"
