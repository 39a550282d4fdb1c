"""A run on a real control plane, applied as it is rendered: scaled, rolled to another image, pods
deleted and evicted, a node lost. Prints what happened as one JSON object.

`tests/nightly/deploy/test_control_plane.py` starts it beside kube_apiserver.sh, in a network
namespace of its own, and judges.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from applying import KINDS, PATHS, structural
from mesh_scenario import joined, until
from namespaces import FORGE
from operator_loop import MESHES, PODS, Admin
from small_cluster import SETS, SmallCluster
from small_run import MESH, SMALL, command, latest, rows

from cartridge_forge.forge_run.commands.k8s import render
from cartridge_forge.plugins.cluster.checks.schemas import definitions
from cartridge_forge.plugins.cluster.manifests.mesh import CONTROL_SECRET, PEM_KEYS, TOKEN
from cartridge_forge.plugins.cluster.manifests.overlays import build
from cartridge_forge.plugins.host.tls import certificates

Object = dict[str, Any]

SPACE = "forge-longhealth"
# Starts on busy cores take longer than a lost node takes to be told of by the control plane.
HEALTH = {"heartbeat_s": 0.5, "suspect_after_s": 5.0, "dead_after_s": 60.0}
STEPS = {
    "train.steps": 60, "train.checkpoint_every": 10, "evaluate.arms": ["on_policy"],
    "evaluate.questions": 4, "evaluate.probe_every": 0, "health": HEALTH,
    "roles.generator.replicas": 1, "spawn_timeout_s": 400, "call_timeout_s": 300,
}  # fmt: skip
PATIENCE_S = 500.0  # of what takes seconds where the cores are quiet
JOB = f"{PATHS['Job']}/controller"


class ControlledRun:
    """The run of the cluster's controller, as its user steers it and reads of it."""

    def __init__(self, cluster: SmallCluster, pems: Path) -> None:
        self.cluster, self._pems = cluster, pems
        self.diagnoses: dict[str, str] = {}

    @property
    def pod(self) -> str:
        """The controller's pod that is not leaving; "" where none is."""
        return next(
            (name for name, pod in self.cluster.pods().items() if name.startswith("controller-")
             and "deletionTimestamp" not in pod["metadata"]
             and pod["status"].get("phase") == "Running"), "",
        )  # fmt: skip

    @property
    def path(self) -> Path:
        """Its directory in the claim, once it is there."""
        folders = (self.cluster.claims / "runs" / "longhealth").glob("*")
        return max(f for f in folders if not f.is_symlink())

    def forge(self, *words: str) -> str:
        """What a command says, over a forwarded port of the pod."""
        if not (pod := self.pod):
            return "no controller's pod"
        secured = [f"--{word}={self._pems / file}" for word, file in
                   (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))]  # fmt: skip
        over = ["--address", "localhost:50051", *secured, "--token-env", TOKEN]
        done = subprocess.run(
            [*self.cluster.inside(pod), *FORGE, *words, *over],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.stdout + done.stderr

    def status(self) -> Object:
        try:
            found: Object = json.loads(self.forge("status", "--json"))
        except ValueError:  # it has not come up, or is away
            return {"pools": [], "paused": False}
        return found.get("status", found)

    def paused(self) -> None:
        """Pause it, and return once it is."""
        until(lambda: "paused" in self.forge("pause") or self.status()["paused"], PATIENCE_S)
        until(lambda: bool(self.status()["paused"]), PATIENCE_S)

    def step(self) -> int:
        """The last step that is recorded; 0 before the first."""
        try:
            whole = (self.path / "metrics.jsonl").read_text().rpartition("\n")[0]
        except (OSError, ValueError):
            return 0
        done = [json.loads(line) for line in whole.splitlines()]
        return max((r["step"] for r in done if r["arm"] == "on_policy"), default=0)

    def hosts_of(self, role: str) -> set[str]:
        """The pods on which the healthy replicas of a role are."""
        replicas = [r for p in self.status()["pools"] for r in p["replicas"]]
        mine = (r for r in replicas if r["name"].startswith(f"{role}["))
        return {r["host"] for r in mine if r["state"] == "healthy"}

    def diagnose(self, when: str) -> None:
        self.diagnoses[when] = self.forge("status")


def apply(admin: Admin, pems: Path) -> int:
    """Make the operator's kind, the Secret that the namespace asks for, and all that `forge k8s
    render` writes, strictly; return how many objects."""
    (kind,) = (d for d in definitions() if d["spec"]["names"]["kind"] == "MonarchMesh")
    admin.call("POST", KINDS, structural(kind))
    until(lambda: admin.call("GET", MESHES) is not None)
    sets = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **STEPS}.items()]
    objects = build(render(str(MESH), sets), "overlays/cpu")
    values = {key: (pems / key).read_bytes() for key in PEM_KEYS}
    values["token"] = os.environ[TOKEN].encode()
    data = {key: base64.b64encode(value).decode() for key, value in values.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CONTROL_SECRET}}
    # The run itself comes last: its account and its claims are there.
    for thing in sorted(objects, key=lambda o: o["kind"] == "Job"):
        path = f"{PATHS[thing['kind']]}?fieldValidation=Strict"
        until(lambda path=path, thing=thing: made(admin, path, thing))  # type: ignore[misc]
        if thing["kind"] == "Namespace":
            admin.call("POST", "/api/v1/namespaces/{space}/secrets", {**secret, "data": data})
    return len(objects)


