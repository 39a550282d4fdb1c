"""A stand-in for a Kubernetes API server, over HTTPS on 127.0.0.1.

    with ApiServer(objects, definitions) as server:      # the Roles of the manifests hold
        server.kubeconfig(path, "system:serviceaccount:space:forge-controller")

List, watch (resourceVersion, BOOKMARK, 410), create, read, merge patch, delete, status.
`server.faults` breaks what it answers. Nothing is done by itself: pods are the operator's
(tests/fakes/operator_loop.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trustme
import yaml
from api_store import ADMIN, Object, Refusal, Store, status_of

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"/namespaces/(?P<space>[^/]+)/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


class ApiServer(Store):
    """Serves with a certificate of its own authority, until closed."""

    def __init__(self, objects: Sequence[Object], definitions: Sequence[Object]) -> None:
        super().__init__(objects, definitions)
        self.watches: set[socket.socket] = set()
        authority = trustme.CA()
        self._authority = authority.cert_pem.bytes()
        self._http = _Http(("127.0.0.1", 0), self, authority)
        self.url = f"https://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self.cut_watches()
        for connection in list(self._http.connections):
            _shut(connection)
        self._http.server_close()
        self._thread.join()

    def kubeconfig(self, path: Path, user: str, *, server: str | None = None) -> Path:
        """A kubeconfig whose token is that user's; made with the first."""
        token = f"secret-{uuid.uuid4().hex}"
        self.users[token] = user
        ca = base64.b64encode(self._authority).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "double",
                    "cluster": {
                        "server": server or self.url,
                        "certificate-authority-data": ca,
                    },
                }
            ],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "double", "user": "me"}}],
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def cut_watches(self) -> None:
        """As a network does, or a server that is started anew."""
        with self.changed:
            for connection in self.watches:
                _shut(connection)
            self.watches.clear()

    def watching(self) -> int:
        with self.changed:
            return len(self.watches)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # its client may have been faster
        connection.shutdown(socket.SHUT_RDWR)


class _Http(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, address: tuple[str, int], server: ApiServer, authority: trustme.CA) -> None:
        super().__init__(address, _Handler)
        self.api = server
        self.connections: set[socket.socket] = set()
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self.tls)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """The handshake in the connection's own thread."""
        request.settimeout(30)
        with self.tls.wrap_socket(request, server_side=True) as connection:
            self.connections.add(connection)
            super().finish_request(connection, client_address)
            self.connections.discard(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients come and go."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def do_GET(self) -> None:
        self._answer("get")

    def do_POST(self) -> None:
        self._answer("create")

    def do_PATCH(self) -> None:
        self._answer("patch")

    def do_DELETE(self) -> None:
        self._answer("delete")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _answer(self, verb: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        try:
            self._ask(verb, body)
        except Refusal as refusal:
            status = status_of(refusal.status, refusal.reason, refusal.message, **refusal.details)
            self._send(refusal.status, status)

    def _ask(self, verb: str, body: Object) -> None:
        api, url = self.server.api, urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        where = _PATH.fullmatch(url.path)
        if where is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        group, resource, space = where["group"] or "", where["resource"], where["space"]
        name, sub = where["name"] or "", where["sub"]
        if verb == "get" and not name:
            verb = "watch" if query.get("watch") in ("true", "True", "1") else "list"
        user = api.user(self.headers.get("Authorization", ""))
        api.requests.append((user, verb, resource))
        if user != ADMIN and (fault := api.fault(verb, resource)):
            time.sleep(fault.delay_s)
            if fault.status:
                told = status_of(fault.status, "Fault", "etcdserver: leader changed")
                return self._send(fault.status, told, fault.headers)
        api.authorize(user, verb, group, f"{resource}/{sub}" if sub else resource, space, name)
        if group and not api.installed:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        selector = query.get("labelSelector", "")
        match verb:
            case "watch":
                self._watch(resource, space, selector, query)
            case "list":
                self._send(200, api.listed(resource, space, selector))
            case "get":
                self._send(200, api.read(resource, space, name))
            case "create":
                self._send(201, api.create(resource, space, body))
            case "patch":
                if "merge-patch" not in self.headers["Content-Type"]:
                    raise Refusal(415, "UnsupportedMediaType", "only merge patches are known here")
                self._send(200, api.patch(resource, space, name, body))
            case "delete":
                self._send(200, api.delete(resource, space, name, body | _grace(query)))

    def _watch(self, resource: str, space: str, selector: str, query: Mapping[str, str]) -> None:
        api = self.server.api
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with api.changed:
            api.watches.add(self.connection)
        try:
            seconds = float(query.get("timeoutSeconds", 300))
            version = int(query.get("resourceVersion") or 0)
            for event in api.events(resource, space, selector, version, seconds):
                if event is None:
                    if self.connection not in api.watches:
                        break
                    continue
                line = json.dumps(event).encode() + b"\n"
                # In two pieces: clients must not take a chunk for a line.
                half = len(line) // 2
                for piece in (line[:half], line[half:]):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            else:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass
        finally:
            self.close_connection = True
            with api.changed:
                api.watches.discard(self.connection)

    def _send(self, status: int, body: Object, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


def _grace(query: Mapping[str, str]) -> Object:
    seconds = query.get("gracePeriodSeconds")
    return {} if seconds is None else {"gracePeriodSeconds": int(seconds)}
