"""Check what a command needs of its container and pod: ports, probes, variables, mounts, memory,
time to end in, and the pools that a run waits for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from cartridge_forge.plugins.cluster.checks.commands import (
    RUN_HANDLERS,
    SERVE,
    WORKER,
    OurContainer,
)
from cartridge_forge.plugins.cluster.checks.findings import (
    Container,
    Manifest,
    ManifestFault,
    PodTemplate,
    pod_templates,
)
from cartridge_forge.plugins.cluster.manifests.mesh import teacher_keys
from cartridge_forge.plugins.cluster.manifests.objects import (
    DOMAIN,
    WORKER_PORT,
    Scope,
    dashed,
    mesh_name,
)
from cartridge_forge.plugins.cluster.manifests.server import STOP_SECONDS
from cartridge_forge.plugins.cluster.manifests.sizing import GIB, pod_resources
from cartridge_forge.plugins.cluster.spec import ClusterHosts
from cartridge_forge.protocols.secrets import FILE
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.spec.services import LOOPBACK

Faults = Iterator[ManifestFault]

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
GRACE_SECONDS = 30  # of a pod that gives none
RUN_END_SECONDS = 4  # of a run after its --grace: the mesh ends, and the report is written
WORKER_PATHS = ("/hello",)
SERVER_PATHS = ("/health", "/ready", "/ping")
METRICS_PATH = "/metrics"


def check_commands(manifests: Sequence[Manifest], ours: Sequence[OurContainer]) -> Faults:
    """Yield faults of the containers that run our commands."""
    for item in ours:
        if item.handler == WORKER:
            yield from _worker(item)
        elif item.handler == SERVE:
            yield from _server(item)
        elif item.handler in RUN_HANDLERS:
            seconds = float(item.options["grace"]) + RUN_END_SECONDS + _sleep(item.container)
            yield from _grace(item.pod, seconds, "the run's --grace and its end")
            if item.run is not None:
                yield from _run(item, item.run)
                yield from _pools(item, item.run, manifests)


def _worker(ours: OurContainer) -> Faults:
    container, address = ours.container, str(ours.options.get("address") or "")
    host, _, number = address.rpartition("@")[2].rpartition("//")[2].rpartition(":")
    port, tls = int(number) if number.isdecimal() else WORKER_PORT, ours.options.get("tls")
    if host in LOOPBACK:
        yield from _loopback(container, f"listens on {host}", f"listen on 0.0.0.0:{port}")
    elif not (tls or ours.options.get("insecure")):
        what = "a worker that others reach ends at once without TLS"
        remedy = "add --tls DIR, or --insecure behind network policies"
        yield container.finding("command", ".command", what, remedy)
    if tls and not _mounts(container, str(tls)):
        what = f"--tls is {tls}, which is not mounted"
        yield container.finding("files", ".volumeMounts", what, "mount the Secret that has it")
    yield from _declared(container, {"the worker": port, "its version endpoint": port + 1})
    # kubelet has no certificate to show: with TLS it may only see whether the worker listens.
    yield from _probes(container, {port + 1: () if tls else WORKER_PATHS, port: ()})
    owner = container.pod.owner
    if owner.kind == "MonarchMesh" and owner.spec.get("port", WORKER_PORT) != port:
        what = f"is {owner.spec.get('port', WORKER_PORT)}, and its worker listens on {port}"
        yield owner.finding("ports", ".spec.port", what, "make them equal")
    if isinstance(drain := ours.options.get("grace"), int | float):
        yield from _grace(container.pod, float(drain), "the worker's --grace")


def _server(ours: OurContainer) -> Faults:
    container, spec = ours.container, ours.serve
    if spec is None:
        return
    host, _, number = spec.http.listen.rpartition(":")
    if host in LOOPBACK:
        what = f"http.listen is {spec.http.listen}"
        yield from _loopback(container, what, "add --set http.listen=0.0.0.0:8000")
    yield from _declared(container, {"http.listen": int(number)})
    yield from _probes(container, {int(number): SERVER_PATHS})
    keys = [spec.http.key_env, *(key.env for key in spec.http.keys.values())]
    yield from _variables(container, "http names", [key for key in keys if key])
    yield from _written(ours, "library", spec.library)
    seconds = spec.http.drain_s + STOP_SECONDS + _sleep(container)
    yield from _grace(container.pod, seconds, "http.drain_s and the end of the generators")
    probe = container.value.get("livenessProbe")
    if probe and "startupProbe" not in container.value:
        seconds = (probe.get("periodSeconds") or 10) * (probe.get("failureThreshold") or 3)
        seconds += probe.get("initialDelaySeconds") or 0
        if seconds < spec.spawn_timeout_s:
            what = (
                f"ends the server after {seconds} s, and its start may take spawn_timeout_s, "
                f"{spec.spawn_timeout_s:g} s"
            )
            remedy = "add a startupProbe of /health"
            yield container.finding("probes", ".livenessProbe", what, remedy)


def _run(ours: OurContainer, spec: RunSpec) -> Faults:
    container, control = ours.container, spec.mesh.control
    paths: dict[int, Sequence[str]] = {}
    ports: dict[str, int] = {}
    for key, address, served in (
        ("control.listen", control.listen, ()),
        ("telemetry.metrics", spec.mesh.telemetry.metrics or "", (METRICS_PATH,)),
    ):
        host, _, number = address.rpartition(":")
        if int(number or 0):
            paths[int(number)] = served
            if host not in LOOPBACK:
                ports[key] = int(number)
    yield from _declared(container, ports)
    yield from _probes(container, paths)
    probe = container.value.get("readinessProbe") or {}
    if probe.get("grpc") and control.tls_cert:
        what = "speaks neither TLS nor tokens, and the control plane demands both"
        remedy = "use the command of the rendered Job"
        yield container.finding("probes", ".readinessProbe.grpc", what, remedy)
    for word in map(str, (probe.get("exec") or {}).get("command") or ()):
        local = re.fullmatch(r"localhost:([0-9]+)", word)
        if local and int(local[1]) not in paths:
            what = f"asks {word}, and control.listen is {control.listen}"
            path = ".readinessProbe.exec.command"
            yield container.finding("probes", path, what, "make them equal")
    if control.token_env:
        yield from _variables(container, "control.token_env names", [control.token_env])
    for key, file in (("tls_cert", control.tls_cert), ("tls_key", control.tls_key)):
        if file and not _mounts(container, file):
            what = f"control.{key} is {file}, which is not mounted"
            yield container.finding("files", ".volumeMounts", what, "mount the Secret that has it")
    folder = str(ours.options.get("run_dir") or "runs")
    yield from _written(ours, "--run-dir", folder, stored=spec.mesh.records.store is not None)


def _loopback(container: Container, what: str, remedy: str) -> Faults:
    yield container.finding("ports", ".command", f"{what}: no other pod reaches it", remedy)


def _declared(container: Container, ports: Mapping[str, int]) -> Faults:
    """Yield ports that the command serves and the container does not declare."""
    declared = container.ports()
    for name, port in ports.items():
        if declared and port not in declared:
            numbers = ", ".join(map(str, sorted(declared)))
            what = f"{name} is port {port}, and the container declares {numbers}"
            yield container.finding("ports", ".ports", what, "make them equal")


def _probes(container: Container, paths: Mapping[int, Sequence[str]]) -> Faults:
    """Yield probes of ports that nothing serves, and of paths that the port's server has not."""
    served = [f"{path} of port {port}" for port, values in paths.items() for path in values]
    remedy = f"ask {' or '.join(served)}" if served else "use a command"
    for name in PROBES:
        probe = container.value.get(name) or {}
        for handler in ("httpGet", "tcpSocket"):
            port = container.port(probe[handler].get("port")) if probe.get(handler) else None
            if probe.get(handler) is None:
                continue
            path = probe[handler].get("path", "/")
            if port is None or port not in paths:
                what = f"asks port {probe[handler].get('port')}, where nothing listens"
                yield container.finding("probes", f".{name}.{handler}.port", what, remedy)
            elif handler == "httpGet" and path not in paths[port]:
                what = f"asks {path} of port {port}, which does not serve it"
                yield container.finding("probes", f".{name}.{handler}.path", what, remedy)


