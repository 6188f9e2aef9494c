"""A proxy in front of an S3 server that makes chosen requests fail, as networks and stores do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["", "busy", "cut", "lost", "flipped", "sent wrong"]
"""What happens to a request: nothing; 503 in the place of an answer; half of the answer's body; the server does what it
is asked and its answer is lost; a wrong byte in the answer's body, or in that of the request."""
Choose = Callable[[str, str, int], Fault]
"""Gets the method, the path and the number of this request among those of both; returns its fault."""


@contextmanager
def fault_proxy(endpoint: str, choose: Choose) -> Iterator[str]:
    """Forward to ``endpoint``, with faults. Yields the proxy's own endpoint."""
    seen: dict[tuple[str, str], int] = {}
    lock = threading.Lock()
    upstream = urlsplit(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            with lock:
                seen[self.command, path] = number = seen.get((self.command, path), 0) + 1
            fault = choose(self.command, path, number)
            if fault == "busy":
                return self._answer(
                    503, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
                )
            if fault == "sent wrong" and body:
                body = _flipped(body)
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=30)
            # The host is the proxy's: the client has signed it.
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            found = connection.getresponse()
            data = found.read()
            headers = {name: value for name, value in found.getheaders() if name.lower() not in _OF_CONNECTION}
            connection.close()
            if fault == "lost":
                self.close_connection = True
                return None
            if fault == "flipped" and data:
                data = _flipped(data)
            return self._answer(found.status, headers, data, is_cut=fault == "cut")

        def _answer(self, status: int, headers: dict[str, str], data: bytes, *, is_cut: bool = False) -> None:
            self.send_response(status)
            length = headers.pop("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
            headers.pop("Content-Length", None)
            for name, value in (headers | {"Content-Length": length}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":  # whose answer has no body: the next one on this connection would begin with it
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
            self.close_connection = self.close_connection or is_cut

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


_BUSY = b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
_OF_CONNECTION = frozenset({"connection", "transfer-encoding", "date", "server"})
