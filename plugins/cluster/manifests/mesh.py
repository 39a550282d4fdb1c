"""Render a training mesh: a MonarchMesh for each pool, and the controller that attaches to them.

    ConfigMap mesh -> Job controller --attaches (pods get, list, watch)--> MonarchMesh generator
        PVC runs  <--------'                                               MonarchMesh trainer ...

The controller is a Job, not a Deployment: a run ends with an exit code, and a Deployment would
start a finished run again. A lost pod is replaced once it is gone, so that a run never has two
writers, and the new pod continues with --resume unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import join, normpath

from cartridge_forge.plugins.cluster.manifests.devices import apart, together
from cartridge_forge.plugins.cluster.manifests.objects import (
    HELLO_PORT,
    HOME,
    MONARCH_API,
    WORKER_PORT,
    Object,
    Scope,
    dashed,
    from_monitoring,
    from_namespace,
    mesh_name,
    pod,
    secret_env,
    settings,
    tcp,
)
from cartridge_forge.plugins.cluster.manifests.sizing import (
    ModelSize,
    controller_resources,
    pod_resources,
)
from cartridge_forge.plugins.cluster.manifests.volumes import TOKEN as HUB_TOKEN
from cartridge_forge.plugins.cluster.manifests.volumes import (
    ModelVolume,
    filling,
    model_volume,
    runs_claim,
    runs_volume,
    store_secret,
    waiting,
    with_store,
)
from cartridge_forge.plugins.cluster.spec import DeploymentSpec
from cartridge_forge.plugins.replay.spec import ReplayLearn
from cartridge_forge.protocols.spec.mesh import RunSpec

CONTROL_PORT = 50051
METRICS_PORT = 9464
CONTROL_SECRET = "forge-control"
PEM_KEYS = ("ca.crt", "tls.crt", "tls.key")
CONTROL_KEYS = (*PEM_KEYS, "token")
TOKEN = "FORGE_CONTROL_TOKEN"
TEACHERS_SECRET = "forge-teachers"
PEMS = "/etc/forge/control"
MESH_SECRET = "forge-mesh"  # of hosts.tls, which is where it is mounted
# Asks the gRPC health service over mutual TLS, with the token.
HEALTH_CHECK = [
    "python", "-m", "cartridge_forge.forge_run.commands.health_check", f"localhost:{CONTROL_PORT}",
    PEMS, TOKEN,
]  # fmt: skip
# Roles that write to runs, besides the controller: checkpoints and the last state, the ledger.
WRITES_RUNS = ("trainer", "teacher_replay")
STEERS = "cartridge-forge/steers"  # label of the namespaces whose pods may steer a run
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
NOT_PUBLIC = (*PRIVATE, "100.64.0.0/10", "169.254.0.0/16")


@dataclass(frozen=True)
class MeshFiles:
    """Hold a mesh's files: names, texts, and the `--set` overrides it is run with. `values_name` is
    the file of the cluster's values, "" for the defaults."""

    mesh_name: str
    mesh_text: str
    config_name: str  # relative to the mesh file: "../configs/three_channels.yaml"
    config_text: str
    sets: tuple[str, ...] = ()
    values_name: str = ""


def scope_of(spec: RunSpec) -> Scope:
    """Return the scope of the mesh's objects."""
    return Scope(dashed(spec.mesh.name))


def base(
    spec: RunSpec, files: MeshFiles, size: ModelSize, values: DeploymentSpec
) -> dict[str, list[Object]]:
    """Return every object of the base, by file. Raises SpecError for a model that no pod would
    have, and a claim that the plan does not fit."""
    scope = scope_of(spec)
    model = model_volume(spec.learn.model.path, values.model)
    fetched = model if model is not None and model.hub else None
    data = {"mesh.yaml": files.mesh_text, "config.yaml": files.config_text}
    return {
        "namespace.yaml": [scope.made_namespace(secrets(spec, values))],
        "access.yaml": access(spec),
        "files.yaml": [
            scope.made("v1", "ConfigMap", "mesh", data=data),
            *runs_claim(spec, size, values, scope.of("controller")),
        ],
        **({"model.yaml": filling(fetched, size, scope)} if fetched else {}),
        "pools.yaml": [monarch_mesh(spec, name, size, model) for name, _ in spec.roles],
        "controller.yaml": [controller(spec, files, size, model, values.certificates)],
        "network.yaml": network(spec, fetches=fetched is not None),
        "disruption.yaml": disruption(spec),
    }