def _variables(container: Container, what: str, names: Sequence[str]) -> Faults:
    """Yield the names of variables that a container does not have."""
    set_names = {variable.get("name") for variable in container.get("env")}
    for name in () if container.get("envFrom") else names:
        if name not in set_names and not name.startswith(FILE):
            text = f"{what} {name}, which it has not"
            yield container.finding("env", ".env", text, "add it from a Secret")


def _mounts(container: Container, path: str) -> bool:
    """Return whether a mount covers a path; of a Secret with items, whether it has the file."""
    volumes = {v["name"]: v for v in container.pod.spec.get("volumes") or ()}
    for mount in container.get("volumeMounts"):
        base = mount["mountPath"].rstrip("/")
        if f"{path}/".startswith(f"{base}/"):
            items = ((volumes.get(mount["name"]) or {}).get("secret") or {}).get("items")
            name = path.removeprefix(base).lstrip("/")
            return not items or not name or name in {item["path"] for item in items}
    return False


def _written(ours: OurContainer, key: str, path: str, *, stored: bool = False) -> Faults:
    """Yield a folder that cannot be written, or ends with the pod and is not `stored` elsewhere."""
    container = ours.container
    folder = (
        path if path.startswith("/") else f"{container.value.get('workingDir') or '/app'}/{path}"
    )
    volumes = {v["name"]: v for v in container.pod.spec.get("volumes") or ()}
    mounts = [
        mount
        for mount in sorted(container.get("volumeMounts"), key=lambda m: len(m["mountPath"]))
        if f"{folder}/".startswith(f"{mount['mountPath'].rstrip('/')}/")
    ]
    context, remedy = container.value.get("securityContext") or {}, "mount a claim there"
    if not mounts:
        if not context.get("readOnlyRootFilesystem"):
            return
        what = "which cannot be written"
    elif mounts[-1].get("readOnly"):
        what, remedy = "which is mounted readOnly", "mount it without"
    elif not stored and "emptyDir" in volumes.get(mounts[-1]["name"], {}):
        what = "an emptyDir: it is gone with the pod"
    else:
        return
    yield container.finding("files", ".volumeMounts", f"{key} is {folder}, {what}", remedy)


