"""Check what pods ask of a cluster together: one pod group of Kueue, and RDMA devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from deploy.checks.findings import Manifest, ManifestFault, PodTemplate, pod_templates
from deploy.manifests.objects import DOMAIN, GPU
from deploy.manifests.placement import GROUP, GROUP_COUNT, QUEUE

RDMA = "rdma/"  # the prefix of the shared device plugin's resources
CONTROLLER = "controller"


def scheduled(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield faults of pod groups, and pods of a mesh without the RDMA devices of the others."""
    groups: dict[tuple[str, str], list[PodTemplate]] = defaultdict(list)
    meshes: dict[tuple[str, str], list[PodTemplate]] = defaultdict(list)
    for template in pod_templates(manifests):
        space = template.owner.namespace
        if group := template.labels.get(GROUP):
            groups[space, group].append(template)
        elif GROUP_COUNT in _annotations(template):
            yield template.finding(
                "gang",
                ".metadata.annotations",
                f"has {GROUP_COUNT}, and is in no group",
                f"add the label {GROUP}",
            )
        meshes[space, template.labels.get(f"{DOMAIN}/instance", "")].append(template)
    for (_, group), members in groups.items():
        yield from _group(group, members)
    for (_, instance), members in meshes.items():
        if instance:
            yield from _devices(members)


def _group(group: str, members: Sequence[PodTemplate]) -> Iterator[ManifestFault]:
    """Yield members that Kueue would not hold, or would wait for others than are made."""
    total = sum(template.count for template in members)
    for template in members:
        if QUEUE not in template.labels:
            yield template.finding(
                "gang",
                ".metadata.labels",
                f"is in pod group {group} and names no queue: it starts without the others",
                f"add the label {QUEUE}",
            )
        told = _annotations(template).get(GROUP_COUNT)
        if told != str(total):
            yield template.finding(
                "gang",
                ".metadata.annotations",
                f"says that pod group {group} has {told or 'no number of'} pods, and it has "
                f"{total}: Kueue waits for the rest, or removes those beyond",
                f"set {GROUP_COUNT} to {total!r} as text in all of them",
            )


def _devices(members: Sequence[PodTemplate]) -> Iterator[ManifestFault]:
    """Yield pods between which tensors go that lack the devices of the others."""
    asked = {id(t): {r for r in _resources(t) if r.startswith(RDMA)} for t in members}
    every = sorted(set().union(*asked.values()))
    for template in members:
        is_controller = template.labels.get(f"{DOMAIN}/component") == CONTROLLER
        moves = GPU in _resources(template) or is_controller
        if every and moves and not asked[id(template)]:
            yield template.finding(
                "rdma",
                ".spec.containers",
                f"asks for no RDMA device, and others of its mesh ask for {', '.join(every)}: "
                "tensors between them cannot go by it",
                f"ask for {every[0]} here too, or nowhere",
            )


def _resources(template: PodTemplate) -> set[str]:
    found = (c.value.get("resources") or {} for c in template.containers())
    return {name for resources in found for name in resources.get("limits") or {}}


def _annotations(template: PodTemplate) -> dict[str, str]:
    return dict((template.value.get("metadata") or {}).get("annotations") or {})