def secrets(spec: RunSpec, values: DeploymentSpec) -> dict[str, tuple[str, ...]]:
    """Return the Secrets that the namespace needs, and their keys. None is ever rendered."""
    secret_keys: dict[str, tuple[str, ...]] = {CONTROL_SECRET: CONTROL_KEYS}
    if values.certificates is not None:
        secret_keys = {CONTROL_SECRET: ("token",), values.certificates: PEM_KEYS}
    if spec.mesh.hosts.tls:
        secret_keys[MESH_SECRET] = PEM_KEYS
    if keys := teacher_keys(spec):
        secret_keys[TEACHERS_SECRET] = keys
    secret_keys |= store_secret(spec)
    if values.model.token_secret is not None:
        secret_keys[values.model.token_secret] = (HUB_TOKEN,)
    return secret_keys


def teacher_keys(spec: RunSpec) -> tuple[str, ...]:
    """Return the environment variables of external teachers' keys; none for a local provider."""
    replay = ReplayLearn.of(spec.learn).replay
    if replay is None or replay.local is not None:
        return ()
    return tuple(sorted({t.key_env for t in replay.teachers if t.key_env}))


def access(spec: RunSpec) -> list[Object]:
    """Return the pods' accounts, and the controller's right to see the pods it attaches to."""
    scope, no_token = scope_of(spec), {"automountServiceAccountToken": False}
    seeing = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    return [
        scope.made("v1", "ServiceAccount", "forge-controller", **no_token),
        scope.made("v1", "ServiceAccount", "forge-worker", **no_token),
        *_granted(spec, "forge-attach", seeing),
    ]


def scaling(spec: RunSpec) -> list[Object]:
    """Return the rights that a controller also needs to change the number of a role's pods."""
    return _granted(spec, "forge-scale", [_on_meshes(spec, "get", "patch")])


def provisioning(spec: RunSpec) -> list[Object]:
    """Return the rights that a controller also needs to create the MonarchMeshes and scale them.
    Kubernetes cannot limit the right to create to names."""
    mesh_rule = _on_meshes(spec, "get", "patch", "delete")
    return _granted(spec, "forge-provision", [{**_MESHES, "verbs": ["create"]}, mesh_rule])


_MESHES = {"apiGroups": [MONARCH_API.partition("/")[0]], "resources": ["monarchmeshes"]}


def _on_meshes(spec: RunSpec, *verbs: str) -> Object:
    """Return a rule for the MonarchMeshes of this mesh's roles only."""
    names = [mesh_name(name) for name, _ in spec.roles]
    return {**_MESHES, "resourceNames": names, "verbs": list(verbs)}


def _granted(spec: RunSpec, name: str, rules: Sequence[Object]) -> list[Object]:
    scope, group = scope_of(spec), "rbac.authorization.k8s.io"
    role = {"apiGroup": group, "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": "forge-controller", "namespace": scope.namespace}
    return [
        scope.made(f"{group}/v1", "Role", name, rules=list(rules)),
        scope.made(f"{group}/v1", "RoleBinding", name, roleRef=role, subjects=[subject]),
    ]


def monarch_mesh(
    spec: RunSpec, name: str, size: ModelSize, model: ModelVolume | None = None
) -> Object:
    """Return the pool of a role: each replica is a pod with one Monarch worker."""
    role = dict(spec.roles)[name]
    scope = scope_of(spec).of(dashed(name))
    keys = teacher_keys(spec) if name == "teacher_replay" else ()
    writes, tls = name in WRITES_RUNS, spec.mesh.hosts.tls
    volumes, mounts = _certificate(spec)
    template = pod(
        "worker",
        ["forge", "worker", *(["--tls", tls] if tls else ["--address", _ADDRESS, "--insecure"])],
        pod_resources(spec, name, role, size),
        "forge-worker",
        scope.labels,
        ports={"mesh": WORKER_PORT, "hello": HELLO_PORT},
        # The worker answers there until SIGTERM.
        probes={"readinessProbe": {**_asked(tls), **_OFTEN}},
        env=[
            _of_pod("POD_IP", "status.podIP"),
            *([_of_pod("POD_NAMESPACE", "metadata.namespace")] if tls else []),
            {"name": "OMP_NUM_THREADS", "value": str(role.threads)},
            *(secret_env(key, TEACHERS_SECRET, key) for key in keys),
        ],
        volumes=[
            *([runs_volume(spec, size)] if writes else []),
            *volumes,
            *(model.volumes() if model else ()),
        ],
        mounts=[*([_RUNS_MOUNT] if writes else []), *mounts, *(model.mounts() if model else ())],
    )
    if writes:
        with_store(template, spec)
    template["spec"] |= together(scope_of(spec)) | apart(scope)
    body = {"replicas": role.replicas, "port": WORKER_PORT, "podTemplate": template}
    return scope.made(MONARCH_API, "MonarchMesh", mesh_name(name), spec=body)


