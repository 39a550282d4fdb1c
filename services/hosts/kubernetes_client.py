"""The API server of a cluster, as far as a run asks it: pods to see, MonarchMeshes to make.

The official client, blocking: call it from threads. Every call ends by itself: connecting and each
answer have their timeouts, and what the server puts off (429, 5xx, no connection) is asked again
for PATIENCE_S at most. Failures are RunErrors that name the remedy. The client's own texts are not
handed on: they hold headers, and a kubeconfig's parser quotes its lines.

`kubernetes` is imported when it is first needed: it takes half a second.
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

from deploy.manifests.objects import MONARCH_API
from protocols.errors import RunError

Object = dict[str, Any]

CONNECT_S = 3.0
ANSWER_S = 10.0
PATIENCE_S = 6.0  # of one call, its repetitions included
PAUSE_S = 0.2  # before the first of them, then doubled
WATCH_S = 30  # the server ends a watch after that, and it is begun again where it ended
AGAIN = (409, 429, 500, 502, 503, 504)
MESHES = "monarchmeshes.monarch.pytorch.org"


class ApiRefusal(RunError):
    """What the API server refuses however often it is asked: 401, 403, no such kind."""


class WatchExpired(Exception):
    """The version to watch from is no longer kept (410): list again."""


class AlreadyExists(Exception):
    """An object of that name is there already (409)."""


class KubernetesClient:
    """Pods and MonarchMeshes of one namespace. Safe to call from several threads."""

    def __init__(self, namespace: str, context: str | None) -> None:
        """Within a pod by its service account, else by the kubeconfig's `context` (None: its
        current one). Asks nothing yet. Raises RunError where there is no usable configuration."""
        from kubernetes import client

        self.namespace = namespace
        settings = client.Configuration()
        settings.retries = False  # by us, with a bound
        settings.connection_pool_maxsize = 4
        _configure(settings, context)
        self.server: str = settings.host
        self._client = client.ApiClient(settings)
        self._core = client.CoreV1Api(self._client)
        self._custom = client.CustomObjectsApi(self._client)
        self._closed = threading.Event()
        self._response: Any = None  # of the watch, as long as it lasts

    def pods(self, selector: str) -> tuple[list[Object], str]:
        """Every pod of a selector, and the version from which to watch them."""
        found = self._asked(
            "list", "pods", "", self._core.list_namespaced_pod, self.namespace,
            label_selector=selector,
        )  # fmt: skip
        return found["items"], found["metadata"]["resourceVersion"]

    def pod(self, name: str) -> Object | None:
        """None where there is none of that name."""
        return self._found(
            "get", "pods", name, self._core.read_namespaced_pod, name, self.namespace
        )

    def changes(self, selector: str, version: str) -> Iterator[tuple[str, Object]]:
        """(ADDED, MODIFIED, DELETED or BOOKMARK, pod) from a version on, until the server ends the
        watch or the connection is cut. Raises Expired, or RunError where it cannot be begun."""
        from kubernetes import watch
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, ProtocolError, ReadTimeoutError

        def begin(*args: Any, **kwargs: Any) -> Any:
            self._response = response = self._core.list_namespaced_pod(*args, **kwargs)
            if self._closed.is_set():  # close() came too early to see it
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
            said = error.body or error.reason
            raise self._error(error.status, said, "watch", "pods", "") from None
        except (ProtocolError, ReadTimeoutError):
            return  # cut
        except HTTPError as error:
            raise self._unreachable(_cause(error)) from None
        finally:
            self._response = None

    def mesh(self, name: str) -> Object | None:
        """A MonarchMesh; None where there is none of that name."""
        call = self._custom.get_namespaced_custom_object
        return self._found("get", MESHES, name, call, *self._meshes, name)

    def create(self, mesh: Object) -> None:
        """Raises Exists."""
        call = self._custom.create_namespaced_custom_object
        self._asked("create", MESHES, mesh["metadata"]["name"], call, *self._meshes, mesh)

    def scale(self, name: str, replicas: int) -> None:
        """Have the operator keep so many pods of a MonarchMesh."""
        self._asked(
            "patch", MESHES, name, self._custom.patch_namespaced_custom_object,
            *self._meshes, name, {"spec": {"replicas": replicas}},
            _content_type="application/merge-patch+json",
        )  # fmt: skip

    def delete(self, name: str, uid: str) -> None:
        """Let go of the MonarchMesh with that uid, and of its pods; nothing where it is gone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        call = self._custom.delete_namespaced_custom_object
        self._found("delete", MESHES, name, call, *self._meshes, name, body=body)

    def wait(self, seconds: float) -> bool:
        """Whether it was closed meanwhile."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        """End the watch, and what waits between two attempts. May be called from any thread."""
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
            return self._asked(*args, **kwargs)
        except ObjectMissing:
            return None

    def _asked(
        self, verb: str, resource: str, name: str, call: Callable[..., Any], *args: Any, **kw: Any
    ) -> Object:
        """The answer, as a dict, to what may be asked several times."""
        # urllib3's own Retry counts attempts: it has no bound in seconds, and sleeps through a
        # close(). So the client is told to try once, and the loop is here.
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kw |= {"_preload_content": False, "_request_timeout": (CONNECT_S, ANSWER_S)}
        end, pause = time.monotonic() + PATIENCE_S, PAUSE_S
        while True:
            failure = None
            try:
                response = call(*args, **kw)
                status, body, headers = response.status, response.data, response.headers
            except ApiException as error:  # how custom kinds are refused, and TLS
                status, body, headers = error.status, error.body, error.headers or {}
                failure = None if status else self._unreachable(error.reason)
            except HTTPError as error:
                status, body, headers = 0, "", {}
                failure = self._unreachable(_cause(error))
            if 0 < status < 300 and (found := _json(body)) is not None:
                return found
            if status == 409 and verb == "create":
                raise AlreadyExists(name)
            if status == 409 and verb == "delete":  # that uid is gone already
                return {}
            if failure is None:
                failure = self._error(status, body, verb, resource, name)
                if status not in AGAIN:
                    raise failure
            asked = headers.get("Retry-After", "")
            wait = max(pause, float(asked)) if asked.isdecimal() else pause
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
        """What a refusal says, and what to do about it."""
        said, details = _status(body)
        what = f"{resource}/{name}" if name else resource
        if status == 401:
            return ApiRefusal(
                f"the API server at {self.server} does not know our credentials (401); renew them: "
                "`kubectl auth whoami`, or the pod's service account"
            )
        if status == 403:
            return ApiRefusal(
                f"may not {verb} {what} in namespace {self.namespace} (403: {said}); apply "
                f"{_GRANTS.get((resource, verb), 'deploy/k8s/base')}, and check with `kubectl auth "
                f"can-i {verb} {what} -n {self.namespace}`"
            )
        if status == 404 and details.get("name"):
            return ObjectMissing(
                f"cannot {verb} {what} in namespace {self.namespace} (404: {said}); apply the "
                "manifests: `kubectl apply -k deploy/k8s/overlays/cpu`"
            )
        if status == 404:
            return ApiRefusal(
                f"the API server knows no {resource} (404); install the operator: "
                "`helm install monarch-operator`, 0.2.0 or later"
            )
        return RunError(
            f"the API server did not {verb} {what} in namespace {self.namespace} ({status}: {said})"
            + ("; correct the mesh file" if status == 422 else "; try again once it is well")
        )


class ObjectMissing(RunError):
    """No object of that name (404)."""


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
    except Exception as error:  # its parser's words quote the file, and it holds secrets
        raise RunError(
            f"the kubeconfig cannot be read ({type(error).__name__}); check it with "
            "`kubectl config view`"
        ) from None


def _shut(response: Any) -> None:
    """End what another thread reads: closing would wait for it, and it for the server."""
    connection = getattr(response.connection, "sock", None)
    if connection is not None:
        with contextlib.suppress(OSError):  # ended already
            connection.shutdown(socket.SHUT_RDWR)


def _json(body: str | bytes | None) -> Object | None:
    """None where it is no JSON object: of a proxy, and not of the API server."""
    try:
        found = json.loads(body or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _status(body: str | bytes | None) -> tuple[str, Object]:
    """(message, details) of the Status object that the API server answers a refusal with."""
    status = _json(body)
    if status is None:
        return f"{body!r:.200}", {}
    return f"{status.get('message', '')!s:.400}", status.get("details") or {}


def _cause(error: BaseException) -> str:
    """The innermost reason: "Connection refused" rather than the pool's own words."""
    inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
    return _cause(inner) if isinstance(inner, BaseException) else f"{_first_line(error):.200}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
