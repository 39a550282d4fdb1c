"""Check what containers run against what their pods give them: ports, probes, variables, memory,
time to end in, and the pools that a run looks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from deploy.checks.commands import RUN_HANDLERS, SERVE, WORKER, OurContainer
from deploy.checks.findings import Container, Manifest, ManifestFault, PodTemplate, pod_templates
from deploy.checks.quantities import quantity
from deploy.checks.shapes import PROBES
from deploy.manifests.mesh import teacher_keys
from deploy.manifests.objects import DOMAIN, WORKER_PORT, Scope, dashed, mesh_name
from deploy.manifests.server import STOP_SECONDS
from deploy.manifests.sizing import GIB, pod_resources
from protocols.secrets import FILE
from protocols.spec.mesh import RunSpec
from protocols.spec.services import LOOPBACK

GRACE_SECONDS = 30  # of a pod that gives none
RUN_END_SECONDS = 4  # of a run after its --grace: the mesh ends, and the report is written
WORKER_PATHS = ("/hello",)
SERVER_PATHS = ("/health", "/ready", "/ping")
METRICS_PATH = "/metrics"


def meant(manifests: Sequence[Manifest], ours: Sequence[OurContainer]) -> Iterator[ManifestFault]:
    """Yield faults of the containers that run our commands."""
    for each in ours:
        if each.handler == WORKER:
            yield from _worker(each)
        elif each.handler == SERVE:
            yield from _server(each)
        elif each.handler in RUN_HANDLERS:
            needed = float(each.options["grace"]) + RUN_END_SECONDS + _sleep(each.container)
            yield from _grace(each.pod, needed, "the run's --grace and its end")
            if each.run is not None:
                yield from _run(each, each.run)
                yield from _pools(each, each.run, manifests)


def _worker(each: OurContainer) -> Iterator[ManifestFault]:
    container, address = each.container, str(each.options.get("address") or "")
    listens = address.rpartition("@")[2]
    host, _, number = listens.rpartition("//")[2].rpartition(":")
    port = int(number) if number.isdecimal() else WORKER_PORT
    if host in LOOPBACK:
        yield container.finding(
            "ports",
            ".command",
            f"listens on {host}: no other pod reaches it",
            f"listen on 0.0.0.0:{port}",
        )
    if host not in LOOPBACK and not (each.options.get("tls") or each.options.get("insecure")):
        yield container.finding(
            "command",
            ".command",
            "a worker that others reach ends at once without TLS",
            "add --tls DIR, or --insecure behind network policies",
        )
    mounts = [f"{m['mountPath'].rstrip('/')}/" for m in container.get("volumeMounts")]
    folder = each.options.get("tls")
    if folder and not any(f"{folder}/".startswith(mount) for mount in mounts):
        what = f"--tls is {folder}, which is not there"
        yield container.finding("files", ".volumeMounts", what, "mount the Secret that has it")
    yield from _declared(container, {"the worker": port, "its version endpoint": port + 1})
    # kubelet has no certificate to show: with TLS it may only see whether the worker listens.
    yield from _probes(container, {port + 1: () if folder else WORKER_PATHS, port: ()})
    owner = container.pod.owner
    if owner.kind == "MonarchMesh" and owner.spec.get("port", WORKER_PORT) != port:
        yield owner.finding(
            "ports",
            ".spec.port",
            f"is {owner.spec.get('port', WORKER_PORT)}, and its worker listens on {port}",
            "make them equal",
        )
    drain = each.options.get("grace")
    if isinstance(drain, int | float):
        yield from _grace(container.pod, float(drain), "the worker's --grace")


def _server(each: OurContainer) -> Iterator[ManifestFault]:
    container, spec = each.container, each.serve
    if spec is None:
        return
    host, _, number = spec.http.listen.rpartition(":")
    if host in LOOPBACK:
        yield container.finding(
            "ports",
            ".command",
            f"http.listen is {spec.http.listen}: no other pod reaches it",
            "add --set http.listen=0.0.0.0:8000",
        )
    yield from _declared(container, {"http.listen": int(number)})
    yield from _probes(container, {int(number): SERVER_PATHS})
    keys = [spec.http.key_env, *(key.env for key in spec.http.keys.values())]
    yield from _variables(each, "http", [key for key in keys if key])
    yield from _written(each, "library", spec.library)
    needed = spec.http.drain_s + STOP_SECONDS + _sleep(container)
    yield from _grace(container.pod, needed, "http.drain_s and the end of the generators")
    if "startupProbe" not in container.value and (probe := container.value.get("livenessProbe")):
        patience = (probe.get("initialDelaySeconds") or 0) + (probe.get("periodSeconds") or 10) * (
            probe.get("failureThreshold") or 3
        )
        if patience < spec.spawn_timeout_s:
            yield container.finding(
                "probes",
                ".livenessProbe",
                f"ends the server after {patience} s, and its start may take spawn_timeout_s, "
                f"{spec.spawn_timeout_s:g} s",
                "add a startupProbe of /health",
            )


def _run(each: OurContainer, spec: RunSpec) -> Iterator[ManifestFault]:
    container, control = each.container, spec.mesh.control
    host, _, number = control.listen.rpartition(":")
    ports: dict[int, Sequence[str]] = {}
    named: dict[str, int] = {}
    if int(number):
        ports[int(number)] = ()
        if host not in LOOPBACK:
            named["control.listen"] = int(number)
    if metrics := spec.mesh.telemetry.metrics:
        host, _, number = metrics.rpartition(":")
        if int(number) and host not in LOOPBACK:
            named["telemetry.metrics"] = int(number)
            ports[int(number)] = (METRICS_PATH,)
    yield from _declared(container, named)
    yield from _probes(container, ports)
    probe = container.value.get("readinessProbe") or {}
    if probe.get("grpc") and control.tls_cert:
        yield container.finding(
            "probes",
            ".readinessProbe.grpc",
            "speaks neither TLS nor tokens, and the control plane demands both",
            "use the command of the rendered Job",
        )
    words = [str(w) for w in (probe.get("exec") or {}).get("command") or ()]
    for word in words:
        found = re.fullmatch(r"localhost:([0-9]+)", word)
        if found and int(found[1]) not in ports:
            yield container.finding(
                "probes",
                ".readinessProbe.exec.command",
                f"asks {word}, and control.listen is {control.listen}",
                "make them equal",
            )
    yield from _variables(
        each, "control.token_env", [control.token_env] if control.token_env else []
    )
    for key, path in (("control.tls_cert", control.tls_cert), ("control.tls_key", control.tls_key)):
        if path and not _is_mounted(container, path):
            yield container.finding(
                "files",
                ".volumeMounts",
                f"{key} is {path}, which is not there",
                "mount the Secret that has it",
            )
    folder = str(each.options.get("run_dir") or "runs")
    yield from _written(each, "--run-dir", folder, stored=spec.mesh.records.store is not None)


def _declared(container: Container, named: Mapping[str, int]) -> Iterator[ManifestFault]:
    """Yield ports that the command serves and that the container does not declare: named ports of
    probes, Services and monitors, and reviewers, go by those."""
    have = container.ports()
    for what, port in named.items():
        if have and port not in have:
            yield container.finding(
                "ports",
                ".ports",
                f"{what} is port {port}, and the container "
                f"declares {', '.join(map(str, sorted(have)))}",
                "make them equal",
            )


def _probes(container: Container, paths: Mapping[int, Sequence[str]]) -> Iterator[ManifestFault]:
    """Yield probes of ports that nothing serves, and of paths that the port's server has not."""
    for name in PROBES:
        probe = container.value.get(name) or {}
        for way in ("httpGet", "tcpSocket"):
            asked = probe.get(way)
            port = container.port(asked.get("port")) if asked else None
            if asked is None or port is None:
                continue
            where = f".{name}.{way}"
            if port not in paths:
                yield container.finding(
                    "probes",
                    f"{where}.port",
                    f"asks port {port}, where nothing listens",
                    _served(paths),
                )
            elif way == "httpGet" and asked.get("path", "/") not in paths[port]:
                yield container.finding(
                    "probes",
                    f"{where}.path",
                    f"asks {asked.get('path', '/')} of port {port}, which does not serve it",
                    _served(paths),
                )


