"""Transfers are posted when the evictions before them are done, on a pretended stream."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from tests.pretend_stream import Stream
from vllm_kvevict.worker.load_fence import LoadFence


class Connector:
    """Posts a transfer into block 1, past the stream."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache = cache
        self.metadata: Any = None
        self.posted = 0

    def _get_connector_metadata(self) -> Any:
        return self.metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if getattr(self.metadata, "reqs_to_recv", True):
            self.cache[1] = 7.0
            self.posted += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream([])
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    return stream


def pulls(*names: str) -> NixlConnectorMetadata:
    metadata = NixlConnectorMetadata()
    metadata.reqs_to_recv = dict.fromkeys(names)  # type: ignore[misc]
    return metadata


def survivors(cache: torch.Tensor, stream: Stream) -> None:
    """Enqueue what an eviction does: survivors move from block 1 to block 2."""
    # A download reads its source when it is asked for; this one reads it when it runs.
    stream._arriving.append((cache[2], cache[1]))


def test_a_transfer_waits_for_the_evictions_before_it(stream: Stream) -> None:
    for fenced in (True, False):
        cache = torch.arange(3.0)[:, None].repeat(1, 4)
        connector = Connector(cache)
        fence = LoadFence(connector)  # type: ignore[arg-type]
        connector.metadata = pulls("r")
        survivors(cache, stream)
        if fenced:
            fence.record()
        connector.start_load_kv(None)
        stream.finish()
        kept = cache[2].unique().tolist()
        assert kept == ([1.0] if fenced else [7.0]), "without the fence others' KV survives"
        assert cache[1].unique().tolist() == [7.0]


def test_steps_without_loads_or_evictions_wait_for_nothing(stream: Stream) -> None:
    connector = Connector(torch.zeros(3, 4))
    fence = LoadFence(connector)  # type: ignore[arg-type]
    connector.metadata = pulls("r")
    connector.start_load_kv(None)
    assert stream.waits == [], "nothing was evicted"
    fence.record()
    connector.metadata = pulls()
    connector.start_load_kv(None)
    assert stream.waits == [], "nothing is loaded"
    connector.metadata = pulls("s")
    connector.start_load_kv(None)
    assert stream.waits == ["synchronize"], "the evictions of an earlier step still count"
    connector.start_load_kv(None)
    assert stream.waits == ["synchronize"] and connector.posted == 3


def test_blocks_that_the_other_server_writes_to(stream: Stream) -> None:
    """In push mode a registration lets the other server write at any time."""
    connector = Connector(torch.zeros(3, 4))
    fence = LoadFence(connector)  # type: ignore[arg-type]
    connector.metadata = pulls()
    connector.metadata.push_registrations = {"r": {}}
    fence.record()
    connector.start_load_kv(None)
    assert stream.waits == ["synchronize"]


def test_metadata_that_says_nothing_of_loads(stream: Stream) -> None:
    connector = Connector(torch.zeros(3, 4))
    fence = LoadFence(connector)  # type: ignore[arg-type]
    connector.metadata = SimpleNamespace()
    fence.record()
    connector.start_load_kv(None)
    assert stream.waits == ["synchronize"]
