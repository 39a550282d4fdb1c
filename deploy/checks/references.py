"""Check that what the manifests name exists, and is named alike: no schema looks across objects.

RoleBinding -> Role, ServiceAccount     pod -> ServiceAccount, ConfigMap, PVC, Secret
selector -> some pod's labels           Service, PodMonitor, NetworkPolicy -> a port of that pod
HorizontalPodAutoscaler, ScaledObject -> its target

Only objects of Cartridge Forge are held to this (`deploy.checks.findings.ours`): of other trees, a
part may well come from elsewhere. A Secret is looked for where a namespace's annotation lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.checks.findings import (
    Container,
    Manifest,
    ManifestFault,
    PodTemplate,
    labels_of,
    pod_templates,
)
from deploy.manifests.objects import DOMAIN, SECRETS, Object

RULE = "references"
MANAGED = "forge-k8s"
ALWAYS_THERE = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}
AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
SELECTORS = ("Service", "PodDisruptionBudget", "PodMonitor")
Keys = Mapping[str, Sequence[str]] | None  # of each Secret; None where nothing lists them


def dangling(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield references to what is not there."""
    there = {(m.kind, m.name) for m in manifests} | ALWAYS_THERE
    keys = secret_keys(manifests)
    yield from _bindings(manifests, there)
    yield from _namespaces(manifests)
    pods = list(pod_templates(manifests))
    for template in pods:
        yield from _pod(template, manifests, there, keys)
    for found in manifests:
        yield from _selecting(found, pods)
        if found.kind in AUTOSCALERS:
            target = {"kind": "Deployment", **found.spec["scaleTargetRef"]}
            if (target["kind"], target["name"]) not in there:
                yield _missing(found, ".spec.scaleTargetRef", target["kind"], target["name"])
        if found.kind == "PodMonitor":
            for index, end in enumerate(found.spec.get("podMetricsEndpoints") or ()):
                key = (end.get("authorization") or {}).get("credentials")
                if key and _lacks(keys, key.get("name"), key.get("key")):
                    path = f".spec.podMetricsEndpoints[{index}].authorization.credentials"
                    yield _unlisted(found, path, key["name"], key["key"])


def _missing(found: Manifest, path: str, kind: str, name: Any) -> ManifestFault:
    return found.finding(
        RULE,
        path,
        f"names {kind} {name}, which is not there",
        "correct the name, or add the object",
    )


def _unlisted(found: Manifest, path: str, secret: str, key: str) -> ManifestFault:
    return found.finding(
        RULE,
        path,
        f"reads {key} of Secret {secret}, which nothing provides",
        f"correct it, or list it in the namespace's annotation {SECRETS}",
    )


def _lacks(keys: Keys, secret: Any, key: Any) -> bool:
    return keys is not None and key not in keys.get(secret, ())


def _bindings(
    manifests: Sequence[Manifest], there: set[tuple[str, str]]
) -> Iterator[ManifestFault]:
    for found in manifests:
        if found.kind == "RoleBinding":
            role = found.value["roleRef"]
            if role["kind"] == "Role" and ("Role", role["name"]) not in there:
                yield _missing(found, ".roleRef", "Role", role["name"])
            for index, subject in enumerate(found.value.get("subjects") or ()):
                account = ("ServiceAccount", subject["name"])
                if subject["kind"] == "ServiceAccount" and account not in there:
                    yield _missing(found, f".subjects[{index}]", *account)


