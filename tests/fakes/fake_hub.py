"""A Hugging Face hub on loopback: what its own client needs to make, fill, list and fetch from.

    POST /api/repos/create                         -> {url}, 409 where it is there
    POST /api/models/ID/preupload/REVISION         -> weights by LFS, the rest in the commit
    POST /ID.git/info/lfs/objects/batch            -> where to PUT what is not there yet
    PUT  /lfs/OID, POST /lfs/verify
    POST /api/validate-yaml                        a card's metadata -> {errors, warnings}
    POST /api/models/ID/commit/REVISION            ndjson -> {commitOid, commitUrl}
    GET  /api/models/ID[/revision/REVISION]        -> {sha, siblings}
    HEAD, GET /ID/resolve/REVISION/FILE

Everything that writes needs the token. Xet, the client's other way to upload, is not spoken: tests
switch it off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"
LFS = (".safetensors", ".pt")


@dataclass
class Repo:
    """Commits, oldest first: (id, {path: bytes})."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1] if self.commits else ("0" * 40, {})
        return next((commit for commit in self.commits if commit[0] == revision), None)

    def commit(self, changes: dict[str, bytes]) -> str:
        files = {**(self.commits[-1][1] if self.commits else {}), **changes}
        told = json.dumps([(k, hashlib.sha256(v).hexdigest()) for k, v in files.items()])
        oid = hashlib.sha1(f"{len(self.commits)}{told}".encode()).hexdigest()
        self.commits.append((oid, files))
        return oid


class FakeHub:
    """`repos` by id; `asked` has every request's method and path."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        house = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    house: FakeHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.split("?")[0]
        self.house.asked.append(f"POST {path}")
        if path == "/lfs/verify":
            return self._json(200, {})
        if path == "/api/validate-yaml":
            return self._json(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        _, _, _, owner, name, verb, _ = path.split("/")
        repo = self.house.repos.get(f"{owner}/{name}")
        if repo is None:
            return self._missing()
        if verb == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json(200, {"files": modes})
        return self._commit(f"{owner}/{name}", repo, [json.loads(x) for x in body.splitlines()])

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        self.house.asked.append(f"PUT {self.path}")
        if hashlib.sha256(body).hexdigest() != oid:
            return self._json(400, {"error": "the content is not that of its id"})
        self.house.blobs[oid] = body
        return self._json(200, {})

    def do_HEAD(self) -> None:
        self._fetch(send=False)

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/"):
            return self._fetch(send=True)
        self.house.asked.append(f"GET {self.path}")
        _, _, _, owner, name, *rest = self.path.split("?")[0].split("/")
        repo = self.house.repos.get(f"{owner}/{name}")
        found = repo.at(rest[1] if rest else "main") if repo is not None else None
        if found is None:
            return self._missing()
        siblings = [{"rfilename": path, "size": len(data)} for path, data in found[1].items()]
        return self._json(200, {"id": f"{owner}/{name}", "sha": found[0], "siblings": siblings})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        plain = {"url": f"{self.house.url}/{repo}"}
        if repo in self.house.repos:
            return self._json(409, plain)
        self.house.repos[repo] = Repo(asked.get("visibility") == "private")
        return self._json(200, plain)

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            upload = {"href": f"{self.house.url}/lfs/{each['oid']}"}
            verify = {"href": f"{self.house.url}/lfs/verify"}
            there = each["oid"] in self.house.blobs
            objects.append(
                each | ({} if there else {"actions": {"upload": upload, "verify": verify}})
            )
        self._json(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repo: Repo, lines: list[dict[str, Any]]) -> None:
        changes = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.house.blobs[value["oid"]]
        oid = repo.commit(changes)
        self._json(200, {"commitOid": oid, "commitUrl": f"{self.house.url}/{name}/commit/{oid}"})

    def _fetch(self, send: bool) -> None:
        self.house.asked.append(f"{self.command} {self.path}")
        _, owner, name, _, revision, file = self.path.split("/", 5)
        repo = self.house.repos.get(f"{owner}/{name}")
        found = repo.at(revision) if repo is not None else None
        if found is None or file not in found[1]:
            return self._missing()
        data = found[1][file]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", found[0])
        self.end_headers()
        if send:
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _missing(self) -> None:
        self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def _json(self, status: int, plain: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest shows what failed."""
