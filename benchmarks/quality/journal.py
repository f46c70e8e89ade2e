"""Answers on disk as they come, so that a run that was cut off goes on where it stopped."""

import hashlib
import json
from pathlib import Path
from threading import Lock

from benchmarks.quality.endpoint import Completion


class Journal:
    """JSON Lines of answers by what was asked. Safe from several threads.

    Args:
        path: Appended to; made where it is missing.
        resume: Whether the answers that it holds count. Otherwise it begins anew.
        model: The model and the flags of its server. Part of every key: answers of another one are
            never found.

    """

    def __init__(self, path: Path, resume: bool, model: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._model, self._lock = model, Lock()
        self._found: dict[str, Completion] = {}
        if resume and path.exists():
            # A process that was killed can leave half a line, which has no end.
            whole = path.read_text().rpartition("\n")[0]
            for line in filter(None, whole.split("\n")):
                entry = json.loads(line)
                self._found[entry["key"]] = Completion(entry["text"], tuple(entry["ids"]))
            path.write_text(whole + "\n" if whole else "")
        else:
            path.write_text("")
        self._file = path.open("a")

    def _key(self, ids: tuple[int, ...], limit: int, xargs: dict) -> str:
        asked = json.dumps([self._model, ids, limit, sorted(xargs.items())])
        return hashlib.sha256(asked.encode()).hexdigest()[:32]

    def find(self, ids: tuple[int, ...], limit: int, xargs: dict) -> Completion | None:
        """The answer to a request, where it was given before."""
        return self._found.get(self._key(ids, limit, xargs))

    def enter(
        self, ids: tuple[int, ...], limit: int, xargs: dict, answer: Completion
    ) -> Completion:
        """Keep an answer; returns it."""
        key = self._key(ids, limit, xargs)
        line = json.dumps({"key": key, "text": answer.text, "ids": answer.ids})
        with self._lock:
            self._found[key] = answer
            self._file.write(line + "\n")
            self._file.flush()
        return answer
