"""A stand-in for a Kubernetes API server, over HTTP: pods and MonarchMeshes of one process.

    with ApiServer(objects, definitions) as server:      # the Roles of the manifests hold
        server.kubeconfig(path, "system:serviceaccount:space:forge-controller")

List, watch (resourceVersion, BOOKMARK, 410), create, read, merge patch, delete with grace, status;
bearer tokens, RBAC, and the schema of the MonarchMesh. `server.faults` breaks what it answers.
Nothing is done by itself: pods are the operator's (tests/operator_loop.py).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trustme
import yaml
from jsonschema import Draft202012Validator

Object = dict[str, Any]

ADMIN = "admin"
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"/namespaces/(?P<space>[^/]+)/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


@dataclass
class Fault:
    """What the next `times` requests of a verb and resource are answered with ("" for any)."""

    status: int
    times: int = 1
    verb: str = ""
    resource: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


class Refusal(Exception):
    def __init__(self, status: int, reason: str, message: str, **details: str) -> None:
        self.status, self.reason, self.message, self.details = status, reason, message, details


class ApiServer:
    """Serves on 127.0.0.1 with a certificate of its own authority, until closed."""

    def __init__(self, objects: Sequence[Object], definitions: Sequence[Object]) -> None:
        self.roles = [o for o in objects if o["kind"] in ("Role", "RoleBinding")]
        (crd,) = (d for d in definitions if d["spec"]["names"]["kind"] == "MonarchMesh")
        self._schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        self.installed = True  # the operator's kind
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str]] = []  # (user, verb, resource)
        self.bookmark_s = 60.0
        self._users: dict[str, str] = {}
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._log: list[tuple[int, str, str, Object]] = []  # version, event, resource, object
        self._version, self._oldest = 100, 0
        self._changed = threading.Condition()
        self._watches: set[socket.socket] = set()
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

    # -- what tests do to it --------------------------------------------------------------------

    def kubeconfig(self, path: Path, user: str, *, server: str | None = None) -> Path:
        """A kubeconfig whose token is that user's; made with the first."""
        token = f"secret-{uuid.uuid4().hex}"
        self._users[token] = user
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
        with self._changed:
            for connection in self._watches:
                _shut(connection)
            self._watches.clear()

    def forget(self) -> None:
        """The events up to now: a watch from an older version is answered with 410."""
        with self._changed:
            self._oldest = self._version

    def forget_tokens(self) -> None:
        self._users.clear()

    def watching(self) -> int:
        with self._changed:
            return len(self._watches)

    # -- requests -------------------------------------------------------------------------------

    def user(self, authorization: str) -> str:
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or token not in self._users:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        return self._users[token]

    def authorize(
        self, user: str, verb: str, group: str, resource: str, space: str, name: str
    ) -> None:
        if user == ADMIN:
            return
        for rule in self._rules(user, space):
            if (
                group in rule["apiGroups"]
                and resource in rule["resources"]
                and verb in rule["verbs"]
                and name in rule.get("resourceNames", [name])
            ):
                return
        plural = resource.partition("/")[0]
        raise Refusal(
            403,
            "Forbidden",
            f'{plural}{"." + group if group else ""} "{name}" is forbidden: User "{user}" cannot '
            f'{verb} resource "{resource}" in API group "{group}" in the namespace "{space}"',
            kind=plural,
        )

    def _rules(self, user: str, space: str) -> Iterator[Object]:
        roles = {o["metadata"]["name"]: o for o in self.roles if o["kind"] == "Role"}
        for binding in self.roles:
            if binding["kind"] == "RoleBinding" and binding["metadata"]["namespace"] == space:
                for subject in binding["subjects"]:
                    who = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
                    if who == user:
                        yield from roles[binding["roleRef"]["name"]]["rules"]

    def fault(self, verb: str, resource: str) -> Fault | None:
        with self._changed:
            for fault in self.faults:
                if fault.verb in ("", verb) and fault.resource in ("", resource):
                    fault.times -= 1
                    if fault.times <= 0:
                        self.faults.remove(fault)
                    return fault
        return None

    def listed(self, resource: str, space: str, selector: str) -> Object:
        with self._changed:
            items = [
                o
                for (r, s, _), o in sorted(self._objects.items())
                if (r, s) == (resource, space) and selects(selector, o)
            ]
            version = str(self._version)
        return {"kind": "List", "metadata": {"resourceVersion": version}, "items": items}

    def read(self, resource: str, space: str, name: str) -> Object:
        with self._changed:
            found = self._objects.get((resource, space, name))
        if found is None:
            raise Refusal(
                404, "NotFound", f'{resource} "{name}" not found', name=name, kind=resource
            )
        return found

    def create(self, resource: str, space: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        self._validate(resource, body)
        made = copy.deepcopy(body)
        made["metadata"] |= {
            "namespace": space,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": _now(),
        }
        if resource == "pods":
            made.setdefault("status", {"phase": "Pending"})
        with self._changed:
            if (resource, space, name) in self._objects:
                raise Refusal(
                    409, "AlreadyExists", f'{resource} "{name}" already exists', name=name
                )
            return self._keep("ADDED", resource, space, made)

    def patch(self, resource: str, space: str, name: str, body: Object) -> Object:
        """A merge patch (RFC 7386); with a resourceVersion, of that version alone."""
        with self._changed:
            found = self.read(resource, space, name)
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, found["metadata"]["resourceVersion"]):
                raise Refusal(409, "Conflict", f'{resource} "{name}" has been modified', name=name)
            merged = merge(found, body)
            self._validate(resource, merged)
            return self._keep("MODIFIED", resource, space, merged)

    def delete(self, resource: str, space: str, name: str, options: Object) -> Object:
        with self._changed:
            found = self.read(resource, space, name)
            uid = options.get("preconditions", {}).get("uid")
            if uid not in (None, found["metadata"]["uid"]):
                raise Refusal(409, "Conflict", "the UID in the precondition does not match")
            grace = options.get("gracePeriodSeconds", 30 if resource == "pods" else 0)
            if grace and "nodeName" in found.get("spec", {}):
                leaving = copy.deepcopy(found)
                leaving["metadata"].setdefault("deletionTimestamp", _now())
                return self._keep("MODIFIED", resource, space, leaving)
            del self._objects[(resource, space, name)]
            return self._keep("DELETED", resource, space, copy.deepcopy(found))

    def _keep(self, event: str, resource: str, space: str, new: Object) -> Object:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        if event != "DELETED":
            self._objects[(resource, space, new["metadata"]["name"])] = new
        self._log.append((self._version, event, resource, new))
        self._changed.notify_all()
        return new

    def _validate(self, resource: str, body: Object) -> None:
        if resource != "monarchmeshes":
            return
        for error in Draft202012Validator(self._schema).iter_errors(body):
            name = body["metadata"]["name"]
            raise Refusal(
                422,
                "Invalid",
                f'MonarchMesh.monarch.pytorch.org "{name}" is invalid: {error.json_path[2:]}: '
                f"{error.message:.200}",
                name=name,
            )

    def events(
        self, resource: str, space: str, selector: str, version: int, seconds: float
    ) -> Iterator[Object | None]:
        """Of a watch, as they come; None where nothing did for a while."""
        if version < self._oldest:
            yield _gone(version)
            return
        end = time.monotonic() + seconds
        bookmark = time.monotonic() + self.bookmark_s
        while (now := time.monotonic()) < end:
            with self._changed:
                fresh = [entry for entry in self._log if entry[0] > version]
                if not fresh:
                    self._changed.wait(0.05)
                at = self._version
            for number, event, kind, found in fresh:
                mine = (kind, found["metadata"]["namespace"]) == (resource, space)
                if mine and selects(selector, found):
                    yield {"type": event, "object": found}
                version = number
            if now > bookmark:
                bookmark = now + self.bookmark_s
                mark = {"kind": "Pod", "metadata": {"resourceVersion": str(at)}}
                yield {"type": "BOOKMARK", "object": mark}
            elif not fresh:
                yield None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # its client may have been faster
        connection.shutdown(socket.SHUT_RDWR)


