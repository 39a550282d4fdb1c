"""Check fields of one object against each other: what the API server, or kubelet, refuses although
each field alone is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from typing import Any

from deploy.checks.findings import Container, Manifest, ManifestFault, PodTemplate, pod_templates
from deploy.checks.quantities import quantity

RULE = "shape"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
ALWAYS_RUN = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")


def misshapen(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield such faults of every object, and objects that are there twice."""
    yield from _twice(manifests)
    for found in manifests:
        if rule := _OF_KIND.get(found.kind):
            yield from rule(found)
        yield from _selector(found)
    for template in pod_templates(manifests):
        yield from _pod(template)


def _twice(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    first: dict[tuple[str, ...], Manifest] = {}
    for found in manifests:
        key = (found.group, found.kind, found.namespace, found.name)
        if found.name.endswith("*"):  # the API server makes the name
            continue
        if key in first:
            other = first[key].file or "the same input"
            yield found.finding(
                RULE, ".metadata.name", f"is there twice, also in {other}", "rename or remove one"
            )
        first.setdefault(key, found)


def _budget(found: Manifest) -> Iterator[ManifestFault]:
    given = [key for key in ("minAvailable", "maxUnavailable") if found.spec.get(key) is not None]
    if len(given) != 1:
        what = (
            "has both minAvailable and maxUnavailable" if given else "allows no disruption number"
        )
        yield found.finding(RULE, ".spec", what, "give one of minAvailable and maxUnavailable")


def _autoscaler(found: Manifest) -> Iterator[ManifestFault]:
    least, most = found.spec.get("minReplicas", 1), found.spec.get("maxReplicas", 1)
    if isinstance(least, int) and isinstance(most, int) and least > most:
        what = f"minReplicas {least} is more than maxReplicas {most}"
        yield found.finding(RULE, ".spec.minReplicas", what, "lower it or raise maxReplicas")


def _service(found: Manifest) -> Iterator[ManifestFault]:
    ports = found.spec.get("ports") or ()
    if len(ports) > 1 and not all(p.get("name") for p in ports):
        yield found.finding(
            RULE, ".spec.ports", "has several ports, and one without a name", "name each of them"
        )
    yield from _repeated(found, ".spec.ports", "name", (p.get("name") for p in ports))
    pairs = (f"{p.get('port')}/{p.get('protocol', 'TCP')}" for p in ports)
    yield from _repeated(found, ".spec.ports", "port", pairs)


def _deployment(found: Manifest) -> Iterator[ManifestFault]:
    strategy = found.spec.get("strategy") or {}
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") == "Recreate" and rolling:
        yield found.finding(
            RULE,
            ".spec.strategy.rollingUpdate",
            "is given with type Recreate",
            "remove it, or write type: RollingUpdate",
        )
    steps = [(rolling or {}).get(key) for key in ("maxSurge", "maxUnavailable")]
    if all(step in (0, "0%") for step in steps):
        yield found.finding(
            RULE,
            ".spec.strategy.rollingUpdate",
            "maxSurge and maxUnavailable are both 0: no pod could be replaced",
            "make one of them 1 or more",
        )


def _job(found: Manifest) -> Iterator[ManifestFault]:
    for template in pod_templates([found]):
        rule, _, _ = template.path.rpartition(".template")
        job = found.spec if found.kind == "Job" else found.spec["jobTemplate"]["spec"]
        restart = template.spec.get("restartPolicy", "Always")
        if restart not in ("Never", "OnFailure"):
            yield template.finding(
                RULE, ".spec.restartPolicy", f"is {restart} in a Job", "write Never or OnFailure"
            )
        rules = (job.get("podFailurePolicy") or {}).get("rules") or ()
        if rules and restart != "Never":
            yield template.finding(
                RULE,
                ".spec.restartPolicy",
                "a podFailurePolicy is for pods that are not started again",
                "write Never",
            )
        for index, policy in enumerate(rules):
            codes = policy.get("onExitCodes") or {}
            if codes.get("operator") == "In" and 0 in (codes.get("values") or ()):
                path = f"{rule}.podFailurePolicy.rules[{index}].onExitCodes.values"
                yield found.finding(RULE, path, "holds 0, which is no failure", "remove it")


def _claim(found: Manifest) -> Iterator[ManifestFault]:
    if not (found.spec.get("resources") or {}).get("requests", {}).get("storage"):
        yield found.finding(
            RULE, ".spec.resources.requests", "asks for no storage", "give storage, such as 20Gi"
        )


def _policy(found: Manifest) -> Iterator[ManifestFault]:
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(found.spec.get(direction) or ()):
            path = f".spec.{direction}[{index}]"
            for number, port in enumerate((rule or {}).get("ports") or ()):
                first, last = port.get("port"), port.get("endPort")
                if last is not None and not (isinstance(first, int) and first <= last):
                    what = f"endPort {last} does not follow a number in port ({first})"
                    yield found.finding(
                        RULE, f"{path}.ports[{number}]", what, "give port a number up to endPort"
                    )
            for number, peer in enumerate((rule or {}).get(side) or ()):
                yield from _peer(found, f"{path}.{side}[{number}]", peer or {})


def _peer(found: Manifest, path: str, peer: Mapping[str, Any]) -> Iterator[ManifestFault]:
    block = peer.get("ipBlock")
    if block is None:
        return
    if len(peer) > 1:
        yield found.finding(
            RULE, path, "has an ipBlock and a selector in one peer", "write two peers"
        )
    try:
        whole = ip_network(block["cidr"])
        for out in block.get("except") or ():
            part = ip_network(out)
            # The stub does not know that equal versions are equal types.
            if part.version != whole.version or not part.subnet_of(whole):  # type: ignore[arg-type]
                yield found.finding(
                    RULE, f"{path}.ipBlock.except", f"{out} is not within {whole}", "remove it"
                )
    except ValueError as error:
        yield found.finding(RULE, f"{path}.ipBlock", str(error), "correct the block")


_OF_KIND: Mapping[str, Callable[[Manifest], Iterator[ManifestFault]]] = {
    "PodDisruptionBudget": _budget,
    "HorizontalPodAutoscaler": _autoscaler,
    "Service": _service,
    "Deployment": _deployment,
    "Job": _job,
    "CronJob": _job,
    "PersistentVolumeClaim": _claim,
    "NetworkPolicy": _policy,
}


def _selector(found: Manifest) -> Iterator[ManifestFault]:
    if found.kind not in ALWAYS_RUN:
        return
    wanted = (found.spec.get("selector") or {}).get("matchLabels") or {}
    for template in pod_templates([found]):
        if not wanted.items() <= template.labels.items():
            yield found.finding(
                RULE,
                ".spec.selector",
                f"does not meet the labels of its own pods: {wanted}",
                f"write the labels of {template.path}.metadata",
            )
        if template.spec.get("restartPolicy", "Always") != "Always":
            yield template.finding(
                RULE,
                ".spec.restartPolicy",
                f"a {found.kind} starts its pods again always",
                "remove it, or make it a Job",
            )


def _pod(template: PodTemplate) -> Iterator[ManifestFault]:
    spec, owner, path = template.spec, template.owner, template.path
    volumes = [v.get("name") for v in spec.get("volumes") or ()]
    yield from _repeated(owner, f"{path}.spec.volumes", "name", volumes)
    for index, volume in enumerate(spec.get("volumes") or ()):
        sources = sorted(set(volume) - {"name"})
        if len(sources) > 1:
            yield template.finding(
                RULE,
                f".spec.volumes[{index}]",
                f"has {len(sources)} sources: {', '.join(sources)}",
                "keep one",
            )
    claims = owner.spec.get("volumeClaimTemplates") or () if owner.kind == "StatefulSet" else ()
    there = {*volumes, *(claim["metadata"]["name"] for claim in claims)}
    for index, toleration in enumerate(spec.get("tolerations") or ()):
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            yield template.finding(
                RULE,
                f".spec.tolerations[{index}]",
                "has a value with operator Exists",
                "remove the value",
            )
    containers = list(template.containers())
    names = (c.value.get("name") for c in containers)
    yield from _repeated(owner, f"{path}.spec.containers", "name", names)
    for container in containers:
        yield from _container(container, there)


def _container(container: Container, volumes: set[Any]) -> Iterator[ManifestFault]:
    owner, path = container.pod.owner, container.path
    yield from _repeated(owner, f"{path}.ports", "name", container.ports().values())
    mounts = container.get("volumeMounts")
    yield from _repeated(
        owner, f"{path}.volumeMounts", "mountPath", (m.get("mountPath") for m in mounts)
    )
    yield from _repeated(
        owner, f"{path}.env", "name", (e.get("name") for e in container.get("env"))
    )
    for index, mount in enumerate(mounts):
        if mount.get("name") not in volumes:
            what = f"mounts volume {mount.get('name')}, which the pod has not"
            yield container.finding(
                RULE, f".volumeMounts[{index}]", what, "correct its name, or add the volume"
            )
        inner = str(mount.get("subPath") or "")
        if inner.startswith("/") or ".." in inner.split("/"):
            yield container.finding(
                RULE,
                f".volumeMounts[{index}].subPath",
                f"{inner} leads out of the volume",
                "give a path in it",
            )
    for index, variable in enumerate(container.get("env")):
        if variable.get("value") and variable.get("valueFrom"):
            yield container.finding(
                RULE, f".env[{index}]", "has both value and valueFrom", "keep one"
            )
    yield from _resources(container)
    for name in PROBES:
        if isinstance(probe := container.value.get(name), dict):
            yield from _probe(container, name, probe)


def _resources(container: Container) -> Iterator[ManifestFault]:
    resources = container.value.get("resources") or {}
    asked, most = resources.get("requests") or {}, resources.get("limits") or {}
    for name, amount in asked.items():
        low, high = quantity(amount), quantity(most.get(name, ""))
        if low is not None and high is not None and low > high:
            yield container.finding(
                RULE,
                f".resources.requests.{name}",
                f"{amount} is more than the limit of {most[name]}",
                "raise the limit",
            )
    for kind, amounts in (("requests", asked), ("limits", most)):
        for name, amount in amounts.items():
            count = quantity(amount)
            path = f".resources.{kind}.{name}"
            if count is None:
                continue
            if count < 0:
                yield container.finding(RULE, path, f"{amount} is below 0", "give 0 or more")
            elif name == "memory" and str(amount).endswith(("m", "u", "n")):
                yield container.finding(
                    RULE,
                    path,
                    f"{amount} is less than {int(count) + 1} bytes: m is a thousandth",
                    "write Mi",
                )
            elif "/" in name and count % 1:
                yield container.finding(
                    RULE, path, f"{amount} is no whole number of devices", "give a whole number"
                )
    for name in {n for n in (*asked, *most) if "/" in n}:
        if asked.get(name, most.get(name)) != most.get(name):
            yield container.finding(
                RULE,
                f".resources.limits.{name}",
                "requests and limits of a device differ",
                "make them equal",
            )


def _probe(container: Container, name: str, probe: Mapping[str, Any]) -> Iterator[ManifestFault]:
    ways = [way for way in HANDLERS if probe.get(way) is not None]
    if len(ways) != 1:
        yield container.finding(
            RULE, f".{name}", f"asks in {len(ways)} ways", f"give one of {', '.join(HANDLERS)}"
        )
    if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
        yield container.finding(
            RULE, f".{name}.successThreshold", "may only be 1 here", "remove it"
        )
    for way in ways:
        port = (probe[way] or {}).get("port")
        if isinstance(port, str) and container.port(port) is None:
            have = ", ".join(filter(None, container.ports().values())) or "none with a name"
            yield container.finding(
                RULE,
                f".{name}.{way}.port",
                f"asks port {port}, which the container has not",
                f"name one of its ports ({have})",
            )


def _repeated(
    found: Manifest, path: str, key: str, values: Iterable[str | None]
) -> Iterator[ManifestFault]:
    for value, count in Counter(filter(None, values)).items():
        if count > 1:
            yield found.finding(
                RULE, path, f"{key} {value} is there {count} times", "rename or remove all but one"
            )
