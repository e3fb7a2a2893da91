"""A hub on this machine: the few endpoints that a download uses, over files in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

SHA = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """``repos``: repository to its files. ``refuse``: repository to (status, error code) of every answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo in self.server.refuse:
            status, code = self.server.refuse[repo]
            self.answer(b"{}", status=status, headers={"X-Error-Code": code})
        elif repo not in self.server.repos:
            self.answer(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})
        elif is_api and "revision" in parts and parts[-1] not in ("main", SHA):
            self.answer(b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            self.api(repo, is_tree="tree" in parts)
        else:
            self.file(self.server.repos[repo], "/".join(parts[4:]))

    def api(self, repo: str, *, is_tree: bool) -> None:
        files = self.server.repos[repo]
        if is_tree:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in files.items()
            ]
            self.answer(json.dumps(entries).encode())
            return
        siblings = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
        self.answer(json.dumps({"id": repo, "sha": SHA, "siblings": siblings}).encode())

    def file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            self.answer(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.server.fetched.append(name)
        body = files[name]
        tag = hashlib.sha1(body).hexdigest()
        self.answer(body, headers={"ETag": f'"{tag}"', "X-Repo-Commit": SHA})

    def answer(self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running hub, with huggingface_hub allowed to go online."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
