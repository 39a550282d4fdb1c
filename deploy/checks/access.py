"""Check what pods may reach and do: rights against the calls that a run makes, network policies
against its connections, access modes of claims against the pods that mount them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.checks.commands import RUN_HANDLERS, OurContainer
from deploy.checks.findings import Manifest, ManifestFault, PodTemplate, pod_templates
from deploy.checks.quantities import quantity
from deploy.manifests.mesh import teacher_keys
from deploy.manifests.objects import DOMAIN, HELLO_PORT, ONE_NODE, WORKER_PORT, dashed
from deploy.manifests.sizing import GIB, runs_bytes
from protocols.spec.mesh import RunSpec

API_PORTS = (443, 6443)
DNS_PORT = 53
# The calls of services.hosts.kubernetes_client: to attach to pods, and to make them.
ATTACH = {"pods": {"get", "list", "watch"}}
PROVISION = {"monarchmeshes": {"create", "get", "patch", "delete"}}
# Kinds of autoscalers, with the field of the most pods.
MOST = {"HorizontalPodAutoscaler": "maxReplicas", "ScaledObject": "maxReplicaCount"}


def reachable(
    manifests: Sequence[Manifest], ours: Sequence[OurContainer]
) -> Iterator[ManifestFault]:
    """Yield rights, connections and volumes that the containers of ours need and have not."""
    for each in ours:
        run = each.run
        if each.handler in RUN_HANDLERS and run is not None and run.mesh.hosts.kind == "kubernetes":
            yield from _rights(each, run, manifests)
            yield from _connections(each, run, manifests)
            yield from _room(each, run, manifests)
    yield from _claims(manifests)


def _rights(
    each: OurContainer, run: RunSpec, manifests: Sequence[Manifest]
) -> Iterator[ManifestFault]:
    template = each.pod
    spec, space = template.spec, template.owner.namespace
    account = spec.get("serviceAccountName") or "default"
    if spec.get("automountServiceAccountToken") is False:
        yield template.finding(
            "rights",
            ".spec.automountServiceAccountToken",
            "is false, and the controller asks the API server for its pods",
            "set it to true",
        )
    roles = {(m.kind, m.name): m for m in manifests if m.kind in ("Role", "ClusterRole")}
    granted: dict[str, set[str]] = {}
    for found in manifests:
        subjects = found.value.get("subjects") or () if found.kind == "RoleBinding" else ()
        if found.namespace == space and any(_is_account(s, account, space) for s in subjects):
            ref = found.value["roleRef"]
            role = roles.get((ref["kind"], ref["name"]))
            if role is None:  # missing, or of elsewhere: references tell the former
                return
            for rule in role.value.get("rules") or ():
                for resource in rule.get("resources") or ():
                    granted.setdefault(resource, set()).update(rule["verbs"])
    options = run.mesh.hosts.kubernetes
    needed = {**ATTACH, **(PROVISION if options and options.provision else {})}
    for resource, verbs in needed.items():
        have = granted.get(resource, set()) | granted.get("*", set())
        if "*" not in have and (lacks := verbs - have):
            yield template.finding(
                "rights",
                ".spec.serviceAccountName",
                f"{account} may not {', '.join(sorted(lacks))} {resource}, which the run does",
                "bind it a Role that grants it",
            )


def _is_account(subject: Mapping[str, Any], account: str, space: str) -> bool:
    return bool(
        subject["kind"] == "ServiceAccount"
        and subject["name"] == account
        and subject.get("namespace", space) == space
    )


def _connections(
    each: OurContainer, run: RunSpec, manifests: Sequence[Manifest]
) -> Iterator[ManifestFault]:
    template, space = each.pod, each.pod.owner.namespace
    policies = [m for m in manifests if m.kind == "NetworkPolicy" and m.namespace == space]
    rules = _allowed(template, policies, "egress")
    if rules is not None and not any(_passes(r, p, None) for r in rules for p in API_PORTS):
        yield template.finding(
            "network",
            ".metadata.labels",
            "no policy lets it reach the API server, which it asks for its pods",
            "allow egress to it on 443 and 6443",
        )
    asking = [t for t in pod_templates(manifests)
              if t.labels.get(f"{DOMAIN}/component") == dashed("teacher_replay")
              and t.owner.namespace == space]  # fmt: skip
    if teacher_keys(run):
        for pod in asking:
            rules = _allowed(pod, policies, "egress")
            for port, what in ((DNS_PORT, "resolve names"), (443, "reach its providers")):
                if rules is not None and not any(_passes(r, port, None) for r in rules):
                    yield pod.finding(
                        "network",
                        ".metadata.labels",
                        f"no policy lets it {what} (port {port})",
                        "allow that egress",
                    )
    for pool in pod_templates(manifests):
        if pool.owner.kind != "MonarchMesh" or pool.owner.namespace != space:
            continue
        for port in (WORKER_PORT, HELLO_PORT):
            out = _allowed(template, policies, "egress")
            into = _allowed(pool, policies, "ingress")
            ways = (("out of the controller", out, pool), ("into the pool", into, template))
            for way, rules, peer in ways:
                if rules is not None and not any(_passes(r, port, peer) for r in rules):
                    yield pool.finding(
                        "network",
                        ".metadata.labels",
                        f"no policy lets port {port} {way}",
                        "allow the mesh's own TCP",
                    )


def _allowed(
    template: PodTemplate, policies: Sequence[Manifest], direction: str
) -> list[tuple[Mapping[str, Any], str]] | None:
    """Return the rules for a pod's traffic in a direction; None where no policy restricts it."""
    found: list[tuple[Mapping[str, Any], str]] = []
    restricted = False
    side = "to" if direction == "egress" else "from"
    for policy in policies:
        wanted = policy.spec["podSelector"].get("matchLabels") or {}
        by_rules = ["Ingress", *(["Egress"] if "egress" in policy.spec else [])]
        types = policy.spec.get("policyTypes") or by_rules
        if direction.capitalize() in types and wanted.items() <= template.labels.items():
            restricted = True
            found += [(rule or {}, side) for rule in policy.spec.get(direction) or ()]
    return found if restricted else None


