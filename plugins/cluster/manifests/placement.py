"""Place a mesh's pods: near each other, a role's pods on different nodes, all admitted together."""

from __future__ import annotations

from collections.abc import Sequence

from cartridge_forge.plugins.cluster.manifests.objects import Object, Scope

QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
GROUP_ROLE = "kueue.x-k8s.io/role-hash"  # Kueue counts each role's pods apart
GROUP_SERVES = "kueue.x-k8s.io/pod-group-serving"  # its pods do not end by themselves


def together(mesh: Scope) -> Object:
    """Return the field of a pod's spec that asks for the zone of the mesh's other pods, between
    which tensors go. Where there is no room it is elsewhere."""
    term = {
        "topologyKey": "topology.kubernetes.io/zone",
        "labelSelector": {"matchLabels": mesh.labels},
    }
    wish = [{"weight": 100, "podAffinityTerm": term}]
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}}


def apart(role: Scope) -> Object:
    """Return the field that spreads a role's pods over nodes, so that a node that is lost takes few
    of them."""
    wish = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": role.labels},
    }
    return {"topologySpreadConstraints": [wish]}


def admitted_together(pools: Sequence[Object], group: str, queue: str) -> None:
    """Make the pods of all pools one pod group of Kueue, in place: they start once the queue has
    room for all of them. The pools themselves, of a kind that Kueue does not know, lose its label.
    """
    total = sum(pool["spec"]["replicas"] for pool in pools)
    for pool in pools:
        pool["metadata"]["labels"].pop(QUEUE, None)
        metadata = pool["spec"]["podTemplate"]["metadata"]
        metadata["labels"] |= {QUEUE: queue, GROUP: group}
        metadata["annotations"] = {
            GROUP_COUNT: str(total),
            GROUP_ROLE: pool["metadata"]["name"],
            GROUP_SERVES: "true",
        }
