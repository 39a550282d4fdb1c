"""Provide workers that are pods: those of a mesh's MonarchMeshes, one MonarchMesh a role.

    workers()  list, then watch: yields the pods to attach to, whenever they change
    want()     sets spec.replicas of a role's MonarchMesh; the operator adds or removes pods
    provision  makes the MonarchMeshes at the start, and deletes them at the end

deploy/k8s has the rights that each needs: base to attach, components/scaling to scale,
components/provisioning to provision.

Once its workers are known, a run survives an API server that is unreachable or refuses: it
continues with its present workers and asks again. Only awaited calls, such as `want`, fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from cartridge_forge.plugins.cluster.hosts.kubernetes_client import (
    AlreadyExists,
    ApiRefusal,
    KubernetesClient,
    Object,
    WatchExpired,
)
from cartridge_forge.plugins.cluster.hosts.kubernetes_pods import (
    Pod,
    attachable,
    missing,
    pod_of,
    selector,
    workers,
)
from cartridge_forge.plugins.cluster.manifests.mesh import monarch_mesh, scope_of
from cartridge_forge.plugins.cluster.manifests.objects import mesh_name
from cartridge_forge.plugins.cluster.manifests.sizing import model_size
from cartridge_forge.plugins.cluster.spec import ClusterHosts, KubernetesSpec
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.hosts import HostWorker

MADE_BY = "cartridge-forge/made-by"  # annotation of a MonarchMesh: the controller that made it
CLOSE_S = 4.0  # of close(), at most: a service gives a source 5 s
LONGEST_PAUSE_S = 10.0  # between two attempts to watch
LASTING_S = 1.0  # a watch that ended sooner was cut: pause before the next
POLL_S = 0.5  # between two looks at an object that is being deleted

_log = logging.getLogger(__name__)


class KubernetesHosts:
    """Implement `HostSource` for `hosts.kind: kubernetes`."""

    def __init__(self, spec: RunSpec) -> None:
        """Read the cluster's configuration, without a request. Raises RunError without one."""
        self._run = spec
        self._spec = ClusterHosts.of(spec.mesh.hosts).kubernetes or KubernetesSpec()
        self._space = self._spec.namespace or scope_of(spec).namespace
        self._secured = self._space if spec.mesh.hosts.tls is not None else ""
        self._roles = [name for name, _ in spec.roles]
        self._wanted = {name: role.replicas for name, role in spec.roles}
        self._made_by = os.environ.get("POD_UID") or uuid.uuid4().hex
        self._api = self._connect()
        self._tried: list[str] = []  # MonarchMeshes that this run may have made
        self._making: asyncio.Future[None] | None = None
        self._follower: PodWatcher | None = None
        self._lacking: Sequence[str] = ()

    def _connect(self) -> KubernetesClient:
        return KubernetesClient(self._space, self._spec.context)

    async def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        """Yield the workers, first once every role has its replicas. Raises RunError that names
        each pod's problem when that takes longer than spawn_timeout_s."""
        limit_s = self._run.mesh.spawn_timeout_s
        end = time.monotonic() + limit_s
        if self._spec.provision:
            await self._provision(end)
        follower = self._follower = PodWatcher(
            self._connect(), selector(scope_of(self._run).instance, self._roles)
        )
        await asyncio.to_thread(follower.begin, asyncio.get_running_loop())
        attached: frozenset[tuple[str, int]] = frozenset()
        last_attached: tuple[HostWorker, ...] | None = None
        pods: Sequence[Pod] = ()
        trouble: RunError | None = None
        try:
            while True:
                left_s = None if last_attached is not None else max(0.0, end - time.monotonic())
                try:
                    async with asyncio.timeout(left_s):
                        batch = await follower.latest()
                except TimeoutError:
                    raise self._incomplete(pods, limit_s, trouble) from None
                for news in batch:
                    if not isinstance(news, RunError):
                        pods, trouble = news, None
                        attached = attachable(pods, attached)
                    elif last_attached is None and isinstance(news, ApiRefusal):
                        raise news
                    else:
                        if str(news) != str(trouble):
                            _log.warning("pods are not watched for now: %s", news)
                        trouble = news
                self._lacking = missing(pods, self._wanted, self._space)
                if last_attached is None and self._lacking:
                    continue
                now = workers(pods, attached, self._roles, self._secured)
                if now != last_attached:
                    last_attached = now
                    yield now
        finally:
            follower.end()

    async def want(self, role: str, replicas: int) -> None:
        """Change spec.replicas of a role's MonarchMesh. Its StatefulSet removes the pods with the
        highest ordinals first, which is the order of `workers`."""
        if replicas < 1:
            raise RunError(
                f"{role} cannot have {replicas} replicas: a MonarchMesh has one at least; ask for 1"
            )
        name = mesh_name(role)
        mesh = await asyncio.to_thread(self._api.mesh, name)
        if mesh is None:
            raise RunError(
                f"there is no MonarchMesh {name} in namespace {self._space} to scale; apply the "
                "manifests: `kubectl apply -k deploy/k8s/overlays/cpu`"
            )
        if mesh["spec"]["replicas"] != replicas:
            await asyncio.to_thread(self._api.scale, name, replicas)
        self._wanted[role] = replicas

    def lacking(self) -> Sequence[str]:
        """Return what the pods that are not ready lack, by the last change of any pod."""
        return self._lacking

    async def close(self) -> None:
        """End the watch and delete the run's MonarchMeshes within CLOSE_S. May be called twice."""
        if self._follower is not None:
            self._follower.end()
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._making is not None:  # its thread may still run
                    await asyncio.gather(self._making, return_exceptions=True)
                await self._unmake()
        except TimeoutError:
            raise RunError(
                f"MonarchMeshes {', '.join(self._tried)} were not deleted within {CLOSE_S:g} s; "
                f"`kubectl delete monarchmesh -n {self._space} {' '.join(self._tried)}`"
            ) from None
        finally:
            self._api.close()

    def _incomplete(
        self, pods: Sequence[Pod], limit_s: float, trouble: RunError | None
    ) -> RunError:
        lines = missing(pods, self._wanted, self._space)
        if trouble is not None:
            lines.append(str(trouble))
        if not pods:
            lines.append(
                "check that the operator runs (`kubectl get monarchmeshes,pods "
                f"-n {self._space}`)"
                + (
                    ""
                    if self._spec.provision
                    else " and that the manifests are applied: `kubectl apply -k "
                    "deploy/k8s/overlays/cpu`"
                )
            )
        listed = "".join(f"\n  {line}" for line in lines)
        return RunError(
            f"not all pods in namespace {self._space} were ready within {limit_s:g} s; correct "
            f"what they lack, or raise spawn_timeout_s:{listed}"
        )

    # -- MonarchMeshes of the run ---------------------------------------------------------------

    async def _provision(self, end: float) -> None:
        """Make a MonarchMesh for each role, or none when one of them cannot be made."""
        size = model_size(self._run.learn.model)
        try:
            for name in self._roles:
                await self._make(self._manifest(monarch_mesh(self._run, name, size)), end)
        except RunError:
            await self._unmake()
            raise

    def _manifest(self, mesh: Object) -> Object:
        """Set namespace, image, mark and owner. The owner is the controller's pod, if it is one:
        when that pod is deleted, the cluster deletes the mesh."""
        metadata = mesh["metadata"]
        metadata["namespace"] = self._space
        metadata["annotations"] = {MADE_BY: self._made_by}
        name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
        if name and uid:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
            metadata["ownerReferences"] = [owner]
        for container in mesh["spec"]["podTemplate"]["spec"]["containers"]:
            container["image"] = self._spec.image
        return mesh

    async def _make(self, mesh: Object, end: float) -> None:
        name = mesh["metadata"]["name"]
        if name not in self._tried:
            self._tried.append(name)
        while True:
            # A cancelled thread continues; close() waits for it, so that no mesh is left over.
            self._making = asyncio.ensure_future(asyncio.to_thread(self._api.create, mesh))
            try:
                await asyncio.shield(self._making)
                return
            except ApiRefusal:
                self._tried.remove(name)
                raise
            except AlreadyExists:
                existing = await asyncio.to_thread(self._api.mesh, name)
            if existing is not None and "deletionTimestamp" not in existing["metadata"]:
                if self._is_ours(existing):
                    return  # made by an attempt whose answer was lost
                await self._take_over(existing)
            if time.monotonic() > end:
                raise RunError(
                    f"MonarchMesh {name} of an earlier run was not gone from namespace "
                    f"{self._space} in time; `kubectl get monarchmesh -n {self._space} {name} "
                    "-o yaml` says what holds it"
                )
            await asyncio.sleep(POLL_S)

    async def _take_over(self, mesh: Object) -> None:
        """Delete a mesh whose controller has ended. Raises RunError where it may still be used."""
        metadata = mesh["metadata"]
        for owner in metadata.get("ownerReferences", ()):
            pod = await asyncio.to_thread(self._api.pod, owner["name"])
            ended = pod is None or pod["metadata"]["uid"] != owner["uid"]
            if ended or (pod or {})["status"].get("phase") in ("Succeeded", "Failed"):
                await asyncio.to_thread(self._api.delete, metadata["name"], metadata["uid"])
                return
        raise RunError(
            f"MonarchMesh {metadata['name']} is in namespace {self._space} already, and is not of "
            "this run; attach to it with hosts.kubernetes.provision: false, or take another "
            f"namespace, or `kubectl delete monarchmesh -n {self._space} {metadata['name']}`"
        )

    def _is_ours(self, mesh: Object) -> bool:
        annotations = mesh["metadata"].get("annotations", {})
        return bool(annotations.get(MADE_BY) == self._made_by)

    async def _unmake(self) -> None:
        """Delete the run's MonarchMeshes, the last first. Raises the first failure at the end."""
        failed: list[RunError] = []
        for name in reversed(self._tried[:]):
            try:
                mesh = await asyncio.to_thread(self._api.mesh, name)
                if mesh is not None and self._is_ours(mesh):
                    await asyncio.to_thread(self._api.delete, name, mesh["metadata"]["uid"])
                self._tried.remove(name)
            except RunError as error:
                failed.append(error)
        if failed:
            raise failed[0]


