"""Render the HTTP server: `forge serve` with its generators in one pod, and an autoscaler.

Servers share only the cartridge library; pods are added by the depth of their queues.
"""

from __future__ import annotations

from cartridge_forge.plugins.cluster.manifests.mesh import MeshFiles
from cartridge_forge.plugins.cluster.manifests.objects import (
    HOME,
    Object,
    Resources,
    Scope,
    dashed,
    from_monitoring,
    from_namespace,
    pod,
    secret_env,
    settings,
    tcp,
)
from cartridge_forge.plugins.cluster.manifests.volumes import ModelVolume
from cartridge_forge.plugins.serve.spec import ServeSpec
from cartridge_forge.protocols.errors import SpecError

HTTP_PORT = 8000
SECRET, KEY = "forge-door", "api-key"
QUEUE_DEPTH = "forge_serve_queue_depth"  # serving.metrics
CLIENTS = "cartridge-forge/asks"  # label of the namespaces whose pods may send requests
MAX_SERVERS = 4
STOP_SECONDS = 15  # for the generators to end, after http.drain_s
LEAVE_SECONDS = 5  # after which proxies send an ending server no new requests
SYNC_EVERY = "*/5 * * * *"


def server(
    spec: ServeSpec, files: MeshFiles, resources: Resources, model: ModelVolume | None = None
) -> dict[str, list[Object]]:
    """Return every object, by file. A server's `files` have no config. Raises SpecError for a model
    of the hub, cartridges of one, and a process reward: the server reaches no other host."""
    if model is not None and model.hub:
        raise SpecError(
            f"model.path: {model.hub} is a model of the hub, which a server's pods do not reach; "
            "copy it to a claim, and give model.claim and model.path in --values"
        )
    for section, section_spec in (("hub", spec.hub), ("process_reward", spec.process_reward)):
        if section_spec is not None:
            raise SpecError(
                f"{section}: a server's pods reach no other host, and mount no other model than "
                "model.path; set it to null here"
            )
    scope = Scope(dashed(spec.name), "door")
    mine = scope.labels
    variable = spec.http.key_env or "FORGE_API_KEY"
    clients = [from_namespace(CLIENTS, "true"), from_monitoring()]
    # /metrics requires the API key.
    key = {"type": "Bearer", "credentials": {"name": SECRET, "key": KEY}}
    no_token = {"automountServiceAccountToken": False}
    return {
        "namespace.yaml": [scope.made_namespace({SECRET: (KEY,)})],
        "access.yaml": [scope.made("v1", "ServiceAccount", "forge-door", **no_token)],
        "files.yaml": [
            scope.made("v1", "ConfigMap", "serve", data={"serve.yaml": files.mesh_text}),
            scope.claim("library", "ReadWriteMany", "20Gi"),  # servers may be on many nodes
        ],
        "door.yaml": [_deployment(spec, files, resources, scope, variable, model)],
        "service.yaml": [_service(scope)],
        "scaling.yaml": [_autoscaler(spec, scope), scope.budget("door", maxUnavailable=1)],
        "network.yaml": [
            scope.policy("deny-all", {}, ingress=(), egress=()),
            scope.policy("http", mine, ingress=[{"from": clients, "ports": tcp(HTTP_PORT)}]),
        ],
        "monitoring.yaml": [scope.pod_monitor("door", mine, "http", authorization=key)],
    }


def runs(
    spec: ServeSpec, files: MeshFiles, resources: Resources, model: ModelVolume | None = None
) -> dict[str, list[Object]]:
    """Return the CronJob that adds finished runs' cartridges to the library, one call at a time.
    Its claim must be bound to the volume of the runs, which this namespace only reads."""
    scope = Scope(dashed(spec.name), "cartridges")
    mesh = f"{HOME}/meshes/{files.mesh_name}"
    at = [f"model.path={model.path}"] if model else []
    sets = settings(*files.sets, "library=/library", *at)
    volumes, mounts = _files(mesh, model)
    bound = {"claimName": "runs", "readOnly": True}
    template = pod(
        "cartridges",
        ["forge", "cartridges", "sync", "/runs", "--serve", mesh, *sets],
        # A checkpoint has all cartridges of a run, as the server may.
        Resources(cpu=1, memory=resources.memory, shm=1),
        "forge-door",
        scope.labels,
        ports={},
        probes={},
        volumes=[{"name": "runs", "persistentVolumeClaim": bound}, *volumes],
        mounts=[{"name": "runs", "mountPath": "/runs", "readOnly": True}, *mounts],
    )
    template["spec"]["restartPolicy"] = "Never"
    body = {
        "schedule": SYNC_EVERY,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 60,
        "jobTemplate": {"spec": {"backoffLimit": 0, "template": template}},
    }
    return {
        "runs.yaml": [
            scope.claim("runs", "ReadOnlyMany", "100Gi"),
            scope.made("batch/v1", "CronJob", "cartridges", spec=body),
        ]
    }


