"""Requests to a running server as JSON over HTTP."""

import json
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 3600.0


class Refused(Exception):
    """The server cannot be asked. The message is one sentence.

    Args:
        message: The sentence.
        status: HTTP status of the answer; None without an answer.

    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """A server's HTTP API.

    Args:
        url: Its address, with or without ``/v1``.
        key: API key, or None.

    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key

    def first_model(self) -> str:
        """Return the first model that the server lists.

        Raises:
            Refused: The server does not answer, or answers with an error.

        """
        return str(self.call("/v1/models")["data"][0]["id"])

    def has_adapters(self) -> bool:
        """Return whether the server lists LoRA adapters."""
        return any(one.get("parent") for one in self.call("/v1/models")["data"])

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a POST of ``body``, or to a GET without it.

        Raises:
            Refused: The server does not answer, or answers with an error or no JSON.

        """
        try:
            return json.loads(self.text(path, body))
        except ValueError as error:
            raise Refused(f"{self.url}{path} does not answer JSON: {error}") from None

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return an answer as text; see :meth:`call`."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            message = f"{self.url}{path}: HTTP {error.code}: {_message(error)}"
            raise Refused(message, error.code) from None
        except (OSError, ValueError) as error:
            raise Refused(f"{self.url} does not answer: {error}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