def made(admin: Admin, path: str, thing: Object) -> bool:
    return admin.call("POST", path, thing) is not None


def scenario(admin: Admin, cluster: SmallCluster, pems: Path) -> Object:
    report: Object = {"objects": apply(admin, pems), "seconds": {}}
    run = ControlledRun(cluster, pems)

    def timed(name: str, so: Callable[[], bool]) -> None:
        begun = time.monotonic()

        def seen() -> bool:
            ended = (admin.call("GET", JOB) or {})["status"].get("conditions", ())
            assert not ended or name == "job ended", ended
            return so()

        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")
        try:
            until(seen, PATIENCE_S)
        except AssertionError:
            run.diagnose(f"{name}, which did not come")
            logs = {n: cluster.logs(n)[-2500:] for n in cluster.pods()}
            raise AssertionError(json.dumps(
                {"not seen": name, "step": run.step(), "diagnoses": run.diagnoses,
                 "errors": cluster.errors[-5:], "logs": logs,
                 "pods": {n: p["status"] for n, p in cluster.pods().items()}}, indent=1,
            ).replace("\\n", "\n")) from None  # fmt: skip
        report["seconds"][name] = round(time.monotonic() - begun, 1)

    def uid(pod: str) -> str:
        found = cluster.pods().get(pod)
        return "" if found is None else str(found["metadata"]["uid"])

    def known(pods: Sequence[str]) -> dict[str, tuple[str, int]]:
        return {name: (uid(name), joined(run.path, name)) for name in pods}

    def again(before: dict[str, tuple[str, int]]) -> bool:
        """Other pods of these names are there, and the run is on them."""
        return all(
            uid(name) not in ("", old) and joined(run.path, name) > joins
            and name in run.hosts_of(ROLES[name.rpartition("-")[0]])
            for name, (old, joins) in before.items()
        )  # fmt: skip

    def serving(role: str, count: int) -> bool:
        """So many pods of a role, and the run is on each of them."""
        names = {f"{role}-{i}" for i in range(count)}
        pods = {n for n in cluster.pods() if n.rpartition("-")[0] == role}
        return pods == names == run.hosts_of(role)

    timed("first step", lambda: run.step() >= 1)
    run.paused()
    run.diagnose("first step")

    report["scaled_at"] = run.step()
    run.forge("scale", "generator", "4")
    timed("scale 1 to 4", lambda: serving("generator", 4))
    run.diagnose("scale 1 to 4")
    run.forge("scale", "generator", "2")
    timed("scale 4 to 2", lambda: serving("generator", 2))
    run.diagnose("scale 4 to 2")

    # Another image everywhere: each StatefulSet replaces one pod after another.
    workers = [n for n in cluster.pods() if not n.startswith("controller-")]
    before = known(workers)
    for mesh in admin.items(MESHES):
        for container in mesh["spec"]["podTemplate"]["spec"]["containers"]:
            container["image"] = container["image"].replace("0.1.0", "0.1.1")
        admin.call("PATCH", f"{MESHES}/{mesh['metadata']['name']}", {"spec": mesh["spec"]})
    timed("upgrade began", lambda: any(uid(n) != old for n, (old, _) in before.items()))
    run.diagnose("upgrade")
    timed("upgrade", lambda: again(before))
    report["images"] = sorted(
        {cluster.pods()[n]["spec"]["containers"][0]["image"] for n in workers}
    )

    before = known(["trainer-0"])
    admin.call("DELETE", f"{PODS}/trainer-0")
    timed("pod deleted", lambda: uid("trainer-0") != before["trainer-0"][0])
    run.diagnose("pod deleted")
    timed("pod back", lambda: again(before))

    # An eviction that the budget allows, and at once others that it does not.
    before = known(["generator-0"])
    report["evictions"] = [evict(admin, n) for n in ("generator-0", "generator-1", run.pod)]
    timed("pod evicted", lambda: again(before))
    run.diagnose("pod evicted")

    # A machine without power, with one of two generators: the run goes on without it.
    node = cluster.node_of("generator-1")
    report["lost"] = sorted(n for n in cluster.pods() if cluster.node_of(n) == node)
    before = known(report["lost"])
    cluster.lose(node)
    steps = run.step()
    run.forge("resume")  # calls are lost on the way
    timed("node given up", lambda: "deletionTimestamp" in cluster.pods()["generator-1"]["metadata"])
    timed("steps without it", lambda: run.step() > steps + 1)
    run.paused()
    report["conditions"] = {
        n: [c.get("reason") for c in cluster.pods()[n]["status"]["conditions"]
            if c["type"] == "DisruptionTarget"] for n in before
    }  # fmt: skip
    run.diagnose("node given up")
    admin.call("DELETE", f"/api/v1/nodes/{node}")  # as whoever runs the cluster does
    timed("node deleted", lambda: again(before))

    # The controller's own pod: its Job makes another, which continues the run.
    first, steps = run.pod, run.step()
    admin.call("DELETE", f"{PODS}/{first}")
    timed("controller deleted", lambda: run.pod not in ("", first))
    timed("controller back", lambda: run.step() > steps)
    run.paused()
    report["resumed"] = {"from": first, "to": run.pod}

    run.forge("resume")
    timed("job ended", lambda: has_ended((admin.call("GET", JOB) or {})["status"]))
    report["job"] = (admin.call("GET", JOB) or {})["status"]
    report["log"] = "".join(cluster.logs(n) for n in cluster.pods() if n.startswith("controller-"))
    report["path"], report["diagnoses"] = str(run.path), run.diagnoses
    report["events"], report["errors"] = rows(run.path / "events.jsonl"), cluster.errors
    report["sets"] = {s["metadata"]["name"]: s["status"] for s in admin.items(SETS)}
    return report


