"""Single faults that a schema passes: fields against each other, and what pods run against what
they are given. Each has the rule that finds it, and a part of what is said."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from manifest_faults import Fault, Objects, job, job_pod, one, policy, put, trainer, trainer_pod

Object = dict[str, Any]


def door_pod(objects: Objects) -> Any:
    return one(objects, "Deployment", "door")["spec"]["template"]["spec"]


def door(objects: Objects) -> Any:
    return door_pod(objects)["containers"][0]


def pool(objects: Objects, name: str) -> Any:
    return one(objects, "MonarchMesh", name)["spec"]["podTemplate"]["spec"]["containers"][0]


def budget(objects: Objects) -> Any:
    return one(objects, "PodDisruptionBudget", "trainer")["spec"]


def scaler(objects: Objects) -> Any:
    return one(objects, "HorizontalPodAutoscaler", "door")["spec"]


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


def renamed(objects: Objects, kind: str, name: str, new: str) -> None:
    one(objects, kind, name)["metadata"]["name"] = new


def rule(objects: Objects) -> Any:
    return one(objects, "PrometheusRule", "forge")["spec"]["groups"][0]["rules"][0]


def all_from(objects: Objects, name: str, direction: str) -> None:
    """Keep a policy, and take every rule of one direction out of it."""
    policy(objects, name).pop(direction)


def second(objects: Objects, kind: str, name: str) -> None:
    more = copy.deepcopy(one(objects, kind, name))
    more["spec"]["replicas"] = 5
    objects.append(more)


SHAPES: Sequence[Fault] = (
    Fault("quantity-of-no-unit", "schema",
          lambda o: put(trainer(o)["resources"]["limits"], "memory", "20GiB"),
          said='"20GiB" is not'),
    Fault("storage-in-words", "schema",
          lambda o: put(one(o, "PersistentVolumeClaim", "runs")["spec"]["resources"]["requests"],
                        "storage", "20 Gi"), said="write a quantity"),
    Fault("name-in-capitals", "schema",
          lambda o: renamed(o, "ServiceAccount", "forge-worker", "Forge_Worker"),
          said="lower-case letters"),
    Fault("container-name-too-long", "schema", lambda o: put(trainer(o), "name", "a" * 64),
          said="63 lower-case"),
    Fault("port-beyond-65535", "schema",
          lambda o: put(job(o)["ports"][0], "containerPort", 500510), said="from 1 to 65535"),
    Fault("port-name-too-long", "schema",
          lambda o: put(job(o)["ports"][0], "name", "control-plane-of-run"), said="15 lower-case"),
    Fault("pull-policy-of-no-kind", "schema",
          lambda o: put(trainer(o), "imagePullPolicy", "IfAbsent"), said="IfNotPresent"),
    Fault("access-mode-of-no-kind", "schema",
          lambda o: put(one(o, "PersistentVolumeClaim", "runs")["spec"], "accessModes",
                        ["ReadWriteAll"]), said="ReadWriteMany"),
    Fault("label-value-with-a-space", "schema",
          lambda o: put(one(o, "ConfigMap", "mesh")["metadata"]["labels"], "team", "two words"),
          said="63 letters"),
    Fault("schedule-of-four-fields", "schema",
          lambda o: put(one(o, "CronJob", "cartridges")["spec"], "schedule", "*/5 * * *"),
          "serve-runs", "five fields"),
    Fault("cidr-of-a-word", "schema",
          lambda o: put(policy(o, "api-server")["egress"][0]["to"][0]["ipBlock"], "cidr",
                        "private"),
          said="10.0.0.0/8"),
    Fault("probe-never", "schema",
          lambda o: put(trainer(o)["readinessProbe"], "periodSeconds", 0), said="1 or more"),
    Fault("budget-of-both", "shape", lambda o: put(budget(o), "minAvailable", 1),
          said="both minAvailable and maxUnavailable"),
    Fault("budget-of-neither", "shape", lambda o: budget(o).pop("maxUnavailable"),
          said="allows no disruption number"),
    Fault("fewest-above-most", "shape", lambda o: put(scaler(o), "minReplicas", 9), "serve",
          "minReplicas 9 is more than maxReplicas 4"),
    Fault("selector-of-other-pods", "shape",
          lambda o: put(one(o, "Deployment", "door")["spec"]["selector"]["matchLabels"], "app",
                        "x"),
          "serve", "does not meet the labels of its own pods"),
    Fault("requests-above-limits", "shape",
          lambda o: put(trainer(o)["resources"]["requests"], "cpu", "64"),
          said="64 is more than the limit of 2"),
    Fault("memory-in-thousandths", "shape",
          lambda o: (put(trainer(o)["resources"]["requests"], "memory", "512m"),), said="write Mi"),
    Fault("half-a-gpu", "shape",
          lambda o: [put(trainer(o)["resources"][k], "nvidia.com/gpu", "0.5")
                     for k in ("requests", "limits")], said="no whole number of devices"),
    Fault("probe-in-two-ways", "shape",
          lambda o: put(trainer(o)["readinessProbe"], "tcpSocket", {"port": "mesh"}),
          said="asks in 2 ways"),
    Fault("volume-of-two-sources", "shape",
          lambda o: put(trainer_pod(o)["volumes"][0], "configMap", {"name": "mesh"}),
          said="has 2 sources: configMap, emptyDir"),
    Fault("volume-twice", "shape",
          lambda o: trainer_pod(o)["volumes"].append(trainer_pod(o)["volumes"][0]),
          said="name tmp is there 2 times"),
    Fault("mounted-at-one-place", "shape",
          lambda o: put(job(o)["volumeMounts"][4], "mountPath", "/tmp"),
          said="mountPath /tmp is there 2 times", also=("files",)),
    Fault("variable-twice", "shape", lambda o: trainer(o)["env"].append(trainer(o)["env"][1]),
          said="name POD_IP is there 2 times"),
    Fault("job-starts-again", "shape", lambda o: put(job_pod(o), "restartPolicy", "Always"),
          said="is Always in a Job"),
    Fault("success-fails-the-job", "shape",
          lambda o: put(one(o, "Job", "controller")["spec"]["podFailurePolicy"]["rules"][0]
                        ["onExitCodes"], "values", [0, 2]), said="holds 0, which is no failure"),
    Fault("ports-end-before-they-begin", "shape",
          lambda o: put(policy(o, "mesh")["egress"][0]["ports"][0], "port", 65536 - 1) or put(
              policy(o, "mesh")["egress"][0]["ports"][0], "endPort", 1), said="endPort 1",
          also=("network",)),
    Fault("except-of-another-block", "shape",
          lambda o: put(policy(o, "api-server")["egress"][0]["to"][0]["ipBlock"], "except",
                        ["192.168.0.0/24"]), said="192.168.0.0/24 is not within 10.0.0.0/8"),
    Fault("no-pod-could-be-replaced", "shape",
          lambda o: put(one(o, "Deployment", "door")["spec"]["strategy"]["rollingUpdate"],
                        "maxSurge", 0), "serve", "both 0"),
    Fault("recreate-with-steps", "shape",
          lambda o: put(one(o, "Deployment", "door")["spec"]["strategy"], "type", "Recreate"),
          "serve", "is given with type Recreate"),
    Fault("two-pools-of-one-name", "shape", lambda o: second(o, "MonarchMesh", "environment"),
          said="is there twice", also=("volumes",)),
)  # fmt: skip
MEANINGS: Sequence[Fault] = (
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
          said="--tls is /etc/forge/host, which is not there", also=("pools", "probes")),
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
    Fault("key-in-clear", "secrets",
          lambda o: put(pool(o, "teacherreplay")["env"], slice(None), [
              {"name": v["name"], "value": "abcdefgh"} if v["name"] == "OPENAI_API_KEY" else v
              for v in pool(o, "teacherreplay")["env"]]), said="OPENAI_API_KEY is in clear"),
    Fault("private-key-in-a-map", "secrets",
          lambda o: put(one(o, "ConfigMap", "mesh")["data"], "tls.key",
                        "-----BEGIN EC PRIVATE KEY-----\n"), said="holds a key in clear"),
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
    Fault("controller-may-not-watch", "rights",
          lambda o: put(one(o, "Role", "forge-attach")["rules"][0], "verbs", ["get", "list"]),
          said="forge-controller may not watch pods"),
    Fault("controller-without-a-token", "rights",
          lambda o: put(job_pod(o), "automountServiceAccountToken", False),
          said="asks the API server"),
    Fault("api-server-out-of-reach", "network", lambda o: all_from(o, "api-server", "egress"),
          said="no policy lets it reach the API server"),
    Fault("no-names-for-teachers", "network", lambda o: all_from(o, "dns", "egress"),
          said="no policy lets it resolve names"),
    Fault("workers-let-nobody-in", "network", lambda o: all_from(o, "mesh", "ingress"),
          said="no policy lets port 26600 into the pool"),
    Fault("one-node-many-pods", "volumes",
          lambda o: put(one(o, "PersistentVolumeClaim", "runs")["spec"], "accessModes",
                        ["ReadWriteOnce"]), said="ReadWriteOnce is for one node, and 4 pods"),
    Fault("library-of-one-node", "volumes",
          lambda o: put(one(o, "PersistentVolumeClaim", "library")["spec"], "accessModes",
                        ["ReadWriteOnce"]), "serve", "and 4 pods mount it"),
    Fault("runs-without-room", "volumes",
          lambda o: put(one(o, "PersistentVolumeClaim", "runs")["spec"]["resources"]["requests"],
                        "storage", "1Ki"), said="is 1Ki, and the plan's checkpoints"),
    Fault("image-without-a-tag", "image",
          lambda o: put(trainer(o), "image", "registry:5000/cartridge-forge"),
          said="names no version"),
)  # fmt: skip
WITH_PROMTOOL: Sequence[Fault] = (
    Fault("expression-torn", "rules", lambda o: put(rule(o), "expr", "sum(rate(x[5m])"),
          said="promtool"),
)  # fmt: skip
USER_FAULTS = (*SHAPES, *MEANINGS)
