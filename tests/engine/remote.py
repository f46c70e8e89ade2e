"""The worker's half of connectors that load whole prompts: another server's KV arrives late."""

from collections.abc import Callable
from random import Random
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

LATE = 6
"""Steps within which a transfer ends."""


class Transfer:
    """A transfer in flight: where each group's content goes, and how many steps are left."""

    def __init__(self, request_id: str, blocks: list[list[int]], left: int, fails: bool) -> None:
        self.request_id = request_id
        self.blocks = blocks
        self.left = left
        self.fails = fails


class ShadowRemote:
    """Writes to the shadow's memory what another server computed for a prompt.

    Args:
        memory: What every block of the KV cache holds.
        block_size: Tokens in a block.
        seed: Draws how late transfers are, and which fail.

    """

    def __init__(self, memory: list[list[int | None]], block_size: int, seed: int) -> None:
        self.memory = memory
        self.block_size = block_size
        self.content: Callable[[str], list[int]] = lambda request_id: []
        """What full attention computes for the tokens of a request, one number for each."""
        self.loads = self.failures = self.filled = 0
        self.released: set[str] = set()
        """Requests whose blocks the other server may free."""
        self.stopped = False
        """Whether the other server stands still, which then ends no transfer."""
        self.rng = Random(seed)
        self._transfers: list[Transfer] = []

    @property
    def loading(self) -> bool:
        return bool(self._transfers)

    def begin(self, metadata: Any) -> None:
        """What ``start_load_kv`` does: fill at once, or post transfers."""
        for request_id, (groups, num_tokens) in getattr(metadata, "reqs_to_fill", {}).items():
            # All tokens but the last, of a prompt or of one that is recomputed.
            length = len(self.content(request_id)) - 1
            assert 0 < num_tokens <= length
            self._write(request_id, [list(ids) for ids in groups], length)
            self.filled += 1
        pushed = getattr(metadata, "push_registrations", {})
        for request_id, registered in pushed.items():
            self._post(request_id, registered["local_block_ids"])
        for request_id, wanted in getattr(metadata, "reqs_to_recv", {}).items():
            self.released.add(request_id)
            if request_id in pushed:
                continue
            if not wanted.awaiting_kvs:
                assert not any(wanted.local_block_ids)
                continue
            for local, there in zip(wanted.local_block_ids, wanted.remote.block_ids, strict=True):
                assert 0 < len(local) <= len(there), f"{request_id} loads nothing, or too much"
            self._post(request_id, wanted.local_block_ids)
        self._arrive()

    def _post(self, request_id: str, groups: Any) -> None:
        fails = self.rng.random() < 0.1
        late = self.rng.randrange(LATE + 1)
        self._transfers.append(Transfer(request_id, [list(ids) for ids in groups], late, fails))

    def _arrive(self) -> None:
        if self.stopped:
            return
        for transfer in self._transfers:
            if transfer.left == 0 and not transfer.fails:
                # NIXL pairs the blocks of both servers from the end.
                length = len(self.content(transfer.request_id))
                self._write(transfer.request_id, transfer.blocks, length)

    def after(self) -> KVConnectorOutput:
        """What a step reports."""
        if self.stopped:
            return KVConnectorOutput()
        done, failed, invalid = set[str](), set[str](), set[int]()
        for transfer in [one for one in self._transfers if one.left == 0]:
            self._transfers.remove(transfer)
            done.add(transfer.request_id)
            self.loads += 1
            if transfer.fails:
                self.failures += 1
                failed.add(transfer.request_id)
                invalid |= set(transfer.blocks[0])
        for transfer in self._transfers:
            transfer.left -= 1
        return KVConnectorOutput(
            finished_recving=done, failed_recving=failed, invalid_block_ids=invalid
        )

    def _write(self, request_id: str, blocks: list[list[int]], num_tokens: int) -> None:
        content, size = self.content(request_id), self.block_size
        last = -(-num_tokens // size)
        for ids in blocks:
            for index, block in enumerate(ids, last - len(ids)):
                assert index >= 0
                slots: list[int | None] = list(content[index * size : (index + 1) * size])
                del slots[max(0, num_tokens - index * size) :]
                self.memory[block] = slots + [None] * (size - len(slots))
