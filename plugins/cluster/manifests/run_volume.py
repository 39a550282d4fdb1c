"""Give pods a place for runs: one claim for all of them, or, where `records.store` names a bucket,
a folder of each pod's own and the credentials of the bucket."""

from __future__ import annotations

from urllib.parse import urlsplit

from cartridge_forge.plugins.cluster.manifests.objects import Object, Scope
from cartridge_forge.plugins.cluster.manifests.sizing import ModelSize
from cartridge_forge.plugins.cluster.manifests.values import runs_gib
from cartridge_forge.plugins.cluster.spec import DeploymentSpec
from cartridge_forge.plugins.replay.spec import ReplayLearn
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec

STORE_SECRET = "forge-store"  # every key of it is a variable
STORE_KEYS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
NO_LEDGER = "cannot run with records.store, hosts share no ledger of what was paid"


def shares_no_ledger(spec: RunSpec) -> bool:
    """Return whether external teachers are asked from several hosts, and the run is in a bucket."""
    replay, mesh = ReplayLearn.of(spec.learn).replay, spec.mesh
    apart = mesh.hosts.kind != "local" and replay is not None and replay.local is None
    return apart and mesh.records.store is not None and mesh.roles["teacher_replay"].replicas > 1


def runs_claim(
    spec: RunSpec, size: ModelSize, values: DeploymentSpec, scope: Scope
) -> list[Object]:
    """Return the claim of runs, none with an object store. Raises SpecError for one that the plan
    does not fit, and for teachers that could share no ledger."""
    if shares_no_ledger(spec):
        replicas = spec.mesh.roles["teacher_replay"].replicas
        raise SpecError(
            f"roles.teacher_replay.replicas: {replicas} {NO_LEDGER}; "
            "add --set roles.teacher_replay.replicas=1, and more max_ongoing"
        )
    gib = runs_gib(spec, size, values)
    if spec.mesh.records.store is not None:
        return []
    return [scope.claim("runs", "ReadWriteMany", f"{gib}Gi")]


def runs_volume(spec: RunSpec, size: ModelSize) -> Object:
    """Return a pod's volume of runs."""
    if spec.mesh.records.store is None:
        return {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    return {"name": "runs", "emptyDir": {"sizeLimit": f"{runs_gib(spec, size)}Gi"}}


def store_secret(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """Return the Secret of the bucket's credentials with its keys, none without a bucket."""
    keys = STORE_KEYS.get(urlsplit(spec.mesh.records.store or "").scheme)
    return {} if keys is None else {STORE_SECRET: keys}


def with_store(template: Object, spec: RunSpec) -> None:
    """Give a pod the bucket's credentials, where there is one."""
    if store_secret(spec):
        (container,) = template["spec"]["containers"]
        container["envFrom"] = [{"secretRef": {"name": STORE_SECRET}}]