def _passes(found: tuple[Mapping[str, Any], str], port: int, peer: PodTemplate | None) -> bool:
    """Return whether a rule lets a port pass: to a pod of the same namespace, or with None to where
    that namespace's pods are not. Of blocks of addresses it is not known whose they are."""
    rule, side = found
    ports = rule.get("ports") or ()
    numbers = [(p.get("port"), p.get("endPort") or p.get("port")) for p in ports]
    if ports and not any(not isinstance(low, int) or low <= port <= high for low, high in numbers):
        return False
    peers = rule.get(side) or ()
    if not peers:
        return True
    for each in peers:
        selector = each.get("podSelector")
        if selector is not None and "namespaceSelector" not in each:
            wanted = selector.get("matchLabels") or {}
            if peer is not None and wanted.items() <= peer.labels.items():
                return True
        elif "namespaceSelector" in each or "ipBlock" in each:
            return True
    return False


def _room(
    each: OurContainer, run: RunSpec, manifests: Sequence[Manifest]
) -> Iterator[ManifestFault]:
    """Yield the claim of runs where it holds less than the plan writes."""
    if each.size is None:
        return
    planned = runs_bytes(run.learn, each.size)
    folder = f"{each.options.get('run_dir') or 'runs'}/"
    volumes = {v["name"]: v for v in each.pod.spec.get("volumes") or ()}
    for mount in each.container.get("volumeMounts"):
        held = volumes.get(mount["name"], {}).get("persistentVolumeClaim")
        if held is None or not folder.startswith(f"{mount['mountPath'].rstrip('/')}/"):
            continue
        for claim in manifests:
            key = ("PersistentVolumeClaim", held["claimName"], each.pod.owner.namespace)
            if (claim.kind, claim.name, claim.namespace) == key:
                asked = claim.spec["resources"]["requests"]["storage"]
                if (room := quantity(asked)) is not None and room < planned:
                    yield claim.finding(
                        "volumes",
                        ".spec.resources.requests.storage",
                        f"is {asked}, and the plan's checkpoints and last state are "
                        f"{-(-planned // GIB)}Gi (forge plan --sizing)",
                        f"give {-(-planned // GIB)}Gi or more",
                    )


def _claims(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    claims = {(m.namespace, m.name): m for m in manifests if m.kind == "PersistentVolumeClaim"}
    writers: dict[tuple[str, str], list[PodTemplate]] = {}
    for template in pod_templates(manifests):
        for index, volume in enumerate(template.spec.get("volumes") or ()):
            held = volume.get("persistentVolumeClaim")
            key = (template.owner.namespace, held["claimName"]) if held else None
            if key is None or key not in claims:
                continue
            if template.count:
                writers.setdefault(key, []).append(template)
            modes = claims[key].spec.get("accessModes") or ()
            mounts = [m for c in template.containers() for m in c.get("volumeMounts")
                      if m["name"] == volume["name"]]  # fmt: skip
            readers = held.get("readOnly") or all(m.get("readOnly") for m in mounts)
            if set(modes) == {"ReadOnlyMany"} and not readers:
                yield template.finding(
                    "volumes",
                    f".spec.volumes[{index}]",
                    f"writes to claim {key[1]}, which is ReadOnlyMany",
                    "mount it readOnly, or ask for ReadWriteMany",
                )
    for key, templates in writers.items():
        claim = claims[key]
        modes = set(claim.spec.get("accessModes") or ())
        most = sum(_most(t, manifests) for t in templates)
        one_node = (claim.value["metadata"].get("annotations") or {}).get(ONE_NODE) == "true"
        single = modes <= {"ReadWriteOnce"} and not one_node
        if most > 1 and (single or modes == {"ReadWriteOncePod"}):
            yield claim.finding(
                "volumes",
                ".spec.accessModes",
                f"{', '.join(sorted(modes))} is for one node, and {most} pods mount it",
                f'ask for ReadWriteMany, or annotate {ONE_NODE}: "true" where there is one node',
            )


def _most(template: PodTemplate, manifests: Sequence[Manifest]) -> int:
    """Return the most pods of a template: an autoscaler may make more."""
    owner = template.owner
    for found in manifests:
        if found.kind in MOST and found.namespace == owner.namespace:
            target = {"kind": "Deployment", **(found.spec.get("scaleTargetRef") or {})}
            if (target["kind"], target.get("name")) == (owner.kind, owner.name):
                return max(template.count, int(found.spec.get(MOST[found.kind]) or 1))
    return template.count
