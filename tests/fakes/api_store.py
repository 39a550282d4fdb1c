"""What a stand-in for a Kubernetes API server holds, and how it answers: pods and MonarchMeshes.

Objects with resourceVersions, a log of events to watch, merge patches, deletion with grace, bearer
tokens, RBAC by the Roles of our manifests, and the schema of the MonarchMesh. No HTTP here: that is
tests/fakes/api_server.py.
"""

from __future__ import annotations

import copy
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from jsonschema import Draft202012Validator

Object = dict[str, Any]

ADMIN = "admin"


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


class Store:
    """Raises Refusal for what an API server would refuse."""

    def __init__(self, objects: Sequence[Object], definitions: Sequence[Object]) -> None:
        self.roles = [o for o in objects if o["kind"] in ("Role", "RoleBinding")]
        (crd,) = (d for d in definitions if d["spec"]["names"]["kind"] == "MonarchMesh")
        self._schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        self.installed = True  # the operator's kind
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str]] = []  # (user, verb, resource)
        self.bookmark_s = 60.0
        self.marked: list[int] = []  # the version of each bookmark that was sent
        self.users: dict[str, str] = {}  # by token
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._log: list[tuple[int, str, str, Object]] = []  # version, event, resource, object
        self._version, self._oldest = 100, 0
        self.changed = threading.Condition()

    def forget(self) -> None:
        """The events up to now: a watch from an older version is answered with 410."""
        with self.changed:
            self._oldest = self._version

    def forget_tokens(self) -> None:
        self.users.clear()

    def user(self, authorization: str) -> str:
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or token not in self.users:
            raise Refusal(401, "Unauthorized", "Unauthorized")
        return self.users[token]

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
        with self.changed:
            for fault in self.faults:
                if fault.verb in ("", verb) and fault.resource in ("", resource):
                    fault.times -= 1
                    if fault.times <= 0:
                        self.faults.remove(fault)
                    return fault
        return None

    def listed(self, resource: str, space: str, selector: str) -> Object:
        with self.changed:
            items = [
                o
                for (r, s, _), o in sorted(self._objects.items())
                if (r, s) == (resource, space) and selects(selector, o)
            ]
            version = str(self._version)
        return {"kind": "List", "metadata": {"resourceVersion": version}, "items": items}

    def read(self, resource: str, space: str, name: str) -> Object:
        with self.changed:
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
        with self.changed:
            if (resource, space, name) in self._objects:
                raise Refusal(
                    409, "AlreadyExists", f'{resource} "{name}" already exists', name=name
                )
            return self._keep("ADDED", resource, space, made)

    def patch(self, resource: str, space: str, name: str, body: Object) -> Object:
        """A merge patch (RFC 7386); with a resourceVersion, of that version alone."""
        with self.changed:
            found = self.read(resource, space, name)
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, found["metadata"]["resourceVersion"]):
                raise Refusal(409, "Conflict", f'{resource} "{name}" has been modified', name=name)
            merged = merge(found, body)
            self._validate(resource, merged)
            return self._keep("MODIFIED", resource, space, merged)

    def delete(self, resource: str, space: str, name: str, options: Object) -> Object:
        with self.changed:
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
        self.changed.notify_all()
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
            with self.changed:
                fresh = [entry for entry in self._log if entry[0] > version]
                if not fresh:
                    self.changed.wait(0.05)
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
                self.marked.append(at)
            elif not fresh:
                yield None


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
    return {"type": "ERROR", "object": status_of(410, "Expired", message)}


def status_of(code: int, reason: str, message: str, **details: str) -> Object:
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