@dataclass
class PodWatcher:
    """Watch the pods of a selector from a thread of its own. All pods are put into `news` at each
    change, and so is each RunError of the API server, after which it tries again."""

    api: KubernetesClient
    selector: str
    news: asyncio.Queue[Sequence[Pod] | RunError] = field(default_factory=asyncio.Queue)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Block until the first list arrives, then watch. Raises RunError when there is no list."""
        items, version = self.api.pods(self.selector)
        pods = {raw["metadata"]["name"]: pod_of(raw) for raw in items}

        def tell(news: Sequence[Pod] | RunError) -> None:
            if not self.api.wait(0):
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self.news.put_nowait, news)

        tell(tuple(pods.values()))
        # A daemon thread: the process may end before the API server has answered.
        threading.Thread(
            target=self._follow, args=(pods, version, tell), name="pods", daemon=True
        ).start()

    async def latest(self) -> list[Sequence[Pod] | RunError]:
        """Return all news since the last call, at least one entry."""
        snapshots = [await self.news.get()]
        while not self.news.empty():
            snapshots.append(self.news.get_nowait())
        return snapshots

    def end(self) -> None:
        """Shut the connection at once; nothing is put into `news` any more."""
        self.api.close()

    def _follow(
        self,
        pods: dict[str, Pod],
        version: str | None,
        tell: Callable[[Sequence[Pod] | RunError], None],
    ) -> None:
        pause = 0.0
        while not self.api.wait(pause):
            start = time.monotonic()
            pause = min(2 * pause, LONGEST_PAUSE_S) or 0.1
            try:
                if version is None:
                    items, version = self.api.pods(self.selector)
                    pods = {raw["metadata"]["name"]: pod_of(raw) for raw in items}
                    tell(tuple(pods.values()))
                for kind, raw in self.api.changes(self.selector, version):
                    version = raw["metadata"]["resourceVersion"]
                    pause = 0.0
                    if kind == "BOOKMARK":
                        continue
                    name = raw["metadata"]["name"]
                    pods = {n: p for n, p in pods.items() if n != name}
                    if kind != "DELETED":
                        pods[name] = pod_of(raw)
                    tell(tuple(pods.values()))
                if time.monotonic() - start > LASTING_S:
                    pause = 0.0
            except WatchExpired:
                version = None
            except RunError as error:
                tell(error)
            except Exception as error:  # also of a connection that `end` shut: then `tell` drops it
                version = None
                tell(RunError(f"the watch failed ({type(error).__name__}); it is begun anew"))
