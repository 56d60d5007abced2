"""A page about runs that go on, served to this machine alone."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .page import as_text, page

_HOST = "127.0.0.1"
_READ_AGAIN_SECONDS = 2.0  # however many browsers ask


class Newest:
    """The newest data, without the contents of pictures, and their version; `pictures` has the contents by key. `read`
    is called again when they are asked for, but not more often than every 2 s, and not while nobody asks."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read, self._lock, self._read_at = read, threading.Lock(), -_READ_AGAIN_SECONDS
        self._data: Mapping[str, Any] = {}
        self._version = ""
        self.pictures: Mapping[str, str] = {}

    def get(self) -> tuple[Mapping[str, Any], str]:
        with self._lock:
            if time.monotonic() - self._read_at >= _READ_AGAIN_SECONDS:
                data, self.pictures = apart(self._read())
                shown = {name: value for name, value in data.items() if name != "made"}
                version = hashlib.sha256(as_text(shown).encode()).hexdigest()[:16]
                if version != self._version:
                    self._data, self._version = data, version
                self._read_at = time.monotonic()
            return self._data, self._version


def apart(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Data of a page without the "src" of pictures, and these by "key"."""
    sources: dict[str, str] = {}

    def without_source(picture: Mapping[str, Any]) -> dict[str, Any]:
        if "src" in picture:
            sources[picture["key"]] = picture["src"]
        return {name: value for name, value in picture.items() if name != "src"}

    runs = [{**run, "pictures": [without_source(each) for each in run["pictures"]]} for run in data["runs"]]
    return {**data, "runs": runs}, sources


class Server(ThreadingHTTPServer):
    """`/` is the page, without pictures; `/data?VERSION` newer data than that version, as JSON, or status 204; and
    `/picture?KEY` the data: URL of a picture, of which data have the key alone, so that each is sent once.

    Args:
        port: 0 for one that is free.

    Raises:
        OSError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, read: Callable[[], Mapping[str, Any]], port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.newest = Newest(read)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away amid an answer is no fault of this program."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine, at any port (of ssh -L, for example). Another site's name may lead
        here too, but such a site must not read the answer."""
        return host.partition(":")[0] in (_HOST, "localhost")


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "report"

    def do_GET(self) -> None:
        path, _, version = self.path.partition("?")
        if not self.server.is_ours(self.headers.get("Host", "")):
            self.send_error(403)
        elif path == "/":
            data, newest = self.server.newest.get()
            self._send(page(data, watched=newest), "text/html; charset=utf-8")
        elif path == "/data":
            data, newest = self.server.newest.get()
            if newest == version:
                self.send_response(204)
                self.end_headers()
            else:
                self._send(as_text({"version": newest, "data": data}).encode(), "application/json")
        elif path == "/picture" and (source := self.server.newest.pictures.get(version)):
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
        """A line for each request would hide everything else on the terminal."""
