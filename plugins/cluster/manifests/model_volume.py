"""Give pods the base model from a volume: a claim of the user's, or one that a Job fills once from
the hub. All but that Job mount it read-only.

    Job model --writes--> PVC model <--reads-- controller (waits for it), every pool
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cartridge_forge.plugins.cluster.manifests.objects import (
    Object,
    Resources,
    Scope,
    pod,
    secret_env,
)
from cartridge_forge.plugins.cluster.manifests.sizing import GIB, ModelSize
from cartridge_forge.plugins.cluster.spec import ModelSourceSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY

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
