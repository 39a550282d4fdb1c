"""Single faults put into sound manifests, each with the one check that has to find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Objects = list[dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """`break_` changes the built objects of `overlays/<overlay>` in place; `check` is the rule that
    finds it."""

    name: str
    check: str
    break_: Callable[[Objects], object]
    overlay: str = "gpu"
    said: str = ""  # a part of the finding, by which it is this one
    also: tuple[str, ...] = ()  # checks that find consequences


def one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return found


def without(objects: Objects, kind: str, name: str) -> None:
    objects.remove(one(objects, kind, name))


def job_pod(objects: Objects) -> Any:
    return one(objects, "Job", "controller")["spec"]["template"]["spec"]


def job(objects: Objects) -> Any:
    return job_pod(objects)["containers"][0]


def trainer_pod(objects: Objects) -> Any:
    return one(objects, "MonarchMesh", "trainer")["spec"]["podTemplate"]["spec"]


def trainer(objects: Objects) -> Any:
    return trainer_pod(objects)["containers"][0]


def policy(objects: Objects, name: str) -> Any:
    return one(objects, "NetworkPolicy", name)["spec"]


def open_secret(objects: Objects) -> dict[str, Any]:
    metadata = one(objects, "ServiceAccount", "forge-worker")["metadata"]
    keys = {"stringData": {"OPENAI_API_KEY": "not a key"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, **keys}


def put(where: Any, key: Any, value: Any) -> None:
    where[key] = value


def renamed_mesh(objects: Objects) -> None:
    one(objects, "MonarchMesh", "docteacher")["metadata"]["name"] = "doc-teacher"


FAULTS: Sequence[Fault] = (
    # What the API server refuses.
    Fault("misspelled-field", "schema", lambda o: put(job_pod(o), "restartPolicyy", "Never")),
    Fault(
        "replicas-is-text",
        "schema",
        lambda o: put(one(o, "HorizontalPodAutoscaler", "door")["spec"], "maxReplicas", "four"),
        "serve",
    ),
    Fault(
        "api-version-of-long-ago",
        "schema",
        lambda o: put(one(o, "PodDisruptionBudget", "trainer"), "apiVersion", "policy/v1beta1"),
    ),
    Fault("worker-field-unknown", "schema", lambda o: put(trainer(o), "cmd", ["python"])),
    Fault("env-is-a-number", "schema", lambda o: put(trainer(o)["env"][1], "value", 26600)),
    Fault("port-of-a-number", "schema", lambda o: put(job(o)["ports"][0], "protocol", 6)),
    Fault(
        "access-mode-is-no-list",
        "schema",
        lambda o: put(
            one(o, "PersistentVolumeClaim", "runs")["spec"], "accessModes", "ReadWriteOnce"
        ),
    ),
    Fault(
        "job-without-a-pod",
        "schema",
        lambda o: one(o, "Job", "controller")["spec"].pop("template"),
    ),
    Fault(
        "binding-without-a-role",
        "schema",
        lambda o: one(o, "RoleBinding", "forge-attach").pop("roleRef"),
    ),
    # What the Monarch operator and the Prometheus operator refuse.
    Fault(
        "mesh-without-replicas",
        "custom",
        lambda o: one(o, "MonarchMesh", "trainer")["spec"].pop("replicas"),
    ),
    Fault(
        "mesh-of-none",
        "custom",
        lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "replicas", 0),
    ),
    Fault(
        "mesh-field-unknown",
        "custom",
        lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "size", 1),
    ),
    Fault(
        "mesh-port-too-high",
        "custom",
        lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "port", 99999),
    ),
    Fault("mesh-name-has-a-dash", "custom", renamed_mesh),
    Fault(
        "mesh-of-another-version",
        "custom",
        lambda o: put(one(o, "MonarchMesh", "trainer"), "apiVersion", "monarch.pytorch.org/v1"),
    ),
    Fault(
        "scraped-every-often",
        "custom",
        lambda o: put(
            one(o, "PodMonitor", "forge")["spec"]["podMetricsEndpoints"][0], "interval", "often"
        ),
    ),
    Fault(
        "rule-without-expression",
        "custom",
        lambda o: one(o, "PrometheusRule", "forge")["spec"]["groups"][0]["rules"][0].pop("expr"),
    ),
    # What no schema sees: names across objects.
    Fault(
        "binding-of-no-role",
        "references",
        lambda o: put(one(o, "RoleBinding", "forge-attach")["roleRef"], "name", "forge-atach"),
    ),
    Fault(
        "binding-to-nobody",
        "references",
        lambda o: put(one(o, "RoleBinding", "forge-attach")["subjects"][0], "name", "controller"),
        also=("rights",),
    ),
    Fault("role-removed", "references", lambda o: without(o, "Role", "forge-attach")),
    Fault(
        "account-not-there",
        "references",
        lambda o: put(trainer_pod(o), "serviceAccountName", "worker"),
    ),
    Fault(
        "namespace-not-there",
        "references",
        lambda o: put(one(o, "ConfigMap", "mesh")["metadata"], "namespace", "default"),
    ),
    Fault(
        "claim-not-there",
        "references",
        lambda o: put(job_pod(o)["volumes"][3]["persistentVolumeClaim"], "claimName", "run"),
    ),
    Fault("config-map-removed", "references", lambda o: without(o, "ConfigMap", "mesh")),
    Fault(
        "config-key-not-there",
        "references",
        lambda o: put(job(o)["volumeMounts"][2], "subPath", "mesh.yml"),
    ),
    Fault(
        "secret-not-there",
        "references",
        lambda o: put(job(o)["env"][1]["valueFrom"]["secretKeyRef"], "name", "control"),
    ),
    Fault(
        "secret-key-not-there",
        "references",
        lambda o: put(job_pod(o)["volumes"][4]["secret"]["items"][0], "key", "ca.pem"),
    ),
    Fault(
        "volume-not-there",
        "shape",
        lambda o: put(job(o)["volumeMounts"][4], "name", "run"),
        also=("references",),
    ),
    Fault("volume-unused", "references", lambda o: job(o)["volumeMounts"].pop(5), also=("files",)),
    Fault(
        "probe-of-no-port",
        "shape",
        lambda o: put(trainer(o)["readinessProbe"]["httpGet"], "port", "monarch"),
    ),
    Fault(
        "health-probe-of-no-port",
        "probes",
        lambda o: put(job(o)["readinessProbe"]["exec"]["command"], 3, "localhost:50052"),
    ),
    Fault(
        "service-of-no-port",
        "references",
        lambda o: put(one(o, "Service", "door")["spec"]["ports"][0], "targetPort", "web"),
        "serve",
    ),
    Fault(
        "service-of-no-pod",
        "references",
        lambda o: put(one(o, "Service", "door")["spec"]["selector"], "app", "door"),
        "serve",
    ),
    Fault(
        "cartridges-of-no-runs",
        "references",
        lambda o: o.remove(one(o, "PersistentVolumeClaim", "runs")),
        "serve-runs",
    ),
    Fault(
        "budget-of-no-pod",
        "references",
        lambda o: put(
            one(o, "PodDisruptionBudget", "trainer")["spec"]["selector"]["matchLabels"],
            "app.kubernetes.io/component",
            "trainers",
        ),
    ),
    Fault(
        "monitor-of-no-port",
        "references",
        lambda o: put(
            one(o, "PodMonitor", "forge")["spec"]["podMetricsEndpoints"][0], "port", "prometheus"
        ),
    ),
    Fault(
        "policy-of-no-pod",
        "references",
        lambda o: put(
            policy(o, "metrics")["podSelector"]["matchLabels"],
            "app.kubernetes.io/component",
            "control",
        ),
    ),
    Fault(
        "policy-of-another-port",
        "references",
        lambda o: put(policy(o, "metrics")["ingress"][0]["ports"][0], "port", 9090),
    ),
    Fault(
        "autoscaler-of-nothing",
        "references",
        lambda o: put(
            one(o, "HorizontalPodAutoscaler", "door")["spec"]["scaleTargetRef"], "name", "doors"
        ),
        "serve",
    ),
    Fault("made-twice", "shape", lambda o: o.append(one(o, "ServiceAccount", "forge-worker"))),
    # What is allowed and is a mistake.
    Fault(
        "label-forgotten",
        "labels",
        lambda o: one(o, "Job", "controller")["metadata"]["labels"].pop(
            "app.kubernetes.io/part-of"
        ),
    ),
    Fault(
        "label-of-another-mesh",
        "labels",
        lambda o: put(
            one(o, "ConfigMap", "mesh")["metadata"]["labels"],
            "app.kubernetes.io/instance",
            "longhealth",
        ),
    ),
    Fault("root", "hardening", lambda o: trainer_pod(o)["securityContext"].pop("runAsNonRoot")),
    Fault(
        "no-seccomp", "hardening", lambda o: trainer_pod(o)["securityContext"].pop("seccompProfile")
    ),
    Fault(
        "writable-root",
        "hardening",
        lambda o: put(job(o)["securityContext"], "readOnlyRootFilesystem", False),
    ),
    Fault(
        "privileged", "hardening", lambda o: put(trainer(o)["securityContext"], "privileged", True)
    ),
    Fault(
        "capabilities-kept",
        "hardening",
        lambda o: trainer(o)["securityContext"].pop("capabilities"),
    ),
    Fault(
        "worker-with-a-token",
        "hardening",
        lambda o: trainer_pod(o).pop("automountServiceAccountToken"),
    ),
    Fault("node-network", "hardening", lambda o: put(trainer_pod(o), "hostNetwork", True)),
    Fault(
        "no-memory-limit", "hardening", lambda o: trainer(o)["resources"]["limits"].pop("memory")
    ),
    Fault(
        "gpus-differ",
        "shape",
        lambda o: put(trainer(o)["resources"]["requests"], "nvidia.com/gpu", "2"),
    ),
    Fault(
        "shm-on-disk", "hardening", lambda o: trainer_pod(o)["volumes"][1]["emptyDir"].pop("medium")
    ),
    Fault("no-readiness", "hardening", lambda o: trainer(o).pop("readinessProbe")),
    Fault("process-one", "hardening", lambda o: trainer(o)["command"].__delitem__(slice(0, 2))),
    Fault("latest", "image", lambda o: put(trainer(o), "image", "cartridge-forge:latest")),
    Fault(
        "role-of-everything",
        "hardening",
        lambda o: put(one(o, "Role", "forge-attach")["rules"][0], "verbs", ["*"]),
    ),
    Fault(
        "role-over-every-mesh",
        "hardening",
        lambda o: one(o, "Role", "forge-scale")["rules"][0].pop("resourceNames"),
    ),
    Fault("secret-in-the-open", "hardening", lambda o: o.append(open_secret(o))),
    Fault("no-image", "image", lambda o: trainer(o).pop("image")),
    Fault("nothing-denied", "hardening", lambda o: without(o, "NetworkPolicy", "deny-all")),
    Fault(
        "everybody-let-in", "hardening", lambda o: policy(o, "control")["ingress"][0].pop("from")
    ),
    Fault(
        "controller-on-the-internet",
        "hardening",
        lambda o: put(
            policy(o, "api-server")["egress"][0]["to"][0]["ipBlock"], "cidr", "0.0.0.0/0"
        ),
    ),
    Fault(
        "teachers-on-every-port",
        "hardening",
        lambda o: put(policy(o, "teachers")["egress"][0]["ports"][0], "port", 80),
        also=("network",),
    ),
    Fault(
        "teachers-in-the-cluster",
        "hardening",
        lambda o: policy(o, "teachers")["egress"][0]["to"][0]["ipBlock"].pop("except"),
    ),
)
