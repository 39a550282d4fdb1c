"""Whether what the manifests name exists, and is named alike: no schema looks across objects.

RoleBinding -> Role, ServiceAccount     pod -> ServiceAccount, ConfigMap, PVC, Secret, volume
selector -> some pod's labels           probe, Service, PodMonitor -> a port of that pod
HorizontalPodAutoscaler -> its target   NetworkPolicy -> ports that its pods have
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.manifests.objects import DOMAIN, SECRETS, Object
from manifest_checks.kustomize import name_of


def dangling(objects: Sequence[Object]) -> list[str]:
    """Every reference to what is not there, each a line."""
    there = {(o["kind"], o["metadata"]["name"]) for o in objects}
    keys = _secret_keys(objects)
    faults = [*_bindings(objects, there), *_namespaces(objects), *_twice(objects)]
    pods = list(pod_templates(objects))
    for name, template in pods:
        faults += _pod(name, template, objects, there, keys)
    for found in objects:
        faults += _selecting(found, pods)
        if found["kind"] == "HorizontalPodAutoscaler":
            target = found["spec"]["scaleTargetRef"]
            if (target["kind"], target["name"]) not in there:
                faults.append(f"{name_of(found)}: scales {target['name']}, which is not there")
        if found["kind"] == "PodMonitor":
            for end in found["spec"].get("podMetricsEndpoints", ()):
                key = end.get("authorization", {}).get("credentials")
                if key and key.get("key") not in keys.get(key.get("name"), ()):
                    faults.append(f"{name_of(found)}: no Secret {key} is asked of the namespace")
    return faults


def pod_templates(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """(name of its owner, template) of every pod that would be made."""
    for found in objects:
        spec = found.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)  # of a CronJob
        template = spec.get("podTemplate") or spec.get("template")
        if isinstance(template, dict) and "spec" in template:
            yield name_of(found), template


def _bindings(objects: Sequence[Object], there: set[tuple[str, str]]) -> Iterator[str]:
    for found in objects:
        if found["kind"] == "RoleBinding":
            for named in (found["roleRef"], *found.get("subjects", ())):
                if (named["kind"], named["name"]) not in there:
                    yield f"{name_of(found)}: {named['kind']} {named['name']} is not there"


def _namespaces(objects: Sequence[Object]) -> Iterator[str]:
    spaces = {o["metadata"]["name"] for o in objects if o["kind"] == "Namespace"}
    for found in objects:
        space = found["metadata"].get("namespace")
        if found["kind"] != "Namespace" and space not in spaces:
            yield f"{name_of(found)}: namespace {space} is not there"
        for subject in found.get("subjects", ()):
            if subject.get("namespace") not in spaces:
                yield f"{name_of(found)}: its subject's namespace is not there"


def _twice(objects: Sequence[Object]) -> Iterator[str]:
    names = [name_of(o) for o in objects]
    yield from sorted({f"{n}: is there twice" for n in names if names.count(n) > 1})


def _pod(
    name: str,
    template: Object,
    objects: Sequence[Object],
    there: set[tuple[str, str]],
    keys: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    spec = template["spec"]
    account = spec.get("serviceAccountName")
    if ("ServiceAccount", account) not in there:
        yield f"{name}: ServiceAccount {account} is not there"
    volumes = {v["name"]: v for v in spec.get("volumes", ())}
    for volume in volumes.values():
        yield from _volume(name, volume, there, keys)
    for container in spec.get("containers", ()):
        for variable in container.get("env", ()):
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            if secret and secret["key"] not in keys.get(secret["name"], ()):
                yield f"{name}: no Secret {secret} is asked of the namespace"
        mounts = container.get("volumeMounts", ())
        for mount in mounts:
            volume = volumes.get(mount["name"])
            if volume is None:
                yield f"{name}: mounts volume {mount['name']}, which is not there"
            elif "subPath" in mount and not _has_key(objects, volume, mount["subPath"]):
                yield f"{name}: {mount['mountPath']} is no key of its ConfigMap"
        for unused in sorted(set(volumes) - {m["name"] for m in mounts}):
            yield f"{name}: volume {unused} is mounted nowhere"
        yield from _probed(name, container)


def _volume(
    name: str,
    volume: Object,
    there: set[tuple[str, str]],
    keys: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    for field, kind, key in (
        ("configMap", "ConfigMap", "name"),
        ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
    ):
        if field in volume and (kind, volume[field][key]) not in there:
            yield f"{name}: {kind} {volume[field][key]} is not there"
    if secret := volume.get("secret"):
        for item in secret["items"]:
            if item["key"] not in keys.get(secret["secretName"], ()):
                yield f"{name}: no Secret {secret['secretName']} with {item['key']} is asked for"


def _has_key(objects: Sequence[Object], volume: Object, key: str) -> bool:
    named = volume.get("configMap", {}).get("name")
    maps = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == named)
    return any(key in found.get("data", {}) for found in maps)


def _probed(name: str, container: Object) -> Iterator[str]:
    ports = {p["name"] for p in container.get("ports", ())}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container.get(probe, {})
        for way in ("tcpSocket", "httpGet", "grpc"):
            if way in asked and asked[way]["port"] not in ports:
                yield f"{name}: {probe} asks port {asked[way]['port']}, which it has not"
        words = asked.get("exec", {}).get("command", ())
        for word in words:
            host, _, port = word.partition(":")
            numbers = {str(p["containerPort"]) for p in container.get("ports", ())}
            if host == "localhost" and port not in numbers:
                yield f"{name}: {probe} asks port {port}, which it has not"


def _selecting(found: Object, pods: Sequence[tuple[str, Object]]) -> Iterator[str]:
    """A selector that meets no pod, and a port that the pods it meets have not."""
    spec, kind = found.get("spec", {}), found["kind"]
    asked = [
        spec.get("selector") if kind in _SELECTORS else None,
        *_peers(spec),
    ]
    for selector in asked:
        if selector is None:
            continue
        wanted = selector if kind == "Service" else selector.get("matchLabels", {})
        met = [t for _, t in pods if wanted.items() <= t["metadata"]["labels"].items()]
        if not met:
            yield f"{name_of(found)}: selects no pod: {wanted}"
        for port in _asked_ports(found):
            for template in met:
                if port not in _ports(template):
                    yield f"{name_of(found)}: port {port} is no port of the pods it selects"
    if kind in ("Deployment", "StatefulSet"):
        wanted = spec["selector"]["matchLabels"]
        if not wanted.items() <= spec["template"]["metadata"]["labels"].items():
            yield f"{name_of(found)}: its selector does not meet its own pods"


_SELECTORS = ("Service", "PodDisruptionBudget", "PodMonitor")


def _peers(spec: Object) -> Iterator[Object]:
    """The pod selectors of a NetworkPolicy that speak of pods of this namespace."""
    if spec.get("podSelector"):
        yield spec["podSelector"]
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction, ()):
            for peer in rule.get(side, ()):
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    yield peer["podSelector"]


def _asked_ports(found: Object) -> list[Any]:
    spec = found["spec"]
    if found["kind"] == "Service":
        return [p.get("targetPort", p["port"]) for p in spec["ports"]]
    if found["kind"] == "PodMonitor":
        return [end.get("port") for end in spec.get("podMetricsEndpoints", ())]
    if found["kind"] == "NetworkPolicy":
        rules = spec.get("ingress", ())
        return [p["port"] for r in rules for p in r.get("ports", ()) if "endPort" not in p]
    return []


def _ports(template: Object) -> set[Any]:
    ports = [p for c in template["spec"]["containers"] for p in c.get("ports", ())]
    return {p["name"] for p in ports} | {p["containerPort"] for p in ports}


def _secret_keys(objects: Sequence[Object]) -> dict[str, list[str]]:
    """The Secrets that the namespace's annotation asks for: name to keys."""
    found: dict[str, list[str]] = {}
    for space in objects:
        if space["kind"] == "Namespace":
            text = space["metadata"].get("annotations", {}).get(SECRETS, "")
            for secret in filter(None, text.split("; ")):
                name, _, keys = secret.partition(": ")
                found[name] = keys.split()
    return found


def unlabelled(objects: Sequence[Object]) -> list[str]:
    """Objects and pods without the labels that all of them carry, or with another mesh's."""
    faults, instances = [], set()
    needed = (f"{DOMAIN}/part-of", f"{DOMAIN}/instance")
    named = [(name_of(o), o["metadata"]) for o in objects]
    named += [(f"pods of {n}", t.get("metadata", {})) for n, t in pod_templates(objects)]
    for name, metadata in named:
        labels = metadata.get("labels", {})
        faults += [f"{name}: has no label {key}" for key in needed if key not in labels]
        instances.add(labels.get(f"{DOMAIN}/instance"))
    if len(instances - {None}) > 1:
        faults.append(f"labels name more than one mesh: {sorted(instances - {None})}")
    return faults