def controller(
    spec: RunSpec,
    files: MeshFiles,
    size: ModelSize,
    model: ModelVolume | None = None,
    certificates: str | None = None,
) -> Object:
    """Return the Job of one run. Exit code 2, a mistake in the spec, is not retried. `certificates`
    is the Secret of the control plane's; None: the one with its token."""
    scope = scope_of(spec).of("controller")
    pems = [{"key": key, "path": key} for key in PEM_KEYS]
    volumes, mounts = _certificate(spec)
    template = pod(
        "controller",
        ["forge-run", *_arguments(spec, files, model)],
        controller_resources(spec, size),
        "forge-controller",
        scope.labels,
        ports={"control": CONTROL_PORT, "metrics": METRICS_PORT},
        # kubelet's own gRPC probe supports neither TLS nor a token, and the control plane requires
        # both beyond loopback. No liveness probe: mesh.watchdog detects a run that hangs.
        probes={"readinessProbe": {"exec": {"command": HEALTH_CHECK}, **_PATIENCE}},
        env=[
            secret_env(TOKEN, CONTROL_SECRET, "token"),
            # The controller's pod owns the MonarchMeshes that the controller creates.
            _of_pod("POD_NAME", "metadata.name"),
            _of_pod("POD_UID", "metadata.uid"),
            # Its own, so that kustomize and others may move all objects to another one.
            _of_pod("POD_NAMESPACE", "metadata.namespace"),
        ],
        volumes=[
            {"name": "mesh", "configMap": {"name": "mesh"}},
            runs_volume(spec, size),
            {
                "name": "control",
                "secret": {"secretName": certificates or CONTROL_SECRET, "items": pems},
            },
            *volumes,
            *(model.volumes() if model else ()),
        ],
        mounts=[
            _file("mesh.yaml", _mesh_path(files)),
            # Where the mesh file expects its config, relative to itself.
            _file("config.yaml", normpath(join(HOME, "meshes", files.config_name))),
            _RUNS_MOUNT,
            {"name": "control", "mountPath": PEMS, "readOnly": True},
            *mounts,
            *(model.mounts() if model else ()),
        ],
        api_token=True,
    )
    with_store(template, spec)
    if model is not None and model.hub:
        template["spec"]["initContainers"] = [waiting(model, scope)]
    template["spec"] |= {"restartPolicy": "Never", **together(scope_of(spec))}
    given_up = {"containerName": "controller", "operator": "In", "values": [2]}
    lost = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": "FailJob", "onExitCodes": given_up},
        {"action": "Ignore", "onPodConditions": [lost]},
    ]
    job = {
        "backoffLimit": 3,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    return scope.made("batch/v1", "Job", "controller", spec=job)


_PATIENCE = {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 3}
_OFTEN = {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3}
_RUNS_MOUNT = {"name": "runs", "mountPath": "/runs"}
# The pod's IP for others, and the address to listen on. A name would also be the next pod's, and
# DNS would resolve it with a delay.
_ADDRESS = f"tcp://$(POD_IP):{WORKER_PORT}@tcp://0.0.0.0:{WORKER_PORT}"


def _certificate(spec: RunSpec) -> tuple[list[Object], list[Object]]:
    """Return the volumes and mounts of the mesh's certificate; none for plain TCP."""
    path = spec.mesh.hosts.tls
    if path is None:
        return [], []
    items = [{"key": key, "path": key} for key in PEM_KEYS]
    volume = {"name": "certificate", "secret": {"secretName": MESH_SECRET, "items": items}}
    return [volume], [{"name": "certificate", "mountPath": path, "readOnly": True}]


def _asked(tls: str | None) -> Object:
    """Return how kubelet asks a worker: with TLS only whether it listens, since kubelet has no
    certificate to show."""
    if tls is not None:
        return {"tcpSocket": {"port": "hello"}}
    return {"httpGet": {"path": "/hello", "port": "hello"}}


def _of_pod(variable: str, path: str) -> Object:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _arguments(spec: RunSpec, files: MeshFiles, model: ModelVolume | None) -> list[str]:
    tls = spec.mesh.hosts.tls
    settings_given = (
        "hosts=kubernetes",
        "hosts.kubernetes.namespace=$(POD_NAMESPACE)",
        f"hosts.tls={tls}" if tls else "hosts.insecure=true",
        f"control.listen=0.0.0.0:{CONTROL_PORT}",
        f"control.tls_ca={PEMS}/ca.crt",
        f"control.tls_cert={PEMS}/tls.crt",
        f"control.tls_key={PEMS}/tls.key",
        f"control.token_env={TOKEN}",
        f"telemetry={{metrics: '0.0.0.0:{METRICS_PORT}', insecure: true}}",
        *([f"model.path={model.path}"] if model else ()),
    )
    # A pod has 30 s; a run needs some after its last checkpoint.
    fixed = ("--resume", "unfinished", "--run-dir", "/runs", "--grace", "24")
    return [_mesh_path(files), *fixed, *settings(*files.sets, *settings_given)]


def _mesh_path(files: MeshFiles) -> str:
    return f"{HOME}/meshes/{files.mesh_name}"


def _file(key: str, path: str) -> Object:
    return {"name": "mesh", "mountPath": path, "subPath": key, "readOnly": True}


def network(spec: RunSpec, *, fetches: bool = False) -> list[Object]:
    """Return policies that deny all traffic, and allow each connection that the mesh needs. Without
    hosts.tls only these policies protect the mesh's own TCP. `fetches`: a Job gets the model from
    the hub."""
    scope = scope_of(spec)
    mine, controller, allow = scope.labels, scope.of("controller").labels, scope.policy
    peers: list[Object] = [{"podSelector": {"matchLabels": mine}}]
    anything = {"ports": [{"protocol": "TCP", "port": 1, "endPort": 65535}]}
    steering = [from_namespace(STEERS, "true")]
    api = [{"ipBlock": {"cidr": cidr}} for cidr in PRIVATE]

    policies = [
        allow("deny-all", {}, ingress=(), egress=()),
        allow(
            "mesh", mine, ingress=[{"from": peers, **anything}], egress=[{"to": peers, **anything}]
        ),
        allow("dns", mine, egress=[_dns()]),
        # The API server's address is unknown here: allow any private one, on its two ports.
        allow("api-server", controller, egress=[{"to": api, "ports": tcp(443, 6443)}]),
        allow("control", controller, ingress=[{"from": steering, "ports": tcp(CONTROL_PORT)}]),
        allow(
            "metrics",
            controller,
            ingress=[{"from": [from_monitoring()], "ports": tcp(METRICS_PORT)}],
        ),
    ]
    public = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(NOT_PUBLIC)}}]}
    if teacher_keys(spec):
        asking = scope.of("teacher-replay").labels
        policies.append(allow("teachers", asking, egress=[{**public, "ports": tcp(443)}]))
    if spec.mesh.records.store is not None:
        for name in ("controller", *(name for name, _ in spec.roles if name in WRITES_RUNS)):
            storing, to = scope.of(dashed(name)).labels, [{**public, "ports": tcp(443)}]
            policies.append(allow(f"store-{dashed(name)}", storing, egress=to))
    if fetches:
        filler = scope.of("model").labels
        policies.append(allow("model", filler, egress=[{**public, "ports": tcp(443)}]))
    return policies


def _dns() -> Object:
    to = {
        **from_namespace("kubernetes.io/metadata.name", "kube-system"),
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    return {"to": [to], "ports": [{"protocol": "UDP", "port": 53}, *tcp(53)]}


def disruption(spec: RunSpec) -> list[Object]:
    """Let drains evict one pod of a pool at a time, and the controller's only after its run."""
    scope, names = scope_of(spec), [dashed(name) for name, _ in spec.roles]
    pools = [scope.of(name).budget(name, maxUnavailable=1) for name in names]
    return [*pools, scope.of("controller").budget("controller", minAvailable=1)]