def _deployment(
    spec: ServeSpec,
    files: MeshFiles,
    resources: Resources,
    scope: Scope,
    variable: str,
    model: ModelVolume | None,
) -> Object:
    mesh = f"{HOME}/meshes/{files.mesh_name}"
    server_settings = (
        f"http.listen=0.0.0.0:{HTTP_PORT}", f"http.key_env={variable}", "library=/library",
        f"http.hosts=[door, door.{scope.namespace}, door.{scope.namespace}.svc, "
        f"door.{scope.namespace}.svc.cluster.local]",
        *([f"model.path={model.path}"] if model else ()),
    )  # fmt: skip
    # The model and the generators start first, within spawn_timeout_s.
    tries = max(1, round(spec.spawn_timeout_s / 5))
    volumes, mounts = _files(mesh, model)
    template = pod(
        "door",
        ["forge", "serve", mesh, *settings(*files.sets, *server_settings)],
        resources,
        "forge-door",
        scope.labels,
        ports={"http": HTTP_PORT},
        probes={
            "startupProbe": {**_get("/health"), "periodSeconds": 5, "failureThreshold": tries},
            "readinessProbe": {**_get("/ready"), "periodSeconds": 5},
            "livenessProbe": {**_get("/health"), "periodSeconds": 10, "failureThreshold": 6},
        },
        env=[secret_env(variable, SECRET, KEY)],
        volumes=volumes,
        mounts=mounts,
        grace_s=LEAVE_SECONDS + round(spec.http.drain_s) + STOP_SECONDS,
    )
    # The server closes its socket at SIGTERM; a request routed here after that would be refused.
    leave = {"preStop": {"sleep": {"seconds": LEAVE_SECONDS}}}
    template["spec"]["containers"][0]["lifecycle"] = leave
    # No `replicas`: applying it again would reset the autoscaler's number.
    one_more = {"maxUnavailable": 0, "maxSurge": 1}
    body = {
        "strategy": {"type": "RollingUpdate", "rollingUpdate": one_more},
        "selector": {"matchLabels": scope.labels},
        "template": template,
    }
    return scope.made("apps/v1", "Deployment", "door", spec=body)


def _files(mesh: str, model: ModelVolume | None) -> tuple[list[Object], list[Object]]:
    """Return volumes and mounts of the mesh file, the library and the model."""
    volumes: list[Object] = [
        {"name": "serve", "configMap": {"name": "serve"}},
        {"name": "library", "persistentVolumeClaim": {"claimName": "library"}},
        *(model.volumes() if model else ()),
    ]
    mounts: list[Object] = [
        {"name": "serve", "mountPath": mesh, "subPath": "serve.yaml", "readOnly": True},
        {"name": "library", "mountPath": "/library"},
        *(model.mounts() if model else ()),
    ]
    return volumes, mounts


def _get(path: str) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}


def _service(scope: Scope) -> Object:
    ports = [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]
    body = {"type": "ClusterIP", "selector": scope.labels, "ports": ports}
    return scope.made("v1", "Service", "door", spec=body)


def _autoscaler(spec: ServeSpec, scope: Scope) -> Object:
    """Add a pod once the pods' calls fill half of what their generators decode at once."""
    role = spec.roles.generator
    half = max(1, role.replicas * role.max_ongoing // 2)
    depth = {"metric": {"name": QUEUE_DEPTH}}
    target = {"type": "AverageValue", "averageValue": str(half)}
    body = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "door"},
        "minReplicas": 1,
        "maxReplicas": MAX_SERVERS,
        "metrics": [{"type": "Pods", "pods": {**depth, "target": target}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return scope.made("autoscaling/v2", "HorizontalPodAutoscaler", "door", spec=body)