def _served(paths: Mapping[int, Sequence[str]]) -> str:
    known = [f"{path} of port {port}" for port, there in paths.items() for path in there]
    return f"ask {' or '.join(known)}" if known else "use a command"


def _variables(each: OurContainer, key: str, wanted: Sequence[str]) -> Iterator[ManifestFault]:
    have = each.variables()
    for name in wanted if have is not None else ():
        if not name.startswith(FILE) and name not in (have or ()):
            yield each.container.finding(
                "env", ".env", f"{key} names {name}, which it has not", "add it from a Secret"
            )


def _written(
    each: OurContainer, key: str, path: str, *, stored: bool = False
) -> Iterator[ManifestFault]:
    """Yield a folder that is to be written and cannot be, or is gone with the pod and not `stored`
    elsewhere."""
    container = each.container
    folder = (
        path if path.startswith("/") else f"{container.value.get('workingDir') or '/app'}/{path}"
    )
    mounts = [m for m in container.get("volumeMounts")
              if f"{folder}/".startswith(f"{m['mountPath'].rstrip('/')}/")]  # fmt: skip
    volumes = {v["name"]: v for v in container.pod.spec.get("volumes") or ()}
    fixed = (container.value.get("securityContext") or {}).get("readOnlyRootFilesystem")
    if not mounts and fixed:
        yield container.finding(
            "files",
            ".volumeMounts",
            f"{key} is {folder}, which cannot be written",
            "mount a claim there",
        )
    for mount in sorted(mounts, key=lambda m: len(m["mountPath"]))[-1:]:
        if mount.get("readOnly"):
            yield container.finding(
                "files",
                ".volumeMounts",
                f"{key} is {folder}, which is mounted readOnly",
                "mount it without",
            )
        elif not stored and "emptyDir" in volumes.get(mount["name"], {}):
            yield container.finding(
                "files",
                ".volumeMounts",
                f"{key} is {folder}, an emptyDir: it is gone with the pod",
                "mount a claim there",
            )


