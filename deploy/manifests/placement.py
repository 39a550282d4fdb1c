"""Wish where a mesh's pods stand: near each other, and a role's pods on different nodes."""

from __future__ import annotations

from deploy.manifests.objects import Object, Scope


def together(mesh: Scope) -> Object:
    """Return the field of a pod's spec that asks for the zone of the mesh's other pods, between
    which tensors go. Where there is no room it is elsewhere."""
    near = {
        "topologyKey": "topology.kubernetes.io/zone",
        "labelSelector": {"matchLabels": mesh.labels},
    }
    wish = [{"weight": 100, "podAffinityTerm": near}]
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