def _namespaces(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    spaces = {m.name for m in manifests if m.kind == "Namespace"}
    for found in manifests if spaces else ():
        if found.kind != "Namespace" and found.namespace and found.namespace not in spaces:
            yield _missing(found, ".metadata.namespace", "Namespace", found.namespace)
        for index, subject in enumerate(found.value.get("subjects") or ()):
            space = subject.get("namespace")
            if space and space not in spaces:
                yield _missing(found, f".subjects[{index}].namespace", "Namespace", space)


def _pod(
    template: PodTemplate,
    manifests: Sequence[Manifest],
    there: set[tuple[str, str]],
    keys: Keys,
) -> Iterator[ManifestFault]:
    spec, owner = template.spec, template.owner
    account = spec.get("serviceAccountName")
    if account and ("ServiceAccount", account) not in there:
        path = f"{template.path}.spec.serviceAccountName"
        yield _missing(owner, path, "ServiceAccount", account)
    volumes = {v["name"]: v for v in spec.get("volumes") or ()}
    for index, volume in enumerate(volumes.values()):
        yield from _volume(owner, f"{template.path}.spec.volumes[{index}]", volume, there, keys)
    mounted = set()
    for container in template.containers():
        mounted |= {m["name"] for m in container.get("volumeMounts")}
        yield from _container(container, manifests, volumes, keys)
    for unused in sorted(set(volumes) - mounted):
        yield template.finding(
            RULE, ".spec.volumes", f"volume {unused} is mounted nowhere", "mount it, or remove it"
        )


def _container(
    container: Container,
    manifests: Sequence[Manifest],
    volumes: Mapping[str, Object],
    keys: Keys,
) -> Iterator[ManifestFault]:
    owner = container.pod.owner
    for index, variable in enumerate(container.get("env")):
        secret = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if secret and not secret.get("optional") and _lacks(keys, secret["name"], secret["key"]):
            path = f"{container.path}.env[{index}]"
            yield _unlisted(owner, path, secret["name"], secret["key"])
    for index, mount in enumerate(container.get("volumeMounts")):
        volume = volumes.get(mount["name"])
        if volume and "subPath" in mount and not _has_key(manifests, volume, mount["subPath"]):
            yield container.finding(
                RULE,
                f".volumeMounts[{index}].subPath",
                f"{mount['subPath']} is no key of its ConfigMap",
                "correct it, or add the key",
            )


def _volume(
    owner: Manifest, path: str, volume: Object, there: set[tuple[str, str]], keys: Keys
) -> Iterator[ManifestFault]:
    for source, kind, key in (
        ("configMap", "ConfigMap", "name"),
        ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
    ):
        held = volume.get(source)
        if held and not held.get("optional") and (kind, held[key]) not in there:
            yield _missing(owner, f"{path}.{source}", kind, held[key])
    if secret := volume.get("secret"):
        for item in secret.get("items") or ():
            if not secret.get("optional") and _lacks(keys, secret["secretName"], item["key"]):
                yield _unlisted(owner, f"{path}.secret", secret["secretName"], item["key"])


def _has_key(manifests: Sequence[Manifest], volume: Object, key: str) -> bool:
    """Return whether a ConfigMap of the tree has the key; of other volumes nothing is known."""
    named = (volume.get("configMap") or {}).get("name")
    maps = [m.value for m in manifests if m.kind == "ConfigMap" and m.name == named]
    held = [{**(m.get("data") or {}), **(m.get("binaryData") or {})} for m in maps]
    return not held or any(key in data for data in held)


def _selecting(found: Manifest, pods: Sequence[PodTemplate]) -> Iterator[ManifestFault]:
    """Yield a selector that meets no pod, and a port that the pods it meets have not."""
    spec = found.spec
    asked = [(".spec.selector", spec.get("selector"))] if found.kind in SELECTORS else []
    asked += _peers(found) if found.kind == "NetworkPolicy" else []
    for path, selector in asked:
        if selector is None:
            continue
        wanted = selector if found.kind == "Service" else selector.get("matchLabels") or {}
        met = [t for t in pods if wanted.items() <= t.labels.items()]
        if not met:
            yield found.finding(
                RULE, path, f"selects no pod: {wanted}", "write the labels of the pods' template"
            )
        for place, port in _asked_ports(found):
            if any(port not in _ports(template) for template in met):
                yield found.finding(
                    RULE,
                    place,
                    f"port {port} is no port of the pods that it selects",
                    "write one of theirs",
                )


def _peers(found: Manifest) -> list[tuple[str, Object]]:
    """Return the pod selectors of a NetworkPolicy that speak of pods of its own namespace."""
    selectors = [(".spec.podSelector", found.spec["podSelector"])]
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(found.spec.get(direction) or ()):
            for number, peer in enumerate((rule or {}).get(side) or ()):
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    place = f".spec.{direction}[{index}].{side}[{number}].podSelector"
                    selectors.append((place, peer["podSelector"]))
    return [(path, selector) for path, selector in selectors if selector]


def _asked_ports(found: Manifest) -> list[tuple[str, Any]]:
    spec = found.spec
    if found.kind == "Service":
        ports = enumerate(spec.get("ports") or ())
        return [(f".spec.ports[{i}]", p.get("targetPort", p["port"])) for i, p in ports]
    if found.kind == "PodMonitor":
        ends = enumerate(spec.get("podMetricsEndpoints") or ())
        return [(f".spec.podMetricsEndpoints[{i}]", e["port"]) for i, e in ends if "port" in e]
    if found.kind == "NetworkPolicy":
        return [
            (f".spec.ingress[{i}].ports[{n}]", port["port"])
            for i, rule in enumerate(spec.get("ingress") or ())
            for n, port in enumerate((rule or {}).get("ports") or ())
            if "port" in port and "endPort" not in port
        ]
    return []


def _ports(template: PodTemplate) -> set[Any]:
    ports = [p for c in template.containers() for p in c.ports().items()]
    return {number for number, _ in ports} | {name for _, name in ports}


def secret_keys(manifests: Sequence[Manifest]) -> Keys:
    """Return the keys of each Secret that the namespaces' annotations list, or that is in the tree;
    None where no annotation lists any."""
    found: dict[str, list[str]] = {}
    listed = False
    for manifest in manifests:
        if manifest.kind == "Namespace":
            text = (manifest.value["metadata"].get("annotations") or {}).get(SECRETS, "")
            for secret in filter(None, text.split("; ")):
                listed = True
                name, _, keys = secret.partition(": ")
                found[name] = keys.split()
        if manifest.kind == "Secret":
            held = {
                **(manifest.value.get("data") or {}),
                **(manifest.value.get("stringData") or {}),
            }
            found.setdefault(manifest.name, []).extend(held)
    return found if listed else None


def unlabelled(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield objects and pods without the labels that all rendered ones carry, or with another
    mesh's. Only trees that `forge k8s render` made are held to them."""
    managed = [m for m in manifests if labels_of(m).get(f"{DOMAIN}/managed-by") == MANAGED]
    if not managed:
        return
    needed = (f"{DOMAIN}/part-of", f"{DOMAIN}/instance")
    named = [(m, ".metadata.labels", labels_of(m)) for m in managed]
    named += [(t.owner, f"{t.path}.metadata.labels", t.labels) for t in pod_templates(managed)]
    instances: dict[str, set[str]] = {}
    for found, path, labels in named:
        for key in needed:
            if key not in labels:
                yield found.finding("labels", path, f"has no label {key}", "add it")
        if instance := labels.get(f"{DOMAIN}/instance"):
            instances.setdefault(found.namespace or found.name, set()).add(instance)
    for found, path, labels in named:
        own, space = labels.get(f"{DOMAIN}/instance"), found.namespace or found.name
        of_pods = {t.labels.get(f"{DOMAIN}/instance") for t in pod_templates(managed)
                   if t.owner.namespace == space}  # fmt: skip
        if own and of_pods and own not in of_pods:
            what = f"is of {own}, and the pods of {space} are of {', '.join(map(str, of_pods))}"
            yield found.finding("labels", path, what, "write the pods' instance")
