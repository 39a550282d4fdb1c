"""Check manifests without a cluster: `forge k8s check DIR|FILE...`.

schema                   each object against the schema of its kind
references               names of objects, keys and ports that other objects of a mesh have
command, spec            a container's command by our parser, its ConfigMap as a spec
ports, probes, env,      what a command needs of its container: ports, paths, variables, mounts,
files, grace             time to end in
memory, pools            pods of a run against its plan and its roles

Generic faults of Kubernetes: `kubectl apply --dry-run=server`, kubeconform, kube-linter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.cluster.checks.commands import Parse, our_containers
from cartridge_forge.plugins.cluster.checks.containers import check_commands
from cartridge_forge.plugins.cluster.checks.findings import Manifest, ManifestFault, ours
from cartridge_forge.plugins.cluster.checks.reading import read_sets
from cartridge_forge.plugins.cluster.checks.references import check_references
from cartridge_forge.plugins.cluster.checks.schemas import check_schemas, definitions


@dataclass(frozen=True)
class CheckResult:
    """Hold the faults of manifests, notes of what was not checked, and the number of objects."""

    findings: tuple[ManifestFault, ...]
    notes: tuple[str, ...]
    objects: int


def check(paths: Sequence[str], parse: Parse) -> CheckResult:
    """Check the manifests of files and folders. Raises SpecError for paths without manifests."""
    sets, loose, faults, notes = read_sets(paths)
    built = [manifest for manifests in sets for manifest in manifests]
    kinds = [m.value for m in (*built, *loose) if m.kind == "CustomResourceDefinition"]
    pairs = [(loose, built)] if loose else []
    for manifests, cluster in (*((one, ()) for one in sets), *pairs):
        more, remarks = check_objects(manifests, parse, kinds, cluster)
        faults += more
        notes += remarks
    count = len(built) + len(loose)
    return CheckResult(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(notes)), count)


def check_objects(
    manifests: Sequence[Manifest],
    parse: Parse,
    kinds: Sequence[dict[str, object]] = (),
    cluster: Sequence[Manifest] = (),
) -> tuple[list[ManifestFault], list[str]]:
    """Return the faults and notes of objects that are applied together, with those of the `cluster`
    beside them; `kinds` are definitions of custom kinds beside ours. Objects that break their
    schema are not read further."""
    faults, notes = check_schemas(manifests, [*definitions(), *kinds])
    if faults:
        return faults, [*notes, "references and commands are checked once every schema is met"]
    objects = ours([*manifests, *cluster])
    names = {id(manifest) for manifest in manifests}
    mine = [manifest for manifest in objects if id(manifest) in names]
    containers, faults = our_containers(mine, parse)
    return [*check_references(mine, objects), *faults, *check_commands(mine, containers)], notes