def _is_mounted(container: Container, path: str) -> bool:
    volumes = {v["name"]: v for v in container.pod.spec.get("volumes") or ()}
    for mount in container.get("volumeMounts"):
        base = mount["mountPath"].rstrip("/")
        if path == base:
            return True
        if path.startswith(f"{base}/"):
            items = ((volumes.get(mount["name"]) or {}).get("secret") or {}).get("items")
            return not items or path.removeprefix(f"{base}/") in {i["path"] for i in items}
    return False


def _sleep(container: Container) -> float:
    """Return the seconds that a container sleeps before it gets SIGTERM."""
    sleep = ((container.value.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
    return float(sleep.get("seconds") or 0)


def _grace(template: PodTemplate, needed: float, what: str) -> Iterator[ManifestFault]:
    grace = template.spec.get("terminationGracePeriodSeconds", GRACE_SECONDS)
    if isinstance(grace, int) and grace < needed:
        yield template.finding(
            "grace",
            ".spec.terminationGracePeriodSeconds",
            f"is {grace} s, and {what} take {needed:g} s: it is killed before",
            f"give {needed:g} or more",
        )


def _pools(
    each: OurContainer, spec: RunSpec, manifests: Sequence[Manifest]
) -> Iterator[ManifestFault]:
    """Yield roles without the pods that the run looks for, by namespace and labels."""
    hosts, owner = spec.mesh.hosts, each.pod.owner
    if hosts.kind != "kubernetes":
        return
    options = hosts.kubernetes
    scope = Scope(dashed(spec.mesh.name))
    space = (options.namespace if options else None) or scope.namespace
    if space == "$(POD_NAMESPACE)":  # that of the pod, wherever it is
        space = owner.namespace
    if owner.namespace and owner.namespace != space:
        yield each.container.finding(
            "pools",
            ".command",
            f"looks for its pods in namespace {space}, and is in {owner.namespace}",
            f"add --set hosts.kubernetes.namespace={owner.namespace}",
        )
    if options is not None and options.provision:
        return
    templates = [t for t in pod_templates(manifests) if t.owner.kind == "MonarchMesh"]
    for name, role in spec.roles:
        wanted = scope.of(dashed(name)).labels
        pool = next((t for t in templates if wanted.items() <= t.labels.items()), None)
        if pool is None:
            yield each.container.finding(
                "pools",
                ".command",
                f"the run has role {name}, and no MonarchMesh makes pods with "
                f"{DOMAIN}/component: {wanted[f'{DOMAIN}/component']}",
                f"add MonarchMesh {mesh_name(name)} with these labels in its podTemplate",
            )
            continue
        if pool.count < role.replicas:
            yield pool.owner.finding(
                "pools",
                ".spec.replicas",
                f"is {pool.count}, and the run waits for {role.replicas}",
                f"give {role.replicas}",
            )
        if name == "teacher_replay":
            yield from _keys(pool, spec)
        for container in pool.containers():
            if container.words and ("--tls" in container.words) != bool(hosts.tls):
                yield container.finding(
                    "pools",
                    ".command",
                    f"{'talks' if hosts.tls is None else 'lacks'} TLS, and hosts.tls of the run is "
                    f"{hosts.tls or 'not given'}",
                    "give both --tls DIR and hosts.tls, or neither",
                )
        if each.size is not None:
            needed = pod_resources(spec, name, role, each.size).memory * GIB
            yield from _memory(pool, name, needed)


def _keys(pool: PodTemplate, spec: RunSpec) -> Iterator[ManifestFault]:
    for container in pool.containers():
        have = {v.get("name") for v in container.get("env")}
        for key in () if container.get("envFrom") or not container.words else teacher_keys(spec):
            if key not in have and not key.startswith(FILE):
                yield container.finding(
                    "env",
                    ".env",
                    f"a teacher's key_env is {key}, which it has not",
                    "add it from a Secret",
                )


def _memory(pool: PodTemplate, role: str, needed: int) -> Iterator[ManifestFault]:
    for container in pool.containers():
        limit = ((container.value.get("resources") or {}).get("limits") or {}).get("memory")
        held = quantity(limit) if limit is not None else None
        if container.words and held is not None and held < needed:
            yield container.finding(
                "memory",
                ".resources.limits.memory",
                f"is {limit}, and the plan of {role} is {needed // GIB}Gi (forge plan --sizing)",
                f"give {needed // GIB}Gi or more",
            )
