"""A server that benchmarks start and stop, and that is none."""

from pathlib import Path
from typing import Any, ClassVar, Self

from benchmarks.server import ServerFailed


class FakeServer:
    """Takes the arguments of ``benchmarks.server.Server``.

    A server that evicts counts 100 evictions whenever it is asked. One with a name in ``ill`` does
    not start, and neither does one with a flag in ``ill``; ``says`` is what it logs.
    """

    started: ClassVar[list[str]] = []
    ill: tuple[str, ...] = ()
    says = ""
    url, model = "http://x", "m"

    def __init__(
        self,
        model: Path,
        flags: list[str],
        log: Path,
        timeout_s: float,
        env: dict[str, str] | None = None,
    ) -> None:
        self.flags, self.log, self.env, self.count = flags, log, env, 0

    @property
    def evicts(self) -> bool:
        return "--kv-eviction" in self.flags

    def __enter__(self) -> Self:
        self.started.append(self.log.stem)
        if self.says:
            self.log.write_text(self.says)
        if {self.log.stem, *self.flags} & set(self.ill):
            raise ServerFailed("no memory")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stop(self) -> int:
        return 0

    def warm_up(self) -> None:
        self.count += 7

    def evictions(self) -> dict[str, int]:
        self.count += 100 * self.evicts
        return dict(evictions=self.count, evictions_prefill=self.count)

    def metric(self, name: str) -> float:
        return 5.0


def fresh(**values: Any) -> type[FakeServer]:
    """Return a class of its own for a test, with attributes of its own."""
    return type("Fresh", (FakeServer,), {"started": [], **values})
