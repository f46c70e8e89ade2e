"""What the processes of a server hold: memory, open files, threads, shared memory."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.server import Server


def group(server: Server) -> list[psutil.Process]:
    """Living processes of the server's process group, oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            mine = os.getpgid(process.pid) == server.process.pid
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def worker(server: Server) -> psutil.Process:
    """The process that runs the model, the only one of its kind."""
    (found,) = [p for p in group(server) if "VLLM::Worker" in " ".join(p.cmdline())]
    return found


def shared_memory(server: Server) -> set[Path]:
    """Files below /dev/shm that the server has mapped."""
    paths = {m.path for process in group(server) for m in process.memory_maps()}
    return {Path(path) for path in paths if path.startswith("/dev/shm/")}


@dataclass(frozen=True)
class Held:
    """Of all processes of a server: resident bytes, open files, threads, number of them."""

    resident: int
    files: int
    threads: int
    processes: int

    @classmethod
    def of(cls, server: Server) -> "Held":
        members = group(server)
        return cls(
            sum(process.memory_info().rss for process in members),
            sum(process.num_fds() for process in members),
            sum(process.num_threads() for process in members),
            len(members),
        )
