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


def put(where: Any, key: Any, value: Any) -> None:
    where[key] = value


def renamed_mesh(objects: Objects) -> None:
    one(objects, "MonarchMesh", "docteacher")["metadata"]["name"] = "doc-teacher"


def door_pod(objects: Objects) -> Any:
    return one(objects, "Deployment", "door")["spec"]["template"]["spec"]


def door(objects: Objects) -> Any:
    return door_pod(objects)["containers"][0]


def pool(objects: Objects, name: str) -> Any:
    return one(objects, "MonarchMesh", name)["spec"]["podTemplate"]["spec"]["containers"][0]


def replaced(objects: Objects, container: Any, old: str, new: str) -> None:
    """Replace a part of a container's command."""
    words = [word.replace(old, new) for word in container["command"]]
    assert words != container["command"]
    container["command"] = words


def in_map(objects: Objects, name: str, key: str, old: str, new: str) -> None:
    data = one(objects, "ConfigMap", name)["data"]
    assert old in data[key]
    data[key] = data[key].replace(old, new, 1)


def without_variable(container: Any, name: str) -> None:
    container["env"] = [v for v in container["env"] if v["name"] != name]


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
        "schema",
        lambda o: one(o, "MonarchMesh", "trainer")["spec"].pop("replicas"),
    ),
    Fault(
        "mesh-of-none",
        "schema",
        lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "replicas", 0),
    ),
    Fault(
        "mesh-field-unknown",
        "schema",
        lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "size", 1),
    ),
    Fault(
        "mesh-port-too-high",
        "schema",
        lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "port", 99999),
    ),
    Fault("mesh-name-has-a-dash", "schema", renamed_mesh),
    Fault(
        "mesh-of-another-version",
        "schema",
        lambda o: put(one(o, "MonarchMesh", "trainer"), "apiVersion", "monarch.pytorch.org/v1"),
    ),
    Fault(
        "scraped-every-often",
        "schema",
        lambda o: put(
            one(o, "PodMonitor", "forge")["spec"]["podMetricsEndpoints"][0], "interval", "often"
        ),
    ),
    Fault(
        "rule-without-expression",
        "schema",
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
        "references",
        lambda o: put(job(o)["volumeMounts"][4], "name", "run"),
        also=("references",),
    ),
    Fault(
        "probe-of-no-port",
        "probes",
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
        "autoscaler-of-nothing",
        "references",
        lambda o: put(
            one(o, "HorizontalPodAutoscaler", "door")["spec"]["scaleTargetRef"], "name", "doors"
        ),
        "serve",
    ),
)
# What a command needs of its container, its pod and its mesh.
COMMAND_FAULTS: Sequence[Fault] = (
    Fault("command-misspelt", "command", lambda o: replaced(o, trainer(o), "worker", "wroker"),
          said="invalid choice: 'wroker'"),
    Fault("option-unknown", "command",
          lambda o: replaced(o, job(o), "--run-dir", "--runs-dir"), said="unrecognized arguments"),
    Fault("worker-without-tls", "command", lambda o: trainer(o)["command"].remove("--insecure"),
          said="ends at once without TLS"),
    Fault("certificates-of-a-worker-not-there", "files",
          lambda o: put(trainer(o), "command", [
              "tini", "--", "forge", "worker", "--tls", "/etc/forge/host",
              "--address", "tls://$(POD_IP):26600@tls://0.0.0.0:26600"]),
          said="--tls is /etc/forge/host, which is not mounted", also=("pools", "probes")),
    Fault("run-with-tls-workers-without", "pools",
          lambda o: replaced(o, job(o), "hosts.insecure=true", "hosts.tls=/etc/forge/mesh"),
          said="lacks TLS, and hosts.tls of the run is /etc/forge/mesh"),
    Fault("grace-is-a-word", "command",
          lambda o: trainer(o)["command"].extend(["--grace", "long"]), said="invalid float value"),
    Fault("spec-key-misspelt", "spec",
          lambda o: in_map(o, "mesh", "mesh.yaml", "roles:", "rolls:"), said="rolls"),
    Fault("spec-value-wrong", "spec",
          lambda o: in_map(o, "mesh", "mesh.yaml", "plane: torchstore", "plane: carrier"),
          said="plane"),
    Fault("override-unknown", "spec",
          lambda o: replaced(o, job(o), "hosts=kubernetes", "host=kubernetes"), said="host"),
    Fault("server-key-misspelt", "spec",
          lambda o: in_map(o, "serve", "serve.yaml", "max_tokens:", "max_token:"), "serve",
          "max_token"),
    Fault("mesh-file-elsewhere", "spec",
          lambda o: replaced(o, job(o), "/app/meshes/three", "/app/mesh/three"),
          said="neither in the image nor in a ConfigMap"),
    Fault("variable-never-set", "env",
          lambda o: without_variable(trainer(o), "POD_IP"), said="uses $(POD_IP)"),
    Fault("token-not-given", "env",
          lambda o: without_variable(job(o), "FORGE_CONTROL_TOKEN"),
          said="control.token_env names FORGE_CONTROL_TOKEN"),
    Fault("teachers-key-renamed", "env",
          lambda o: put(next(v for v in pool(o, "teacherreplay")["env"]
                             if v["name"] == "OPENAI_API_KEY"), "name", "OPENAI_KEY"),
          said="a teacher's key_env is OPENAI_API_KEY"),
    Fault("api-key-not-given", "env", lambda o: without_variable(door(o), "FORGE_API_KEY"), "serve",
          "http names FORGE_API_KEY"),
    Fault("probe-of-another-path", "probes",
          lambda o: put(trainer(o)["readinessProbe"]["httpGet"], "path", "/health"),
          said="asks /health of port 26601"),
    Fault("probe-of-another-port", "probes",
          lambda o: put(trainer(o)["readinessProbe"]["httpGet"], "port", 8080),
          said="asks port 8080, where nothing listens"),
    Fault("server-asked-elsewhere", "probes",
          lambda o: put(door(o)["readinessProbe"]["httpGet"], "path", "/readyz"), "serve",
          "asks /readyz of port 8000"),
    Fault("killed-while-it-starts", "probes", lambda o: door(o).pop("startupProbe"), "serve",
          "ends the server after 60 s"),
    Fault("server-on-loopback", "ports",
          lambda o: replaced(o, door(o), "http.listen=0.0.0.0:8000", "http.listen=127.0.0.1:8000"),
          "serve", "no other pod reaches it"),
    Fault("server-on-another-port", "ports",
          lambda o: replaced(o, door(o), "0.0.0.0:8000", "0.0.0.0:8080"), "serve",
          "http.listen is port 8080", ("probes",)),
    Fault("worker-on-another-port", "ports",
          lambda o: replaced(o, trainer(o), ":26600", ":26700"), said="the worker is port 26700",
          also=("probes",)),
    Fault("mesh-of-another-port", "ports",
          lambda o: put(one(o, "MonarchMesh", "trainer")["spec"], "port", 26700),
          said="its worker listens on 26600"),
    Fault("killed-while-it-drains", "grace",
          lambda o: put(trainer_pod(o), "terminationGracePeriodSeconds", 10),
          said="is 10 s, and the worker's --grace take 25 s"),
    Fault("server-killed-while-it-drains", "grace",
          lambda o: put(door_pod(o), "terminationGracePeriodSeconds", 20), "serve", "is 20 s"),
    Fault("run-killed-before-its-end", "grace",
          lambda o: put(job_pod(o), "terminationGracePeriodSeconds", 24),
          said="is 24 s, and the run's --grace and its end take 28 s"),
    Fault("run-with-the-pod-s-whole-grace", "grace",
          lambda o: put(job(o)["command"], job(o)["command"].index("24"), "30"),
          said="is 30 s, and the run's --grace and its end take 34 s"),
    Fault("runs-gone-with-the-pod", "files",
          lambda o: put(job_pod(o)["volumes"], 3,
                        {"name": "runs", "emptyDir": {"sizeLimit": "9Gi"}}),
          said="it is gone with the pod"),
    Fault("runs-not-writable", "files",
          lambda o: replaced(o, job(o), "/runs", "/results"), said="which cannot be written"),
    Fault("library-read-only", "files",
          lambda o: put(next(m for m in door(o)["volumeMounts"] if m["name"] == "library"),
                        "readOnly", True), "serve", "which is mounted readOnly"),
    Fault("certificate-not-there", "files",
          lambda o: replaced(o, job(o), "control/tls.crt", "control/server.crt"),
          said="control.tls_cert is /etc/forge/control/server.crt"),
    Fault("less-than-the-plan", "memory",
          lambda o: [put(trainer(o)["resources"][k], "memory", "1Gi")
                     for k in ("requests", "limits")],
          said="is 1Gi, and the plan of trainer is"),
    Fault("role-without-a-pool", "pools",
          lambda o: [o.remove(one(o, "MonarchMesh", "environment")),
                     o.remove(one(o, "PodDisruptionBudget", "environment"))],
          said="the run has role environment"),
    Fault("fewer-than-the-run-waits-for", "pools",
          lambda o: put(one(o, "MonarchMesh", "generator")["spec"], "replicas", 1),
          said="is 1, and the run waits for 2"),
)  # fmt: skip
