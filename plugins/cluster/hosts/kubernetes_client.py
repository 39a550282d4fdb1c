"""Call a cluster's API server: read pods; read, make, scale and delete MonarchMeshes.

Uses the official client, which blocks: call it from threads. Every call is bounded: connecting and
each answer have timeouts, and a temporary failure (429, 5xx, no connection) is retried for
PATIENCE_S at most. Failures are RunErrors that name the remedy. The client's own messages are
dropped, because they hold headers, and a kubeconfig's parser quotes its lines.

`kubernetes` is imported on first use, because that takes half a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cartridge_forge.plugins.cluster.manifests.objects import MONARCH_API
from cartridge_forge.protocols.errors import RunError

Object = dict[str, Any]

CONNECT_S = 3.0
ANSWER_S = 10.0
PATIENCE_S = 6.0  # of one call, its retries included
PAUSE_S = 0.2  # before the first retry, then doubled
WATCH_S = 30  # the server ends a watch after that, and the next one continues from there
AGAIN = (409, 429, 500, 502, 503, 504)
MESHES = "monarchmeshes.monarch.pytorch.org"


class ApiRefusal(RunError):
    """Report a permanent refusal of the API server: 401, 403, no such kind."""


class WatchExpired(Exception):
    """Report that the version to watch from is no longer kept (410): list again."""


class AlreadyExists(Exception):
    """Report that an object of that name exists (409)."""


class KubernetesClient:
    """Access the pods and MonarchMeshes of one namespace. Safe to call from several threads."""

    def __init__(self, namespace: str, context: str | None) -> None:
        """Configure, without a request, from a pod's service account or the kubeconfig's `context`
        (None: its current one). Raises RunError without a usable configuration."""
        from kubernetes import client

        self.namespace = namespace
        settings = client.Configuration()
        settings.retries = False  # `_call` retries, with a bound
        settings.connection_pool_maxsize = 4
        _configure(settings, context)
        self.server: str = settings.host
        self._client = client.ApiClient(settings)
        self._core = client.CoreV1Api(self._client)
        self._custom = client.CustomObjectsApi(self._client)
        self._closed = threading.Event()
        self._response: Any = None  # of the current watch

    def pods(self, selector: str) -> tuple[list[Object], str]:
        """Return every pod of a selector, and the version from which to watch them."""
        page = self._call(
            "list", "pods", "", self._core.list_namespaced_pod, self.namespace,
            label_selector=selector,
        )  # fmt: skip
        return page["items"], page["metadata"]["resourceVersion"]

    def pod(self, name: str) -> Object | None:
        """Return the pod, or None where there is none of that name."""
        return self._found(
            "get", "pods", name, self._core.read_namespaced_pod, name, self.namespace
        )

    def changes(self, selector: str, version: str) -> Iterator[tuple[str, Object]]:
        """Yield (ADDED, MODIFIED, DELETED or BOOKMARK, pod) from a version on, until the watch ends
        or the connection is cut. Raises WatchExpired, or RunError when it cannot begin."""
        from kubernetes import watch
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

        def begin(*args: Any, **kwargs: Any) -> Any:
            self._response = response = self._core.list_namespaced_pod(*args, **kwargs)
            if self._closed.is_set():  # close() ran before this response existed
                _shut(response)
            return response

        try:
            for event in watch.Watch(return_type="object").stream(
                begin,
                self.namespace,
                label_selector=selector,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
                _request_timeout=(CONNECT_S, WATCH_S + ANSWER_S),
            ):
                if event is not None:
                    yield event["type"], event["raw_object"]
        except ApiException as error:
            if error.status == 410:
                raise WatchExpired from None
            if not error.status:
                raise self._unreachable(error.reason) from None
            message = error.body or error.reason
            raise self._error(error.status, message, "watch", "pods", "") from None
        except (ProtocolError, ReadTimeoutError):
            return  # the connection was cut
        except HTTPError as error:
            raise self._unreachable(_cause(error)) from None
        finally:
            self._response = None

    def mesh(self, name: str) -> Object | None:
        """Return a MonarchMesh, or None where there is none of that name."""
        call = self._custom.get_namespaced_custom_object
        return self._found("get", MESHES, name, call, *self._meshes, name)

    def create(self, mesh: Object) -> None:
        """Create a MonarchMesh. Raises AlreadyExists."""
        call = self._custom.create_namespaced_custom_object
        self._call("create", MESHES, mesh["metadata"]["name"], call, *self._meshes, mesh)

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods that the operator keeps of a MonarchMesh."""
        self._call(
            "patch", MESHES, name, self._custom.patch_namespaced_custom_object,
            *self._meshes, name, {"spec": {"replicas": replicas}},
            _content_type="application/merge-patch+json",
        )  # fmt: skip

    def delete(self, name: str, uid: str) -> None:
        """Delete the MonarchMesh with that uid, and its pods; do nothing where it is gone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        call = self._custom.delete_namespaced_custom_object
        self._found("delete", MESHES, name, call, *self._meshes, name, body=body)

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether the client was closed meanwhile."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        """End the watch and all pauses between retries. May be called from any thread."""
        self._closed.set()
        if (response := self._response) is not None:
            _shut(response)
        self._client.rest_client.pool_manager.clear()

    @property
    def _meshes(self) -> tuple[str, str, str, str]:
        group, _, version = MONARCH_API.partition("/")
        return group, version, self.namespace, "monarchmeshes"

    def _found(self, *args: Any, **kwargs: Any) -> Object | None:
        try:
            return self._call(*args, **kwargs)
        except ObjectMissing:
            return None

    def _call(
        self, verb: str, resource: str, name: str, call: Callable[..., Any], *args: Any, **kw: Any
    ) -> Object:
        """Return the answer as a dict, with retries, to a call that may be repeated."""
        # urllib3's own Retry counts attempts: it has no bound in seconds, and sleeps through a
        # close(). So the client tries once, and the loop is here.
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kw |= {"_preload_content": False, "_request_timeout": (CONNECT_S, ANSWER_S)}
        end, pause = time.monotonic() + PATIENCE_S, PAUSE_S
        while True:
            failure = None
            try:
                response = call(*args, **kw)
                status, body, headers = response.status, response.data, response.headers
            except ApiException as error:  # raised for refused custom kinds, and for TLS
                status, body, headers = error.status, error.body, error.headers or {}
                failure = None if status else self._unreachable(error.reason)
            except HTTPError as error:
                status, body, headers = 0, "", {}
                failure = self._unreachable(_cause(error))
            if 0 < status < 300 and (reply := _json(body)) is not None:
                return reply
            if status == 409 and verb == "create":
                raise AlreadyExists(name)
            if status == 409 and verb == "delete":  # that uid is gone already
                return {}
            if failure is None:
                failure = self._error(status, body, verb, resource, name)
                if status not in AGAIN:
                    raise failure
            retry_after = headers.get("Retry-After", "")
            wait = max(pause, float(retry_after)) if retry_after.isdecimal() else pause
            if time.monotonic() + wait > end or self.wait(wait):
                raise failure
            pause *= 2

    def _unreachable(self, why: object) -> RunError:
        return RunError(
            f"the API server at {self.server} is not reached ({why!s:.300}); check that the "
            "cluster runs, and the network between it and here"
        )

    def _error(
        self, status: int, body: str | bytes | None, verb: str, resource: str, name: str
    ) -> RunError:
        """Return the error for a refusal, with its message and remedy."""
        message, details = _status(body)
        what = f"{resource}/{name}" if name else resource
        if status == 401:
            return ApiRefusal(
                f"the API server at {self.server} does not know our credentials (401); renew them: "
                "`kubectl auth whoami`, or the pod's service account"
            )
        if status == 403:
            return ApiRefusal(
                f"may not {verb} {what} in namespace {self.namespace} (403: {message}); apply "
                f"{_GRANTS.get((resource, verb), 'deploy/k8s/base')}, and check with `kubectl auth "
                f"can-i {verb} {what} -n {self.namespace}`"
            )
        if status == 404 and details.get("name"):
            return ObjectMissing(
                f"cannot {verb} {what} in namespace {self.namespace} (404: {message}); apply the "
                "manifests: `kubectl apply -k deploy/k8s/overlays/cpu`"
            )
        if status == 404:
            return ApiRefusal(
                f"the API server knows no {resource} (404); install the operator: "
                "`helm install monarch-operator`, 0.2.0 or later"
            )
        return RunError(
            f"the API server did not {verb} {what} in namespace {self.namespace} "
            f"({status}: {message})"
            + ("; correct the mesh file" if status == 422 else "; try again once it is well")
        )


class ObjectMissing(RunError):
    """Report that no object of that name exists (404)."""


_GRANTS = {
    (MESHES, "get"): "deploy/k8s/components/scaling",
    (MESHES, "patch"): "deploy/k8s/components/scaling",
    (MESHES, "create"): "deploy/k8s/components/provisioning",
    (MESHES, "delete"): "deploy/k8s/components/provisioning",
}


def _configure(settings: Any, context: str | None) -> None:
    from kubernetes import config

    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"),  # which the client reads at import alone
                context=context,
                client_configuration=settings,
                persist_config=False,
            )
    except config.ConfigException as error:
        raise RunError(
            f"no cluster is configured: {_first_line(error)}; set KUBECONFIG, or "
            "hosts.kubernetes.context to a context of it (`kubectl config get-contexts`)"
        ) from None
    except Exception as error:  # its parser's messages quote the file, which holds secrets
        raise RunError(
            f"the kubeconfig cannot be read ({type(error).__name__}); check it with "
            "`kubectl config view`"
        ) from None


def _shut(response: Any) -> None:
    """End a read of another thread: closing would wait for that, and it for the server."""
    connection = getattr(response.connection, "sock", None)
    if connection is not None:
        with contextlib.suppress(OSError):  # ended already
            connection.shutdown(socket.SHUT_RDWR)


def _json(body: str | bytes | None) -> Object | None:
    """Return the body as a dict, or None where it is no JSON object, such as a proxy's page."""
    try:
        value = json.loads(body or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _status(body: str | bytes | None) -> tuple[str, Object]:
    """Return (message, details) of the Status object of a refusal."""
    status = _json(body)
    if status is None:
        return f"{body!r:.200}", {}
    return f"{status.get('message', '')!s:.400}", status.get("details") or {}


def _cause(error: BaseException) -> str:
    """Return the innermost reason: "Connection refused" instead of the pool's own text."""
    inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
    return _cause(inner) if isinstance(inner, BaseException) else f"{_first_line(error):.200}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
