"""A web server on localhost for the page, which follows unfinished runs."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .page import render_page, script_json

_HOST = "127.0.0.1"
_REFRESH_SECONDS = 2.0  # the least time between two reads of the run folders


class Server(ThreadingHTTPServer):
    """`/` is the page, without pictures; `/data?VERSION` newer data than that version, as JSON, or status 204; and
    `/picture?KEY` the data: URL of a picture. The data hold only keys of pictures, so that each picture is sent once.

    Args:
        read: Returns the data of the page; called at requests, but not more often than every 2 s.
        port: 0 for a free one.

    Raises:
        OSError: the port is not available.
    """

    daemon_threads = True

    def __init__(self, read: Callable[[], Mapping[str, Any]], port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.url = f"http://{_HOST}:{self.server_address[1]}/"
        self.pictures: dict[str, str] = {}
        self._read, self._lock, self._read_at = read, threading.Lock(), -_REFRESH_SECONDS
        self._newest: tuple[Mapping[str, Any], str] = ({}, "")

    def newest(self) -> tuple[Mapping[str, Any], str]:
        """The newest data, without the contents of pictures, and their version."""
        with self._lock:
            if time.monotonic() - self._read_at >= _REFRESH_SECONDS:
                data = self._read()
                pictures = [picture for run in data["runs"] for picture in run["pictures"] if "src" in picture]
                self.pictures = {picture["key"]: picture["src"] for picture in pictures}
                runs = [{**run, "pictures": [_drop_key(x, "src") for x in run["pictures"]]} for run in data["runs"]]
                data = {**data, "runs": runs}
                version = hashlib.sha256(script_json(_drop_key(data, "created")).encode()).hexdigest()[:16]
                if version != self._newest[1]:
                    self._newest = data, version
                self._read_at = time.monotonic()
            return self._newest

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect during an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _drop_key(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "report"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        # Accept this machine's name only, at any port (of ssh -L, for example). The name of another site may resolve to
        # this machine, too, but that site must not read the answer.
        if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
            self.send_error(403)
        elif path == "/":
            data, version = self.server.newest()
            self._send(render_page(data, version=version), "text/html; charset=utf-8")
        elif path == "/data":
            data, version = self.server.newest()
            if version == query:
                self.send_response(204)
                self.end_headers()
            else:
                self._send(script_json({"version": version, "data": data}).encode(), "application/json")
        elif path == "/picture" and (source := self.server.pictures.get(query)):
            self._send(source.encode(), "text/plain")
        else:
            self.send_error(404)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line for each request would hide everything else on the terminal."""
