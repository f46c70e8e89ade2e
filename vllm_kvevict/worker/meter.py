"""What a worker measures of its evictions, without ever waiting for the device."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvevict.metrics.report import MEASURED, Audited
from vllm_kvevict.timeline.step_plan import Replay

SAMPLE_EVERY = 16
"""Of this many evictions in a row the head budgets of the first are looked at."""

Measured = dict[str, list[Any]]


def head_spread(pages: torch.Tensor) -> torch.Tensor:
    """How uneven the heads are: the largest head's pages over the mean, averaged over layers.

    Args:
        pages: [L, H] int pages of every KV head of this rank.

    Returns:
        Scalar float64: 1 for equal heads, H where one head has nearly everything.

    """
    pages = pages.double()
    return (pages.amax(1) / pages.mean(1)).mean()


class EvictionMeter:
    """Seconds of every eviction of one rank, and the head spread of some.

    On CUDA both are read from events and pinned memory once the device is past them, so a value
    may be reported with a later step.

    Args:
        device: Where evictions run.

    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._evictions = self._failed = 0
        self._sampled: list[torch.Tensor] | None = None
        self._compared: deque[tuple[Replay, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._restores: deque[tuple[str, Callable[[], float | None]]] = deque()
        self._pending: deque[tuple[Callable[[], float | None], int, list[torch.Tensor]]] = deque()

    @contextmanager
    def evictions(self, count: int) -> Iterator[None]:
        """Time evictions of ``count`` requests, all groups and layers; each has an equal share."""
        self._sampled = [] if -self._evictions % SAMPLE_EVERY < count else None
        self._evictions += count
        stop = _device_watch() if self._cuda else _host_watch()
        yield
        self._pending.append((stop(), count, self._sampled or []))

    @contextmanager
    def restore(self, tier: str) -> Iterator[None]:
        """Time the copy of a store into the KV cache, which comes from ``tier``."""
        stop = _device_watch() if self._cuda else _host_watch()
        yield
        self._restores.append((tier, stop()))

    def compared(self, replay: Replay, values: torch.Tensor) -> None:
        """Take what was lost by an eviction: [2] float32 nats and share of equal first choices."""
        event = None
        if self._cuda:
            host = torch.empty(2, dtype=values.dtype, pin_memory=True)
            values, event = host.copy_(values, non_blocking=True), torch.cuda.Event()
            event.record()
        self._compared.append((replay, values, event))

    def failed(self) -> None:
        """Count a failure of a policy, once per KV-cache group."""
        self._failed += 1

    def pages(self, pages: torch.Tensor) -> None:
        """Look at the split of one group's eviction, [L, H] int, if it is one of the sample."""
        if self._sampled is None:
            return
        spread = head_spread(pages)
        if self._cuda:
            host = torch.empty((), dtype=spread.dtype, pin_memory=True)
            spread = host.copy_(spread, non_blocking=True)
        self._sampled.append(spread)

    def take(self) -> Measured | None:
        """What is known by now and was not taken yet; None for nothing."""
        seconds: list[float] = []
        spreads: list[float] = []
        while self._pending and (taken := self._pending[0][0]()) is not None:
            _, count, sampled = self._pending.popleft()
            seconds += [taken / count] * count
            # Groups of one eviction, and evictions of one launch, count as one: their mean.
            if sampled:
                spreads.append(sum(map(float, sampled)) / len(sampled))
        audits, restores = self._arrived(), []
        while self._restores and (taken := self._restores[0][1]()) is not None:
            restores.append((self._restores.popleft()[0], taken))
        if not seconds and not audits and not restores:
            return None
        failed, self._failed = [1.0] * self._failed, 0
        more: Measured = {"failed": failed, "audits": audits, "restores": restores}
        return {"seconds": seconds, "head_spread": spreads} | {k: v for k, v in more.items() if v}

    def _arrived(self) -> list[Audited]:
        """Comparisons that the host can read by now."""
        found: list[Audited] = []
        while self._compared:
            replay, values, event = self._compared[0]
            if event is not None and not event.query():
                break
            self._compared.popleft()
            nats, agreed = values.tolist()
            found.append((replay.of, replay.policy, replay.kept, nats, agreed))
        return found


def _host_watch() -> Callable[[], Callable[[], float | None]]:
    start = time.perf_counter()

    def stop() -> Callable[[], float | None]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return stop


def _device_watch() -> Callable[[], Callable[[], float | None]]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()

    def stop() -> Callable[[], float | None]:
        end.record()
        return lambda: start.elapsed_time(end) / 1000 if end.query() else None

    return stop


def attach(measured: Measured | None, output: Any) -> Any:
    """Send values with a model runner's output; an output of another kind carries none.

    Returns:
        The output, or one in its place that carries the values.

    """
    if measured is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _MeasuredOutput(output, measured)
    if isinstance(output, ModelRunnerOutput):
        if output is EMPTY_MODEL_RUNNER_OUTPUT:
            output = copy(output)
        setattr(output, MEASURED, measured)
    return output


class _MeasuredOutput(AsyncModelRunnerOutput):
    """An output that is still on the device, and values for when it has arrived."""

    def __init__(self, output: AsyncModelRunnerOutput, measured: Measured) -> None:
        self._output = output
        self._measured = measured

    def get_output(self) -> ModelRunnerOutput:
        return attach(self._measured, self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """What vLLM 0.33 asks for where :meth:`get_output` fails."""
        return self._output.get_kv_connector_output()
