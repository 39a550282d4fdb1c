"""Check what every schema allows and is a mistake here: pods with too many rights or no bounds,
secrets in the open, policies that let in or out more than a mesh needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import ip_network

from deploy.checks.findings import Container, Manifest, ManifestFault, PodTemplate, pod_templates
from deploy.checks.kustomize import split_image
from deploy.manifests.mesh import NOT_PUBLIC
from deploy.manifests.objects import DOMAIN, GPU
from protocols.secrets import looks_secret

RULE = "hardening"
SERVING = (("run",), ("serve",), ("worker",))  # commands that stay, and answer
BUCKET = re.compile(r"^(records\.|[ ]+)store[=:] ?[\"']?(s3|gs|az)://", re.MULTILINE)
STORING = ("controller", "trainer")  # with records.store
ASKS_OUTSIDE = ("teacher-replay", "model")  # external teachers, and the Job that gets the model
MAY = {  # all that a Role of a mesh may grant
    "pods": {"get", "list", "watch"},
    "monarchmeshes": {"create", "get", "patch", "delete"},
}
# Forms of keys that providers hand out, and of private keys.
SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|"
    r"\bgh[pousr]_[A-Za-z0-9]{36}|\bhf_[A-Za-z0-9]{30,}"
)


def unsafe(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield such mistakes of the objects of a mesh or a server."""
    for template in pod_templates(manifests):
        if template.is_ours():
            yield from _pod(template)
    storing = _stores(manifests)
    for found in manifests:
        if found.kind == "Secret" and (found.value.get("data") or found.value.get("stringData")):
            yield found.finding(
                RULE,
                ".data",
                "holds a Secret's content in a file",
                "make it with kubectl create secret, or an operator of secrets",
            )
        if found.kind in ("Role", "ClusterRole"):
            yield from _role(found)
        if found.kind == "NetworkPolicy":
            yield from _policy(found, storing)
    yield from _denied(manifests)


