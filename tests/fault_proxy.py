"""A proxy before a server of files that answers slowly, ends connections, or sends less than it should."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_OF_CONNECTIONS = {"connection", "transfer-encoding", "keep-alive", "te"}


class Proxy:
    """What a proxy does and has seen.

    Attributes:
        faults: What is wrong with the next answers to GET, one after the other: "slow" (comes after `slow_seconds`),
            "cut" (the connection is reset in the middle of the body), "half" (half of the body, as if it were all), or
            the number of an HTTP status. Afterwards answers are right.
        always: The fault of all answers to GET when `faults` is empty; None: no fault.
        requests: "METHOD path range" of every request.
    """

    def __init__(self) -> None:
        self.faults: list[str | int] = []
        self.always: str | int | None = None
        self.slow_seconds = 1.0
        self.requests: list[str] = []
        self.address = ""
        self._lock = threading.Lock()

    def next_fault(self, request: str, method: str) -> str | int | None:
        with self._lock:
            self.requests.append(request)
            if method != "GET":
                return None
            return self.faults.pop(0) if self.faults else self.always


@contextlib.contextmanager
def proxy_before(address: str) -> Iterator[Proxy]:
    """A proxy of the http server at `address`, such as http://127.0.0.1:5000."""
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._forward()

        do_GET = do_PUT = do_POST = do_HEAD

        def _forward(self) -> None:
            range_ = self.headers.get("Range", "")
            fault = proxy.next_fault(f"{self.command} {self.path} {range_}".strip(), self.command)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if isinstance(fault, int):
                self.send_response(fault)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "slow":
                time.sleep(proxy.slow_seconds)
            connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_CONNECTIONS}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
            sent = content[: len(content) // 2] if fault in ("half", "cut") else content
            said = len(sent) if fault == "half" else int(answer.headers.get("Content-Length", len(content)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked may have gone
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in {"content-length", "date", "server", *_OF_CONNECTIONS}:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(said))
                self.end_headers()
                self.wfile.write(sent)
                self.wfile.flush()
            connection.close()
            if fault == "cut":
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    with serving(Handler) as proxy.address:
        yield proxy


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """An http server on a free port of this machine; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
