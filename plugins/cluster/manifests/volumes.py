"""Give pods the base model from a volume: a claim of the user's, or one that a Job fills once from
the hub. All but that Job mount it read-only.

    Job model --writes--> PVC model <--reads-- controller (waits for it), every pool

Give pods a place for runs: one claim for all of them, or, where `records.store` names a bucket,
a folder of each pod's own and the credentials of the bucket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cartridge_forge.plugins.cluster.manifests.objects import (
    Object,
    Resources,
    Scope,
    pod,
    secret_env,
)
from cartridge_forge.plugins.cluster.manifests.sizing import GIB, ModelSize
from cartridge_forge.plugins.cluster.manifests.values import runs_gib
from cartridge_forge.plugins.cluster.spec import DeploymentSpec, ModelSourceSpec
from cartridge_forge.plugins.replay.spec import ReplayLearn
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.mesh import RunSpec

MOUNT = "/models"
CLAIM = "model"
KEPT = f"{MOUNT}/models"  # where `forge models add` keeps models, with FORGE_HOME at the mount
WAIT_SECONDS = 7200  # of the controller, for the Job's download
COPIES = 2.5  # in the claim: the model, one that replaces it, and room
TOKEN = "HF_TOKEN"


@dataclass(frozen=True)
class ModelVolume:
    """Hold where a model comes from: the `claim` and its folder in it; `hub` is the id to fetch it
    by, "" for a claim of the user's."""

    claim: str
    path: str  # in the pods
    hub: str = ""
    token_secret: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def volumes(self) -> list[Object]:
        return [{"name": "model", "persistentVolumeClaim": {"claimName": self.claim}}]

    def mounts(self, *, writes: bool = False) -> list[Object]:
        return [{"name": "model", "mountPath": MOUNT, **({} if writes else {"readOnly": True})}]


def model_volume(path: str, source: ModelSourceSpec) -> ModelVolume | None:
    """Return the volume that has the model at `model.path`; None where the image has it. Raises
    SpecError for a directory that the image has not."""
    if source.claim is not None:
        return ModelVolume(source.claim, f"{MOUNT}/{source.path}")
    if not path.startswith("/"):
        return ModelVolume(CLAIM, f"{KEPT}/{_called(path)}", path, source.token_secret)
    if not Path(path).is_relative_to(REPOSITORY):
        raise SpecError(
            f"model.path: {path} is on this machine alone, and the image has it not; copy it to a "
            "claim and give model.claim and model.path in --values, or name a model of the hub"
        )
    return None


def _called(hub: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", hub.rpartition("/")[2]).lower()


def filling(volume: ModelVolume, size: ModelSize, scope: Scope) -> list[Object]:
    """Return the claim of a hub model, and the Job that fills it, unless the model is there."""
    scope_of_model = scope.of("model")
    gib = max(1, -(-int(COPIES * size.weights) // GIB))
    template = pod(
        "model",
        ["forge", "models", "add", volume.hub, "--name", volume.name, "--if-missing"],
        Resources(cpu=1, memory=4, shm=1),
        "forge-worker",
        scope_of_model.labels,
        ports={},
        probes={},
        env=[
            {"name": "FORGE_HOME", "value": MOUNT},
            *([secret_env(TOKEN, volume.token_secret, TOKEN)] if volume.token_secret else []),
        ],
        volumes=volume.volumes(),
        mounts=volume.mounts(writes=True),
    )
    template["spec"]["restartPolicy"] = "OnFailure"
    job = {"backoffLimit": 6, "template": template}
    return [
        scope_of_model.claim(volume.claim, "ReadWriteMany", f"{gib}Gi"),
        scope_of_model.made("batch/v1", "Job", "model", spec=job),
    ]


def waiting(volume: ModelVolume, scope: Scope) -> Object:
    """Return the container that waits, before the controller starts, until the model is there."""
    words = ["forge", "models", "show", volume.name, "--wait", str(WAIT_SECONDS)]
    template = pod(
        "model",
        words,
        Resources(cpu=1, memory=1, shm=1),
        "forge-controller",
        scope.labels,
        ports={},
        probes={},
        env=[{"name": "FORGE_HOME", "value": MOUNT}],
        mounts=volume.mounts(),
    )
    container: Object = template["spec"]["containers"][0]
    del container["ports"]
    return container


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