def _sleep(container: Container) -> float:
    """Return the seconds that a container sleeps before it gets SIGTERM."""
    sleep = ((container.value.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
    return float(sleep.get("seconds") or 0)


def _grace(template: PodTemplate, seconds: float, what: str) -> Faults:
    grace = template.spec.get("terminationGracePeriodSeconds", GRACE_SECONDS)
    if isinstance(grace, int) and grace < seconds:
        text = f"is {grace} s, and {what} take {seconds:g} s: it is killed before"
        path = ".spec.terminationGracePeriodSeconds"
        yield template.finding("grace", path, text, f"give {seconds:g} or more")


def _pools(ours: OurContainer, spec: RunSpec, manifests: Sequence[Manifest]) -> Faults:
    """Yield roles without the pods that the run looks for, by namespace and labels."""
    hosts, owner, container = spec.mesh.hosts, ours.pod.owner, ours.container
    if hosts.kind != "kubernetes":
        return
    options = ClusterHosts.of(hosts).kubernetes
    scope = Scope(dashed(spec.mesh.name))
    space = (options.namespace if options else None) or scope.namespace
    if owner.namespace and space not in (owner.namespace, "$(POD_NAMESPACE)"):
        what = f"looks for its pods in namespace {space}, and is in {owner.namespace}"
        remedy = f"add --set hosts.kubernetes.namespace={owner.namespace}"
        yield container.finding("pools", ".command", what, remedy)
    if options is not None and options.provision:
        return
    templates = [t for t in pod_templates(manifests) if t.owner.kind == "MonarchMesh"]
    for name, role in spec.roles:
        labels = scope.of(dashed(name)).labels
        pool = next((t for t in templates if labels.items() <= t.labels.items()), None)
        if pool is None:
            what = (
                f"the run has role {name}, and no MonarchMesh makes pods with "
                f"{DOMAIN}/component: {labels[f'{DOMAIN}/component']}"
            )
            remedy = f"add MonarchMesh {mesh_name(name)} with these labels in its podTemplate"
            yield container.finding("pools", ".command", what, remedy)
            continue
        if pool.count < role.replicas:
            what = f"is {pool.count}, and the run waits for {role.replicas}"
            yield pool.owner.finding("pools", ".spec.replicas", what, f"give {role.replicas}")
        for worker in (c for c in pool.containers() if c.words):
            if ("--tls" in worker.words) != bool(hosts.tls):
                what = (
                    f"{'talks' if hosts.tls is None else 'lacks'} TLS, and hosts.tls of the run is "
                    f"{hosts.tls or 'not given'}"
                )
                remedy = "give both --tls DIR and hosts.tls, or neither"
                yield worker.finding("pools", ".command", what, remedy)
            if name == "teacher_replay":
                yield from _variables(worker, "a teacher's key_env is", list(teacher_keys(spec)))
            if ours.size is not None:
                yield from _memory(worker, name, pod_resources(spec, name, role, ours.size).memory)


def _memory(container: Container, role: str, gib: int) -> Faults:
    limit = ((container.value.get("resources") or {}).get("limits") or {}).get("memory")
    parts = re.fullmatch(r"([0-9.]+)([kMGTP]?)(i?)", str(limit).replace("K", "k"))
    if parts is None:  # no limit, or a form that no plan writes
        return
    unit = (1024 if parts[3] else 1000) ** " kMGTP".index(parts[2] or " ")
    if float(parts[1]) * unit < gib * GIB:
        what = f"is {limit}, and the plan of {role} is {gib}Gi (forge plan --sizing)"
        yield container.finding("memory", ".resources.limits.memory", what, f"give {gib}Gi or more")
