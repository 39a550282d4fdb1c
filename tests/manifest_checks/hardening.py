"""What is allowed by every schema and is a mistake here: pods with too many rights or no bounds,
secrets in the open, policies that let in or out more than the mesh needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_network

from deploy.manifests.mesh import NOT_PUBLIC
from deploy.manifests.objects import DOMAIN, GPU, Object
from manifest_checks.kustomize import name_of
from manifest_checks.references import pod_templates

MAY = {  # all that any Role here may grant
    "pods": {"get", "list", "watch"},
    "monarchmeshes": {"create", "get", "patch", "delete"},
}


def unsafe(objects: Sequence[Object]) -> list[str]:
    """Every such mistake, each a line."""
    faults = [f for name, template in pod_templates(objects) for f in _pod(name, template)]
    for found in objects:
        name = name_of(found)
        if found["kind"] == "Secret":
            faults.append(f"{name}: a Secret's content does not belong into files")
        if found["kind"] in ("Role", "ClusterRole"):
            faults += _role(name, found)
        if found["kind"] == "NetworkPolicy":
            faults += _policy(name, found)
    denied = [o for o in objects if o["kind"] == "NetworkPolicy" and not o["spec"]["podSelector"]]
    both = {"Ingress", "Egress"}
    if not any(
        both <= set(o["spec"]["policyTypes"]) and not {"ingress", "egress"} & set(o["spec"])
        for o in denied
    ):
        faults.append("no NetworkPolicy denies everything that no other allows")
    return faults


def _pod(name: str, template: Object) -> Iterator[str]:
    spec = template["spec"]
    context = spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True:
        yield f"{name}: may run as root; set runAsNonRoot"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield f"{name}: has no seccomp profile; set RuntimeDefault"
    if spec.get("automountServiceAccountToken") is not False and not name.startswith("Job/"):
        yield f"{name}: is given a token of the API server"
    for host in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(host):
            yield f"{name}: {host} gives it the node's"
    for volume in spec.get("volumes", ()):
        if "hostPath" in volume:
            yield f"{name}: volume {volume['name']} is the node's"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"{name}: volume {volume['name']} has no sizeLimit"
    for container in spec.get("containers", ()):
        yield from _container(name, container, spec.get("volumes", ()))


def _container(name: str, container: Object, volumes: Sequence[Object]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: its root file system can be written"
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield f"{name}: may gain privileges"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name}: keeps capabilities; drop ALL"
    if "readinessProbe" not in container and not name.startswith("CronJob/"):  # nobody asks it
        yield f"{name}: has no readinessProbe"
    if container.get("command", ["?"])[0] != "tini":
        yield f"{name}: is process 1 and ignores SIGTERM; start it under tini"
    image, _, version = container.get("image", "").rpartition(":")
    if not image or version == "latest":
        yield f"{name}: its image, {container.get('image')}, names no version"
    asked = container.get("resources", {})
    for amount in ("cpu", "memory"):
        for kind in ("requests", "limits"):
            if amount not in asked.get(kind, {}):
                yield f"{name}: {kind} no {amount}"
    if asked.get("requests", {}).get(GPU) != asked.get("limits", {}).get(GPU):
        yield f"{name}: requests and limits of {GPU} differ"
    memory = {v["name"] for v in volumes if v.get("emptyDir", {}).get("medium") == "Memory"}
    shared = [m["name"] for m in container.get("volumeMounts", ()) if m["mountPath"] == "/dev/shm"]
    if not set(shared) & memory:
        yield f"{name}: has no /dev/shm in memory: 64 MB is not enough for tensors"


def _role(name: str, role: Object) -> Iterator[str]:
    for rule in role.get("rules", ()):
        for resource in rule["resources"]:
            if beyond := set(rule["verbs"]) - MAY.get(resource, set()):
                yield f"{name}: grants {', '.join(sorted(beyond))} on {resource}"
            # To create is the one verb that cannot be bound to names.
            loose = set(rule["verbs"]) - {"create"}
            if resource == "monarchmeshes" and loose and not rule.get("resourceNames"):
                yield f"{name}: grants {', '.join(sorted(loose))} on every MonarchMesh"


def _policy(name: str, policy: Object) -> Iterator[str]:
    """Only the pods that ask external teachers reach public addresses, and these on 443 alone."""
    spec = policy["spec"]
    component = spec["podSelector"].get("matchLabels", {}).get(f"{DOMAIN}/component")
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction, ()):
            if not rule.get(side):
                yield f"{name}: {direction} of anybody"
            if not rule.get("ports"):
                yield f"{name}: {direction} on every port"
            for peer in rule.get(side, ()):
                block = peer.get("ipBlock")
                if block is None:
                    continue
                public = ip_network(block["cidr"]).is_global or block["cidr"] == "0.0.0.0/0"
                ports = {p.get("port") for p in rule.get("ports", ())}
                if public and (component != "teacher-replay" or ports != {443}):
                    yield f"{name}: reaches the public network, which only teachers' 443 may"
                if public and set(block.get("except", ())) < set(NOT_PUBLIC):
                    yield f"{name}: reaches private networks with the public one"
