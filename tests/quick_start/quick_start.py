"""For processes that tests start: vLLM's children are forked, and imports are left out of its
garbage collections.

vLLM's CPU platform spawns its engine and its workers, and each imports for ten seconds what its
parent has. On GPUs vLLM forks where it can, so both ways are its own. Children take what the
environment says: ``KVEVICT_TEST_SPAWN`` set leaves all as vLLM has it.

A forked engine holds the server's port, too. At its end the server asks whoever holds it for its
command, which an engine that has just ended does not have any more.
"""

import gc
import os
from typing import Any


def register() -> None:
    """A general plugin of vLLM: every process loads it before it makes a configuration."""
    if os.environ.get("KVEVICT_TEST_SPAWN"):
        return
    import psutil
    from vllm.platforms.cpu import CpuPlatform

    command = psutil.Process.cmdline

    def cmdline(self: psutil.Process) -> list[str]:
        try:
            return command(self)
        except psutil.ZombieProcess:
            return []

    psutil.Process.cmdline = cmdline

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type[CpuPlatform], *args: Any) -> None:
        original(cls, *args)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()
        # At its end vLLM unfreezes, and a collection then copies all pages that are shared.
        gc.unfreeze = lambda: None

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
