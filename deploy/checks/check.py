"""Check manifests without a cluster: `forge k8s check DIR|FILE...`.

schema, custom   each object against the schema of its kind, with the API server's own limits
shape            fields of one object against each other
references       what objects of a mesh name of each other
labels           the labels of rendered objects
hardening        rights, bounds, networks;  image, secrets: versions, keys in clear
command, spec    a container's command by our parser, its ConfigMap as a spec
meaning          ports, probes, env, files, grace, memory, pools;  rights, network, volumes
scheduling       gang, rdma: pods that are admitted together, devices of all or none
rules            PrometheusRules by promtool, where it is there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.checks.access import reachable
from deploy.checks.alert_rules import wrong_rules
from deploy.checks.commands import Parse, our_containers
from deploy.checks.findings import Manifest, ManifestFault, ours
from deploy.checks.hardening import exposed, unsafe
from deploy.checks.meaning import meant
from deploy.checks.reading import read_sets
from deploy.checks.references import dangling, unlabelled
from deploy.checks.scheduling import scheduled
from deploy.checks.schemas import Definition, built_in, custom, defined_in, definitions
from deploy.checks.shapes import misshapen


@dataclass(frozen=True)
class CheckResult:
    """Hold what a check found, notes of what it passed over, and how many objects it read."""

    findings: tuple[ManifestFault, ...]
    notes: tuple[str, ...]
    objects: int


def check(paths: Sequence[str], parse: Parse) -> CheckResult:
    """Check the manifests of files and folders. Raises SpecError for paths without manifests."""
    sets, faults, notes = read_sets(paths)
    kinds = [*definitions(), *defined_in(m for each in sets for m in each.manifests)]
    for each in sets:
        found, told = check_objects(each.manifests, kinds, parse)
        faults += found
        notes += told
    count = sum(len(each.manifests) for each in sets)
    return CheckResult(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(notes)), count)


def check_objects(
    manifests: Sequence[Manifest], kinds: Sequence[Definition], parse: Parse
) -> tuple[list[ManifestFault], list[str]]:
    """Return the faults and notes of objects that are applied together. Where an object is not of
    its kind's shape, the checks that read it as such are not asked."""
    faults = list(built_in(manifests))
    more, notes = custom(manifests, kinds)
    faults += more
    if faults:
        return faults, [
            *notes,
            "what objects mean together is checked once each has its kind's form",
        ]
    faults += misshapen(manifests)
    faults += exposed(manifests)
    more, told = wrong_rules(manifests)
    mine = ours(manifests)
    faults += [*more, *dangling(mine), *unlabelled(mine), *unsafe(mine)]
    faults += scheduled(mine)
    containers, wrong = our_containers(mine, parse)
    faults += [*wrong, *meant(mine, containers), *reachable(mine, containers)]
    return faults, [*notes, *told]
