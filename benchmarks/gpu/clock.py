"""Times on a GPU, and what its memory can move; on a CPU the same calls, to try the scripts."""

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20
AHEAD_CYCLES = 20_000_000
"""What the GPU idles before each run, about 10 ms, in which the host queues all of it."""
CYCLES_PER_SECOND = 2e9
MOST_CYCLES = 200_000_000


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Times of ``run`` on the GPU, each from a flushed L2 cache, after three warm-ups.

    The host is ahead of the GPU, so launches are not timed unless ``run`` waits for the GPU.
    """
    for _ in range(2 if device.type == "cuda" else 0):
        run()
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return [(time.perf_counter() - started) * 1000]
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    ahead = 3 * (time.perf_counter() - started) * CYCLES_PER_SECOND
    cycles = min(MOST_CYCLES, max(AHEAD_CYCLES, int(ahead)))
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    other, total = torch.zeros_like(flush), torch.zeros((), dtype=torch.int64, device=device)
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        # Reading as much writes back what zero_ left in the cache, before the clock runs.
        torch.sum(other, dim=0, dtype=torch.int64, out=total)
        torch.cuda._sleep(cycles)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``run`` as a replay of a CUDA graph; ``run`` itself where there is no GPU."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(_kept: Callable[[], object] = run) -> None:
        # A graph keeps addresses; ``run`` keeps the tensors that are there.
        graph.replay()

    return replay


def spread(times: list[float], parts: int = 1) -> dict[str, float]:
    """Median and the middle half of some times, of one of so many equal parts of each."""
    times = sorted(one / parts for one in times)
    quarter = len(times) // 4
    return {
        "median_ms": statistics.median(times),
        "low_ms": times[quarter],
        "high_ms": times[-1 - quarter],
    }


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written per second by a large copy, median of 20."""
    source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), device, 20)
    return 2 * source.numel() / statistics.median(times) * 1000


def describe(device: torch.device) -> str:
    """The card, or that there was none."""
    if device.type != "cuda":
        return "CPU: a trial of the script, whose times mean nothing"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.multi_processor_count} SMs, {found.total_memory >> 30} GiB"
