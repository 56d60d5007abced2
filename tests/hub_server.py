"""A stand-in for the Hugging Face Hub on this machine: the part of its protocol that huggingface_hub 2.4 speaks when it
makes a repository, commits to it and downloads from it, with all files in git. It can also fail."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests import fault_proxy

TOKEN = "hf_stand_in"
LARGE = 1 << 20  # bytes; larger files have the checksums of LFS


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> content by path
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str, branch: str = "main") -> str:
        text = json.dumps([sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()), message,
                           branch, len(self.commits)])  # fmt: skip
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub:
    """The state of a server.

    Attributes:
        failure: None, an HTTP status that answers everything, "cut" (the connection ends without an answer), "cut body"
            (downloads end in the middle) or "other body" (as long as the right one).
        requests: "METHOD path" of every request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.failure: int | str | None = None
        self.fails_at = ""  # part of the paths that fail; all by default
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.endpoint = ""

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[name]
        return repository.commits[repository.branches[revision]]

    def publish(self, name: str, files: dict[str, bytes]) -> str:
        return self.repositories.setdefault(name, Repository()).commit(files, "published")

    def downloads(self, ending: str) -> list[str]:
        return [line for line in self.requests if line.startswith("GET") and line.endswith(ending)]


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value or {}).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def not_found(self, code: str) -> None:
        self.answer(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def handle_request(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            if self.hub.failure is not None and self.hub.fails_at in path:
                if self.hub.failure == "cut":
                    self.close_connection = True
                    self.connection.close()
                    return
                if isinstance(self.hub.failure, int):
                    self.answer(self.hub.failure, {"error": "this server always fails"})
                    return
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if self.command == "POST" and not is_known:
                self.answer(401, {"error": "Invalid username or password."})
                return
            private_names = [name for name, repository in self.hub.repositories.items() if repository.private]
            if not is_known and any(f"/{name}" in path for name in private_names):
                self.not_found("RepoNotFound")
                return
            self.route(path, body)

    do_GET = do_HEAD = do_POST = handle_request

    def route(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/([^/]+)", path):
            self.write(found[1], found[2], unquote(found[3]), body)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", path):
            self.info(found[1], unquote(found[2] or "main"))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self.tree(found[1], unquote(found[2]))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(found[1], unquote(found[2]), unquote(found[3]))
        else:
            self.not_found("EntryNotFound")

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.hub.repositories else 200
        if status == 200:
            is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
            repository = self.hub.repositories[name] = Repository(private=is_private)
            repository.commit({".gitattributes": b""}, "initial commit")
        self.answer(status, {"url": f"{self.hub.endpoint}/{name}", "error": "exists"})

    def write(self, name: str, what: str, revision: str, body: bytes) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.not_found("RepoNotFound")
            return
        if what == "branch":
            status = 409 if revision in repository.branches else 200
            repository.branches.setdefault(revision, repository.branches["main"])
            self.answer(status, {"error": "exists"})
        elif what == "preupload":
            files = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]
            self.answer(200, {"files": files})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            content = dict(repository.commits[repository.branches[revision]])
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    content[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del content[value["path"]]
            is_request = "create_pr=1" in self.path
            branch = "refs/pr/1" if is_request else revision
            sha = repository.commit(content, lines[0]["value"]["summary"], branch)
            address = f"{self.hub.endpoint}/{name}/commit/{sha}"
            request = {"pullRequestUrl": f"{self.hub.endpoint}/{name}/discussions/1"} if is_request else {}
            self.answer(200, {"commitUrl": address, "commitOid": sha, "success": True, **request})

    def info(self, name: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        sha = repository.resolve(revision) if repository else None
        if repository is None:
            self.not_found("RepoNotFound")
        elif sha is None:
            self.not_found("RevisionNotFound")
        else:
            siblings = [{"rfilename": path} for path in repository.commits[sha]]
            self.answer(200, {"id": name, "sha": sha, "private": repository.private, "siblings": siblings})

    def tree(self, name: str, revision: str) -> None:
        repository = self.hub.repositories[name]
        files = repository.commits[repository.resolve(revision) or ""]
        self.answer(200, [{"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
                          for path, content in files.items()])  # fmt: skip

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(name)
        sha = repository.resolve(revision) if repository else None
        if repository is None or sha is None:
            self.not_found("RepoNotFound" if repository is None else "RevisionNotFound")
            return
        if path not in repository.commits[sha]:
            self.not_found("EntryNotFound")
            return
        content = repository.commits[sha][path]
        headers = {"ETag": f'"{blob_id(content)}"', "X-Repo-Commit": sha}
        if len(content) > LARGE:
            headers |= {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        if self.hub.failure == "cut body" and self.command == "GET":
            self.send_response(200)
            for key, text in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, text)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        is_other = self.hub.failure == "other body" and self.command == "GET"
        self.answer(200, content[::-1] if is_other else content, headers)


@contextmanager
def reached(cache: Path) -> Iterator[Hub]:
    """A server that huggingface_hub in this process takes for the Hub, with this cache."""
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"  # made of the one at the import
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield hub


@contextmanager
def serving() -> Iterator[Hub]:
    """A server, until the context ends."""
    hub = Hub()
    with fault_proxy.serving(type("OneHandler", (Handler,), {"hub": hub})) as hub.endpoint:
        yield hub
