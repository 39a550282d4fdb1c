"""Check that names in the objects of a mesh exist: of accounts, ConfigMaps and their keys, claims,
Secrets, selectors, ports and scale targets. A Secret is looked for where a namespace's annotation
lists them (`forge k8s render` writes it)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.cluster.checks.findings import (
    Container,
    Manifest,
    ManifestFault,
    PodTemplate,
    pod_templates,
)
from cartridge_forge.plugins.cluster.manifests.objects import SECRETS, Object

RULE = "references"
DEFAULTS = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}  # of any namespace
AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
SELECTORS = ("Service", "PodDisruptionBudget", "PodMonitor")
SOURCES = (
    ("configMap", "ConfigMap", "name"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)  # of a volume: its field, the kind of the object and the field of the name
Keys = Mapping[str, Sequence[str]] | None  # of each Secret; None where nothing lists them


def check_references(
    manifests: Sequence[Manifest], objects: Sequence[Manifest]
) -> Iterator[ManifestFault]:
    """Yield references of objects to objects, keys and ports that are not among `objects`,
    themselves included."""
    names = {(m.kind, m.name) for m in objects} | DEFAULTS
    keys, pods = secret_keys(objects), list(pod_templates(objects))
    for template in pod_templates(manifests):
        yield from _pod(template, objects, names, keys)
    for manifest in manifests:
        yield from _selector(manifest, pods)
        if manifest.kind in AUTOSCALERS:
            target = {"kind": "Deployment", **manifest.spec["scaleTargetRef"]}
            if (target["kind"], target["name"]) not in names:
                yield _missing(manifest, ".spec.scaleTargetRef", target["kind"], target["name"])
        if manifest.kind == "RoleBinding":
            role = manifest.value["roleRef"]
            if role["kind"] == "Role" and ("Role", role["name"]) not in names:
                yield _missing(manifest, ".roleRef", "Role", role["name"])
            for index, subject in enumerate(manifest.value.get("subjects") or ()):
                account = ("ServiceAccount", subject["name"])
                if subject["kind"] == "ServiceAccount" and account not in names:
                    yield _missing(manifest, f".subjects[{index}]", *account)


def _missing(manifest: Manifest, path: str, kind: str, name: Any) -> ManifestFault:
    what = f"names {kind} {name}, which does not exist"
    return manifest.finding(RULE, path, what, "correct the name, or add the object")


def _pod(
    template: PodTemplate, manifests: Sequence[Manifest], names: set[tuple[str, str]], keys: Keys
) -> Iterator[ManifestFault]:
    spec, owner, path = template.spec, template.owner, f"{template.path}.spec"
    account = spec.get("serviceAccountName")
    if account and ("ServiceAccount", account) not in names:
        yield _missing(owner, f"{path}.serviceAccountName", "ServiceAccount", account)
    volumes = {v["name"]: v for v in spec.get("volumes") or ()}
    for index, volume in enumerate(volumes.values()):
        for source, kind, key in SOURCES:
            value = volume.get(source)
            if value and not value.get("optional") and (kind, value[key]) not in names:
                yield _missing(owner, f"{path}.volumes[{index}].{source}", kind, value[key])
        secret = volume.get("secret") or {}
        for item in secret.get("items") or ():
            if not secret.get("optional"):
                where = f"{path}.volumes[{index}].secret"
                yield from _secret(owner, where, secret["secretName"], item["key"], keys)
    for container in template.containers():
        yield from _container(container, manifests, volumes, keys)


def _container(
    container: Container, manifests: Sequence[Manifest], volumes: Mapping[str, Object], keys: Keys
) -> Iterator[ManifestFault]:
    for index, variable in enumerate(container.get("env")):
        secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if secret and not secret.get("optional"):
            path = f"{container.path}.env[{index}]"
            yield from _secret(container.pod.owner, path, secret["name"], secret["key"], keys)
    maps = {m.name: m.value for m in manifests if m.kind == "ConfigMap"}
    for index, mount in enumerate(container.get("volumeMounts")):
        path = f".volumeMounts[{index}]"
        source = (volumes.get(mount["name"]) or {}).get("configMap") or {}
        value = maps.get(str(source.get("name"))) or {}
        entries = {**(value.get("data") or {}), **(value.get("binaryData") or {})}
        if mount["name"] not in volumes and container.pod.owner.kind != "StatefulSet":
            what = f"mounts volume {mount['name']}, which the pod has not"
            yield container.finding(RULE, path, what, "correct its name, or add the volume")
        elif value and mount.get("subPath", next(iter(entries), None)) not in entries:
            what = f"{mount['subPath']} is no key of its ConfigMap"
            yield container.finding(RULE, f"{path}.subPath", what, "correct it, or add the key")


def _secret(
    manifest: Manifest, path: str, name: str, key: str, keys: Keys
) -> Iterator[ManifestFault]:
    if keys is not None and key not in keys.get(name, ()):
        what = f"reads {key} of Secret {name}, which nothing provides"
        remedy = f"correct it, or list it in the namespace's annotation {SECRETS}"
        yield manifest.finding(RULE, path, what, remedy)


def _selector(manifest: Manifest, pods: Sequence[PodTemplate]) -> Iterator[ManifestFault]:
    """Yield a selector that matches no pod, and the name of a port that its pods have not. A number
    need not be declared by a container: Kubernetes forwards to it all the same."""
    selector = manifest.spec.get("selector") if manifest.kind in SELECTORS else None
    if not selector:
        return
    labels = selector if manifest.kind == "Service" else selector.get("matchLabels") or {}
    matches = [
        pod
        for pod in pods
        if labels.items() <= pod.labels.items() and pod.owner.namespace == manifest.namespace
    ]
    if not matches:
        what = f"matches no pod: {labels}"
        yield manifest.finding(RULE, ".spec.selector", what, "write the labels of the pods")
    ports = [p.get("targetPort", p["port"]) for p in manifest.spec.get("ports") or ()]
    ports += [e["port"] for e in manifest.spec.get("podMetricsEndpoints") or () if "port" in e]
    for port in ports:
        names = {n for pod in matches for c in pod.containers() for n in c.ports().values()}
        if matches and isinstance(port, str) and port not in names:
            what = f"port {port} is no port of the pods that it selects"
            yield manifest.finding(RULE, ".spec", what, "write one of theirs, or a number")


def secret_keys(manifests: Sequence[Manifest]) -> Keys:
    """Return the keys of each Secret that the annotations of namespaces list; None where none
    does."""
    texts = [
        text
        for m in manifests
        if m.kind == "Namespace"
        and (text := (m.value["metadata"].get("annotations") or {}).get(SECRETS)) is not None
    ]
    secrets = [s.partition(": ") for text in texts for s in filter(None, text.split("; "))]
    return {name: keys.split() for name, _, keys in secrets} if secrets else None
