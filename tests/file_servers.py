"""Servers of files on this machine: Python's http server, made to answer ranges, and the S3 server of moto."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import boto3
import pytest

from tandem.data.sources import remote
from tests.fault_proxy import Proxy, proxy_before, serving

#: What a program needs that reads from `s3_server`, beside AWS_ENDPOINT_URL.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIDOFATEST",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class _Ranges(SimpleHTTPRequestHandler):
    """Answers 403 for names that begin with "private", and whole files for names that begin with "whole"."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(None)

    def _answer(self, content: bytes | None) -> None:
        path, status = Path(self.translate_path(self.path)), HTTPStatus.OK
        if path.name.startswith("private"):
            return self.send_error(HTTPStatus.FORBIDDEN)
        if not path.is_file():
            return self.send_error(HTTPStatus.NOT_FOUND)
        data = path.read_bytes()
        n = len(data)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.close_connection = False
        if found and not path.name.startswith("whole"):
            begin, end = int(found[1]), min(int(found[2] or n - 1), n - 1)
            if begin >= n:
                return self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            data, status = data[begin : end + 1], HTTPStatus.PARTIAL_CONTENT
        self.send_response(status)
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{n}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(data if content is None else content)
        return None


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """A web server of the files of a folder; gives its address."""
    with serving(cast(Any, partial(_Ranges, directory=str(folder)))) as address:
        yield address


@contextlib.contextmanager
def s3_server(buckets: dict[str, Path], log: Path) -> Iterator[str]:
    """moto's S3 server in a process of its own, with the files of a folder in each bucket; gives its address. Its
    messages go to the file `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, **CREDENTIALS}
    with open(log, "wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, process)
        key, secret, region = CREDENTIALS.values()
        client = boto3.client(
            "s3", endpoint_url=address, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
        )
        for bucket, folder in buckets.items():
            client.create_bucket(Bucket=bucket)
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                client.put_object(Bucket=bucket, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def _wait_for(address: str, process: subprocess.Popen) -> None:
    for _ in range(600):
        assert process.poll() is None, "moto's server has ended"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/moto-api/", timeout=10).close()
            return
        time.sleep(0.1)
    raise AssertionError("moto's server does not answer")


@contextlib.contextmanager
def servers_of(folder: Path, log: Path) -> Iterator[dict[str, tuple[str, Proxy]]]:
    """What a folder is called on an S3 server, "s3", and on a web server, "http"; and the proxies before them."""
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(proxy_before(stack.enter_context(s3_server({"bucket": folder}, log))))
        http = stack.enter_context(proxy_before(stack.enter_context(http_server(folder))))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.address}.items():
            patch.setenv(name, value)
        remote._make_filesystem.cache_clear()  # of another server
        yield {"s3": ("s3://bucket", s3), "http": (http.address, http)}
