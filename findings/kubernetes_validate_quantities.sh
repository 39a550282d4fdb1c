#!/usr/bin/env bash
# kubernetes-validate 1.37.0: a strict validation of a manifest accepts what no API server takes.
#
# Guess: strict=True, against the schemas of the named Kubernetes version, refuses a quantity with a
# unit that Kubernetes does not have, a port above 65535, and a Job whose pods restart always.
# Seen 2026-11-30: only the type of a field and its name are read. "20GiB" (for "20Gi") is a string,
# 500510 is an integer, and "Always" is one of the strings of restartPolicy, so all three pass; a
# misspelt field and a string for a number are refused, one fault a call. The published JSON schemas
# say no more than that: quantities, ranges and rules between fields are code of the API server.
# A check of rendered manifests needs rules of its own for these, or `kubectl --dry-run=server`.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q kubernetes-validate==1.37.0
"$work/venv/bin/python" - <<'PY'
import copy
import kubernetes_validate
from kubernetes_validate.utils import latest_version

job = {
    "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"},
    "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{
        "name": "train", "image": "forge:1",
        "ports": [{"containerPort": 8080}],
        "resources": {"limits": {"memory": "20Gi"}},
    }]}}},
}

def passes(change):
    changed = copy.deepcopy(job)
    change(changed["spec"]["template"]["spec"])
    try:
        kubernetes_validate.validate(changed, latest_version(), strict=True)
    except kubernetes_validate.ValidationError:
        return False
    return True

def container(spec): return spec["containers"][0]
changes = {
    "as it is": lambda spec: None,
    "memory 20GiB": lambda spec: container(spec)["resources"]["limits"].update(memory="20GiB"),
    "port 500510": lambda spec: container(spec)["ports"][0].update(containerPort=500510),
    "a Job that restarts always": lambda spec: spec.update(restartPolicy="Always"),
    "a misspelt field": lambda spec: container(spec).update(imagee="forge:1"),
    "a port as text": lambda spec: container(spec)["ports"][0].update(containerPort="8080"),
}
seen = {name: passes(change) for name, change in changes.items()}
for name, accepted in seen.items():
    print(f"{name:28} {'accepted' if accepted else 'refused'}")
assert list(seen.values()) == [True, True, True, True, False, False], seen
PY