def exposed(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield texts that are keys by their form, in any ConfigMap or container's variables."""
    remedy = "take it out, change the key, and name a Secret's key instead"
    for found in manifests:
        for key, text in (
            (found.value.get("data") or {}).items() if found.kind == "ConfigMap" else ()
        ):
            if SECRET_TEXT.search(str(text)):
                yield found.finding("secrets", f".data[{key}]", "holds a key in clear", remedy)
    for template in pod_templates(manifests):
        for container in template.containers():
            for index, variable in enumerate(container.get("env")):
                value, name = str(variable.get("value") or ""), str(variable.get("name"))
                named = bool(container.words) and looks_secret(name) and "$(" not in value
                if value and (named or SECRET_TEXT.search(value)):
                    path = f".env[{index}].value"
                    yield container.finding("secrets", path, f"{name} is in clear", remedy)


def _denied(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield the pods of a mesh in a namespace that denies nothing by itself."""
    both = {"Ingress", "Egress"}
    spaces = {
        m.namespace
        for m in manifests
        if m.kind == "NetworkPolicy"
        and not m.spec["podSelector"]
        and both <= set(m.spec.get("policyTypes") or ())
        and not {"ingress", "egress"} & {k for k in m.spec if m.spec[k]}
    }
    of_us = {t.owner.namespace: t.owner for t in pod_templates(manifests) if t.is_ours()}
    for space, owner in of_us.items():
        if space not in spaces:
            yield owner.finding(
                RULE,
                ".metadata.namespace",
                f"no NetworkPolicy of {space or 'its namespace'} denies what no other allows, and "
                "who reaches a worker's port runs code there",
                "add one with podSelector {}",
            )


def _pod(template: PodTemplate) -> Iterator[ManifestFault]:
    spec = template.spec
    context = spec.get("securityContext") or {}
    inside = [c.value.get("securityContext") or {} for c in template.containers()]
    if not all(c.get("runAsNonRoot", context.get("runAsNonRoot")) is True for c in inside):
        yield template.finding(
            RULE, ".spec.securityContext", "may run as root", "set runAsNonRoot: true"
        )
    profiles = [c.get("seccompProfile") or context.get("seccompProfile") or {} for c in inside]
    if not all(p.get("type") == "RuntimeDefault" for p in profiles):
        yield template.finding(
            RULE,
            ".spec.securityContext",
            "has no seccomp profile",
            "set seccompProfile: {type: RuntimeDefault}",
        )
    steers = any(
        c.words[0] == "forge-run" or c.words[:2] == ("forge", "run")
        for c in template.containers()
        if c.words
    )
    if spec.get("automountServiceAccountToken") is not False and not steers:
        yield template.finding(
            RULE,
            ".spec",
            "is given a token of the API server",
            "set automountServiceAccountToken: false",
        )
    for host in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(host):
            yield template.finding(RULE, f".spec.{host}", "gives it the node's", "remove it")
    for index, volume in enumerate(spec.get("volumes") or ()):
        if "hostPath" in volume:
            yield template.finding(RULE, f".spec.volumes[{index}]", "is the node's", "use a claim")
        if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
            yield template.finding(
                RULE, f".spec.volumes[{index}].emptyDir", "has no sizeLimit", "give one"
            )
    for container in template.containers():
        if container.words:
            yield from _container(container)


def _container(container: Container) -> Iterator[ManifestFault]:
    spec = container.pod.spec
    context = container.value.get("securityContext") or {}
    path = ".securityContext"
    if context.get("readOnlyRootFilesystem") is not True:
        yield container.finding(
            RULE, path, "its root file system can be written", "set readOnlyRootFilesystem: true"
        )
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield container.finding(
            RULE,
            path,
            "may gain privileges",
            "set allowPrivilegeEscalation: false, and no privileged",
        )
    if (context.get("capabilities") or {}).get("drop") != ["ALL"]:
        yield container.finding(RULE, path, "keeps capabilities", "set capabilities: {drop: [ALL]}")
    asked = container.words[0] == "forge-run" or container.words[1:2] in SERVING
    if "readinessProbe" not in container.value and asked:
        yield container.finding(RULE, "", "has no readinessProbe", "add the server's own")
    command = container.value.get("command")
    if command and command[0] != "tini":
        yield container.finding(
            RULE, ".command", "is process 1 and ignores SIGTERM", "begin it with tini, --"
        )
    yield from _image(container)
    resources = container.value.get("resources") or {}
    for amount in ("cpu", "memory"):
        for kind in ("requests", "limits"):
            if amount not in (resources.get(kind) or {}):
                yield container.finding(
                    RULE,
                    f".resources.{kind}",
                    f"has no {amount}",
                    "give what forge plan --sizing prints",
                )
    memory = {v["name"] for v in spec.get("volumes") or ()
              if (v.get("emptyDir") or {}).get("medium") == "Memory"}  # fmt: skip
    shared = {m["name"] for m in container.get("volumeMounts") if m["mountPath"] == "/dev/shm"}
    if not shared & memory and asked:
        yield container.finding(
            RULE,
            ".volumeMounts",
            "has no /dev/shm in memory, and 64 MB are not enough for tensors",
            "mount an emptyDir of medium Memory there",
        )
    if GPU in (resources.get("requests") or {}) and GPU not in (resources.get("limits") or {}):
        yield container.finding(
            RULE, ".resources.limits", f"has no {GPU}, which is requested", "give the same number"
        )


def _image(container: Container) -> Iterator[ManifestFault]:
    image = str(container.value.get("image") or "")
    name, version = split_image(image)
    if not name or version in ("", ":latest"):
        what = f"image {image} names no version" if image else "has no image"
        yield container.finding("image", ".image", what, "give a tag of the release, or a digest")


def _role(role: Manifest) -> Iterator[ManifestFault]:
    for index, rule in enumerate(role.value.get("rules") or ()):
        path = f".rules[{index}]"
        for resource in rule.get("resources") or ():
            if beyond := set(rule["verbs"]) - MAY.get(resource, set()):
                yield role.finding(
                    RULE,
                    f"{path}.verbs",
                    f"grants {', '.join(sorted(beyond))} on {resource}",
                    "grant what the run uses (deploy/k8s/README.md)",
                )
            # To create is the one verb that cannot be bound to names.
            loose = set(rule["verbs"]) - {"create"}
            if resource == "monarchmeshes" and loose and not rule.get("resourceNames"):
                yield role.finding(
                    RULE,
                    path,
                    f"grants {', '.join(sorted(loose))} on every MonarchMesh",
                    "give resourceNames",
                )


def _stores(manifests: Sequence[Manifest]) -> bool:
    """Return whether a run's command, or the text of a mesh, names a bucket."""
    words = [
        str(word)
        for template in pod_templates(manifests)
        for container in template.spec.get("containers") or ()
        for word in container.get("command") or ()
    ]
    texts = [
        str(text)
        for found in manifests
        if found.kind == "ConfigMap"
        for text in (found.value.get("data") or {}).values()
    ]
    return any(BUCKET.match(word) for word in words) or any(BUCKET.search(t) for t in texts)


def _policy(policy: Manifest, storing: bool) -> Iterator[ManifestFault]:
    """Only the pods that ask external teachers, or keep runs in a bucket, reach public addresses,
    and these on 443 alone."""
    asking = (*ASKS_OUTSIDE, *STORING) if storing else ASKS_OUTSIDE
    spec = policy.spec
    component = (spec["podSelector"].get("matchLabels") or {}).get(f"{DOMAIN}/component")
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(spec.get(direction) or ()):
            path, rule = f".spec.{direction}[{index}]", rule or {}
            if not rule.get(side):
                yield policy.finding(RULE, path, f"{direction} of anybody", f"give {side}")
            if not rule.get("ports"):
                yield policy.finding(RULE, path, f"{direction} on every port", "give ports")
            for peer in rule.get(side) or ():
                block = peer.get("ipBlock")
                if block is None:
                    continue
                public = ip_network(block["cidr"]).is_global or block["cidr"] == "0.0.0.0/0"
                ports = {p.get("port") for p in rule.get("ports") or ()}
                if public and direction == "egress" and (
                    component not in asking or ports != {443}
                ):  # fmt: skip
                    yield policy.finding(
                        RULE,
                        path,
                        "reaches the public network; only teachers, the model's Job and, with "
                        "records.store, the pods that write runs may, on 443",
                        "give private blocks",
                    )
                if public and not set(NOT_PUBLIC) <= set(block.get("except") or ()):
                    yield policy.finding(
                        RULE,
                        path,
                        "reaches private networks with the public one",
                        f"except {', '.join(NOT_PUBLIC)}",
                    )