ROLES = {"generator": "generator", "docteacher": "doc_teacher", "trainer": "trainer"}


def has_ended(job: dict[str, Any]) -> bool:
    """Whether its pods are counted: SuccessCriteriaMet and FailureTarget come before that."""
    ended = ("Complete", "Failed")
    return any(c["type"] in ended and c["status"] == "True" for c in job.get("conditions", ()))


def evict(admin: Admin, pod: str) -> str:
    """What the API server says to an eviction: "" where it does it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    try:
        admin.call("POST", f"{PODS}/{pod}/eviction", body, again=False)
    except AssertionError as refused:
        return str(refused)
    return ""


def main(folder: Path, home: Path) -> None:
    os.umask(0o022)  # the server's keys are made under another
    os.environ[TOKEN] = "of-the-control-plane-of-a-test"
    (pems,) = certificates(home / "certs", [["localhost"]], 1)
    admin = Admin(folder / "admin.yaml", SPACE)
    server = yaml.safe_load((folder / "admin.yaml").read_text())["clusters"][0]["cluster"]["server"]
    local = subprocess.Popen(
        command(home / "local", **STEPS), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    # A node for each pod, so that only one pod goes with a node.
    with SmallCluster(admin, server, home, nodes=7) as cluster:
        found = scenario(admin, cluster, pems)
    said, _ = local.communicate(timeout=PATIENCE_S)
    found["local"] = {"code": local.returncode, "output": said[-3000:],
                      "path": str(latest(home / "local"))}  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(os.environ["FORGE_KUBE_APISERVER"]), Path(sys.argv[1]))