def merge(old: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def selects(selector: str, found: Object) -> bool:
    """Label selectors of the two forms `key=value` and `key in (a,b)`."""
    labels = found["metadata"].get("labels", {})
    for part in re.split(r",(?![^(]*\))", selector) if selector else ():
        key, _, several = part.partition(" in ")
        if several and labels.get(key) not in several.strip("()").split(","):
            return False
        key, _, value = part.partition("=")
        if not several and labels.get(key) != value:
            return False
    return True


def _gone(version: int) -> Object:
    message = f"too old resource version: {version}"
    return {"type": "ERROR", "object": _status(410, "Expired", message)}


def _status(code: int, reason: str, message: str, **details: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "details": details,
        "code": code,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Http(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, address: tuple[str, int], server: ApiServer, authority: trustme.CA) -> None:
        import ssl

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
            status = _status(refusal.status, refusal.reason, refusal.message, **refusal.details)
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
        if (fault := api.fault(verb, resource)) and user != ADMIN:
            time.sleep(fault.delay_s)
            if fault.status:
                told = _status(fault.status, "Fault", "etcdserver: leader changed")
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
        with api._changed:
            api._watches.add(self.connection)
        try:
            seconds = float(query.get("timeoutSeconds", 300))
            version = int(query.get("resourceVersion") or 0)
            for event in api.events(resource, space, selector, version, seconds):
                if event is None:
                    if self.connection not in api._watches:
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
            with api._changed:
                api._watches.discard(self.connection)

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
