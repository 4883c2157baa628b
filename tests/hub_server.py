"""A stand-in for the model hub on loopback, for its real client: repositories, ranges, and transfers that are cut."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """Serves `files`, bytes by repository and name. `cuts`: how often a transfer of a file is ended after half of what
    is left. `transfers`: of every request for content (file, first byte), in order. `held`: files of which
    nothing but headers is sent before `go` is set."""

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.cuts: dict[str, int] = {}
        self.transfers: list[tuple[str, int]] = []
        self.held: set[str] = set()
        self.go = threading.Event()

    @property
    def url(self) -> str:
        """What goes into HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that is to use this hub, and a cache in `home`."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
        return {**plain, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def running(files: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub with these files."""
    with Hub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.go.set()
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *given: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(tree|revision)/[^/]+", path):
            self._describe(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send(match[1], match[2], body)
        else:
            self._json(404, {"error": "not found"})

    def _describe(self, repo: str, what: str) -> None:
        if (files := self.server.files.get(repo)) is None:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif what == "tree":
            oids = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            self._json(200, [{"type": "file", "path": n, "size": len(d), "oid": oids[n]} for n, d in files.items()])
        else:
            self._json(200, {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    def _send(self, repo: str, name: str, body: bool) -> None:
        data = self.server.files.get(repo, {}).get(name)
        if data is None:
            code = "EntryNotFound" if repo in self.server.files else "RepoNotFound"
            self._json(404, {"error": "not found"}, {"X-Error-Code": code})
            return
        first = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(match[1])
        if body:
            self.server.transfers.append((name, first))
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if name in self.server.held:
            self.wfile.flush()
            self.server.go.wait()
        if self.server.cuts.get(name, 0):
            self.server.cuts[name] -= 1
            self.wfile.write(data[first : first + (len(data) - first) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data[first:])

    def _json(self, status: int, tree: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(tree).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
