"""HTTP servers in this process that stand in for vLLM's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and answers JSON, and writes no log. A subclass has ``do_GET`` and ``do_POST``."""

    def body(self) -> dict[str, Any]:
        """Return the request's body."""
        found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found

    def reply(self, status: int, body: Any) -> None:
        """Answer with a text or bytes as they are, and with anything else as JSON."""
        if not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a free port of 127.0.0.1, and yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
