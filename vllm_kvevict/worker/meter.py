"""Measurements of a worker's evictions, taken without waiting for the device."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvevict.metrics.report import MEASURED, Audited
from vllm_kvevict.rules.step_plan import Replay

SAMPLE_EVERY = 16
"""The head budgets of one in this many evictions are sampled."""

Measured = dict[str, list[Any]]


def head_spread(pages: torch.Tensor) -> torch.Tensor:
    """Return the pages of the largest head divided by the mean, averaged over layers.

    Args:
        pages: [L, H] int pages of every KV head of this rank.

    Returns:
        Scalar float64: 1 for equal heads, H if one head has all pages.

    """
    pages = pages.double()
    return (pages.amax(1) / pages.mean(1)).mean()


class EvictionMeter:
    """Seconds of every eviction of one rank, and the head spread of a sample of them.

    On CUDA, both are read from events and pinned memory once the device has passed them, so a
    value may be reported with a later step.

    Args:
        device: Where evictions run.

    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._evictions = self._failed = 0
        self.unscored: list[tuple[str, int]] = []
        """Requests whose policy failed to choose a store, each with the first block of the store,
        since the last :meth:`take`."""
        self._sampled: list[torch.Tensor] | None = None
        self._compared: deque[tuple[Replay, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._restores: deque[tuple[str, Callable[[], float | None]]] = deque()
        self._pending: deque[tuple[Callable[[], float | None], int, list[torch.Tensor]]] = deque()

    @contextmanager
    def evictions(self, count: int) -> Iterator[None]:
        """Time the evictions of ``count`` requests in all groups; each gets an equal share."""
        self._sampled = [] if -self._evictions % SAMPLE_EVERY < count else None
        self._evictions += count
        stop = _device_watch() if self._cuda else _host_watch()
        yield
        self._pending.append((stop(), count, self._sampled or []))

    @contextmanager
    def restore(self, tier: str) -> Iterator[None]:
        """Time the copy of a store from ``tier`` into the KV cache."""
        stop = _device_watch() if self._cuda else _host_watch()
        yield
        self._restores.append((tier, stop()))

    def compared(self, replay: Replay, values: torch.Tensor) -> None:
        """Record the loss of an eviction: [2] float32, nats and share of equal likeliest tokens."""
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
        """Record the pages [L, H] int of each head in one group if the eviction is sampled."""
        if self._sampled is None:
            return
        spread = head_spread(pages)
        if self._cuda:
            host = torch.empty((), dtype=spread.dtype, pin_memory=True)
            spread = host.copy_(spread, non_blocking=True)
        self._sampled.append(spread)

    def take(self) -> Measured | None:
        """Return the measurements that are complete and not yet taken; None if there are none."""
        seconds: list[float] = []
        spreads: list[float] = []
        while self._pending and (taken := self._pending[0][0]()) is not None:
            _, count, sampled = self._pending.popleft()
            seconds += [taken / count] * count
            # The groups of one eviction, and the evictions of one launch, are averaged.
            if sampled:
                spreads.append(sum(map(float, sampled)) / len(sampled))
        audits, restores = self._arrived(), []
        while self._restores and (taken := self._restores[0][1]()) is not None:
            restores.append((self._restores.popleft()[0], taken))
        unscored, self.unscored = self.unscored, []
        if not (seconds or audits or restores or unscored):
            return None
        failed, self._failed = [1.0] * self._failed, 0
        more: Measured = dict(failed=failed, audits=audits, restores=restores, unscored=unscored)
        return {"seconds": seconds, "head_spread": spreads} | {k: v for k, v in more.items() if v}

    def _arrived(self) -> list[Audited]:
        """Return the comparisons that have reached the host."""
        audits: list[Audited] = []
        while self._compared:
            replay, values, event = self._compared[0]
            if event is not None and not event.query():
                break
            self._compared.popleft()
            nats, agreed = values.tolist()
            audits.append((replay.of, replay.policy, replay.kept, nats, agreed))
        return audits


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
    """Attach measurements to a model runner's output; outputs of other types carry none.

    Returns:
        The output, or a copy or wrapper of it that carries the measurements.

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
    """An output that is still on the device, with measurements to attach when it arrives."""

    def __init__(self, output: AsyncModelRunnerOutput, measured: Measured) -> None:
        self._output = output
        self._measured = measured

    def get_output(self) -> ModelRunnerOutput:
        return attach(self._measured, self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """Return the connector's output, which vLLM 0.33 reads if :meth:`get_output` fails."""
        return self._output.get_kv_connector_output()
