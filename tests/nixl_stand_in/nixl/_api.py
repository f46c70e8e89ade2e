"""A stand-in for NIXL that copies between processes of one machine.

vLLM's real ``NixlConnector`` runs over it. Memory of other processes is read and written with
``process_vm_readv`` and ``process_vm_writev``; notifications are datagrams.
"""

import ctypes
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nixl._bindings import nixlXferTelemetry

PR_SET_PTRACER = 0x59616D61
ANY = ctypes.c_ulong(-1)
PIECES = 256
"""Pieces of memory in one call, at most IOV_MAX."""

_libc = ctypes.CDLL(None, use_errno=True)


class iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def _copy(call: Any, pid: int, local: np.ndarray, remote: np.ndarray) -> None:
    """Copy pieces [n, (address, bytes, ...)] between this process and another."""
    assert (local[:, 1] == remote[:, 1]).all(), "pieces of different sizes"
    for first in range(0, len(local), PIECES):
        mine, theirs = local[first : first + PIECES], remote[first : first + PIECES]
        vectors = [
            (iovec * len(part))(*((int(row[0]), int(row[1])) for row in part))
            for part in (mine, theirs)
        ]
        count, wanted = len(mine), int(mine[:, 1].sum())
        done = call(pid, vectors[0], count, vectors[1], count, 0)
        if done != wanted:
            raise OSError(ctypes.get_errno(), f"copied {done} of {wanted} bytes")


def _pieces(descs: np.ndarray) -> np.ndarray:
    """Pieces [n, (address, bytes, device)], which are given like this or as rows of pieces, [m,
    (address, bytes, device, stride, count)]."""
    if descs.shape[1] == 3:
        return descs
    counts = descs[:, 4].astype(np.int64)
    rows = descs.astype(np.int64).repeat(counts, axis=0)
    index = np.arange(len(rows)) - (counts.cumsum() - counts).repeat(counts)
    return np.c_[rows[:, 0] + index * rows[:, 3], rows[:, 1:3]]


for _name in ("process_vm_readv", "process_vm_writev"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t


class nixl_agent_config:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class _Transfer:
    def __init__(self, operation: str, pid: int, pieces: tuple[np.ndarray, np.ndarray]) -> None:
        self.operation = operation
        self.pid = pid
        self.pieces = pieces
        self.notify: tuple[str, bytes] | None = None
        self.state = "INIT"


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config | None = None) -> None:
        self.name = name
        # Other processes may read this one's memory.
        _libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
        self._folder = tempfile.TemporaryDirectory(prefix="nixl-")
        self._path = str(Path(self._folder.name) / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self._socket.setblocking(False)
        self._remote: dict[str, dict[str, Any]] = {}
        self._lists: dict[int, tuple[str, np.ndarray]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._handles = 0

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    # Memory.

    def get_reg_descs(self, ranges: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"
        return ranges

    def register_memory(self, descs: Any, backends: Any = None) -> None:
        pass

    def deregister_memory(self, desc: Any) -> None:
        pass

    def get_xfer_descs(self, blocks: Any, mem_type: str) -> np.ndarray:
        assert mem_type == "DRAM"
        return np.asarray(blocks, dtype=np.int64)

    def prep_xfer_dlist(self, agent: str, descs: np.ndarray, mem_type: str = "DRAM") -> int:
        assert mem_type == "DRAM"
        handle = self._handle()
        self._lists[handle] = agent, _pieces(descs)
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        del self._lists[handle]

    # Other agents.

    def get_agent_metadata(self) -> bytes:
        return json.dumps(dict(name=self.name, pid=os.getpid(), path=self._path)).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        agent = json.loads(metadata)
        self._remote[agent["name"]] = agent
        return agent["name"]

    def remove_remote_agent(self, agent: str) -> None:
        self._remote.pop(agent, None)

    def check_remote_metadata(self, agent: str) -> bool:
        return agent in self._remote and Path(f"/proc/{self._remote[agent]['pid']}").exists()

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        message = json.dumps([self.name, notif_msg.hex()]).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(message, self._remote[agent]["path"])

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        while True:
            try:
                name, message = json.loads(self._socket.recv(1 << 16))
            except BlockingIOError:
                return found
            found.setdefault(name, []).append(bytes.fromhex(message))

    # Transfers.

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_ids: Any,
        remote: int,
        remote_ids: Any,
        notif_msg: bytes = b"",
    ) -> int:
        agent, there = self._lists[remote]
        _, here = self._lists[local]
        pieces = here[np.asarray(local_ids)], there[np.asarray(remote_ids)]
        transfer = _Transfer(operation, self._remote[agent]["pid"], pieces)
        if notif_msg:
            transfer.notify = agent, notif_msg
        handle = self._handle()
        self._transfers[handle] = transfer
        return handle

    def transfer(self, handle: int) -> str:
        transfer = self._transfers[handle]
        local, remote = transfer.pieces
        read = transfer.operation == "READ"
        call = _libc.process_vm_readv if read else _libc.process_vm_writev
        _copy(call, transfer.pid, local, remote)
        transfer.state = "DONE"
        if transfer.notify is not None:
            self.send_notif(*transfer.notify)
        return transfer.state

    def spoil(self, handle: int) -> None:
        """Leave garbage where a transfer would read to, as one that fails half-way may."""
        local, _ = self._transfers[handle].pieces
        for address, size, *_ in local.tolist():
            ctypes.memset(address, 0x7F, size // 2)

    def check_xfer_state(self, handle: int) -> str:
        return self._transfers[handle].state

    def get_xfer_telemetry(self, handle: int) -> nixlXferTelemetry:
        local, _ = self._transfers[handle].pieces
        return nixlXferTelemetry(totalBytes=int(local[:, 1].sum()), descCount=len(local))

    def release_xfer_handle(self, handle: int) -> None:
        self._transfers.pop(handle, None)
