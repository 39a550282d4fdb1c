"""Configure where a run runs, and hold the whole resolved spec of a run.

meshes/x.yaml    MeshSpec   roles, replicas, processes, hosts, tensor plane; names its config
configs/x.yaml   LearnSpec  model, data, cartridge, rollout, teacher, loss, train, evaluate
both, resolved   RunSpec    the run, as checkpointed and written into the run directory

hosts: local                                                     this host alone
hosts: {kind: addresses, addresses: [tls://10.0.0.2:26600],      where `forge worker` listens
        tls: certs/10.0.0.1}                                     this host's certificate
hosts: {kind: kubernetes, tls: /etc/forge/mesh}                  pods of the mesh's MonarchMeshes
hosts: {kind: slurm, slurm: {nodes: 4}, insecure: true}          nodes of a Slurm job

Beyond loopback the mesh talks by mutual TLS, or by plain TCP where `insecure` says so.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
)

from cartridge_forge.protocols.packages import is_missing
from cartridge_forge.protocols.plugins import Kind, installed
from cartridge_forge.protocols.spec.base import (
    AsTuple,
    JoinedSection,
    KnownNames,
    LocalPath,
    ReadWith,
    SpecSection,
    broken,
    unknown_name,
)
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.services import (
    AutoscaleSpec,
    ControlSpec,
    HealthSpec,
    RecordsSpec,
    RouterName,
    TelemetrySpec,
    WatchdogSpec,
)

# tls://host:port; an IPv6 host has brackets. A worker serves its WorkerInfo on the next port.
ADDRESS = re.compile(r"(?:tcp|tls)://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):([0-9]{1,5})")


def is_tls(address: str) -> bool:
    """Return whether a worker's address is one for TLS: `"tls://10.0.0.2:26600"`."""
    return address.startswith("tls://")


def is_loopback_host(host: str) -> bool:
    """Return whether a host, an address or "localhost", is reached from itself alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class HostsSpec(SpecSection):
    """Configure the hosts that the roles are spread over."""

    kind: Literal["local", "addresses", "kubernetes", "slurm"] = Field(
        default="local",
        description="local: this host; addresses: hosts that already listen; kubernetes: pods; "
        "slurm: nodes of a job",
    )
    addresses: Annotated[tuple[str, ...], AsTuple, ReadWith("kind", ("addresses",))] = Field(
        default=(),
        description="tls://host:port of every host, with kind addresses; tcp:// for plain TCP",
    )
    tls: LocalPath | None = Field(
        default=None,
        description="directory with this host's ca.crt, tls.crt and tls.key, for mutual TLS with "
        "the workers; null: plain TCP, which is for loopback",
    )
    insecure: bool = Field(
        default=False,
        description="plain TCP beyond loopback too: whoever reaches a port of the mesh runs code "
        "there",
    )
    reached_at: str | None = Field(
        default=None,
        description="name or address of this host for the others; null: of the route to them",
    )

    @field_validator("addresses")
    @classmethod
    def _of_kind_addresses(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.data.get("kind") == "addresses" and not value:
            raise broken("must be given with hosts.kind addresses", "list tls://host:port")
        for address in value:
            match = ADDRESS.fullmatch(address)
            if not match or not 1 <= int(match[2]) < 65535:
                raise broken(
                    "must hold tls://host:port addresses", f"write {address!r} as tls://host:26600"
                )
        if len(set(value)) < len(value):
            raise broken("must list each host once", "remove the second")
        if len({is_tls(address) for address in value}) == 2:
            raise broken("must be tls:// for all hosts, or tcp:// for all", "change the others")
        return value


class RoleSpec(SpecSection):
    """Configure how many replicas a role has, and the resources of each."""

    replicas: int = Field(default=1, ge=1, description="copies that share the work")
    procs: int = Field(default=1, ge=1, description="processes of one replica: ranks")
    threads: int = Field(default=1, ge=1, description="torch threads of one process")
    gpus: int = Field(default=0, ge=0, description="GPUs of one process")
    router: RouterName = Field(
        default="least_loaded", description="which replica gets a request that may go to any"
    )
    attempts: int = Field(
        default=5, ge=1, description="times that one request is tried, on other replicas"
    )
    max_ongoing: int = Field(
        default=8, ge=1, description="requests that one replica has at a time; others wait"
    )
    restarts: int = Field(
        default=10,
        ge=0,
        description="replicas of the role that may die before the run fails; one whose engine died "
        "of a request is not counted",
    )
    autoscale: AutoscaleSpec | None = Field(
        default=None, description="let the pool's size follow its load; null for a fixed size"
    )

    @field_validator("autoscale")
    @classmethod
    def _starts_within(
        cls, value: AutoscaleSpec | None, info: ValidationInfo
    ) -> AutoscaleSpec | None:
        replicas = info.data.get("replicas")
        if value is not None and replicas is not None and not value.min <= replicas <= value.max:
            raise broken(
                f"must hold replicas ({replicas}) between its min and max",
                "change one of the three",
            )
        return value


class GpusSpec(SpecSection):
    """Configure the GPUs of the host, for the plan and for vLLM's share of its device."""

    count: int = Field(default=1, ge=1, description="GPUs of the host")
    gb: float = Field(gt=0, description="memory of one of them, GB (10^9 bytes)")


# The roles of a run and what each does; `RunSpec.roles` are those that a run needs.
ROLES = {
    "generator": "samples with the cartridge",
    "doc_teacher": "scores with the document",
    "sdpo_teacher": "scores turns with a hint, and references of dpo.reference first_use",
    "environment": "answers the student's calls",
    "reward": "judges episodes by functions and verifiers",
    "teacher_replay": "asks external teachers",
    "rsa_aggregator": "judges populations and asks for the next",
    "trainer": "optimises the cartridges",
}


def _foreign_roles() -> tuple[str, ...]:
    return tuple(name for plugin in installed() for name in plugin.roles)


ROLE_NAMES = KnownNames("ROLE", ROLES, _foreign_roles)


def _known_role(name: str) -> str:
    if name not in ROLE_NAMES:
        raise unknown_name()
    return name


def _every_role(roles: dict[str, RoleSpec]) -> dict[str, RoleSpec]:
    return {name: roles.get(name, RoleSpec()) for name in ROLES} | roles


def _with_role_names(schema: dict[str, Any]) -> None:
    """Give the JSON schema a property for each shipped role, for completion in an editor."""
    role = schema["additionalProperties"]
    schema["properties"] = {
        name: {**role, "description": meaning} for name, meaning in ROLES.items()
    }


Roles = Annotated[
    dict[Annotated[str, AfterValidator(_known_role)], RoleSpec],
    AfterValidator(_every_role),
    ROLE_NAMES,
]


HINTED_TEACHER = "sdpo_teacher"
TEACHERS = ("doc_teacher", HINTED_TEACHER)  # the roles that score the student's tokens
CARTRIDGE_READERS = ("generator", HINTED_TEACHER)  # the roles that load cartridges
MODEL_ROLES = ("generator", *TEACHERS, "trainer")  # the roles that load the base model


RELAYED_KINDS = ("addresses", "kubernetes")  # whose workers have an address of their own


LONGEST_NAME = 57  # of a mesh: its namespace, forge-NAME, is at most 63 characters


class MeshSpec(JoinedSection):
    """Configure a mesh, `meshes/*.yaml`."""

    table: ClassVar[Kind] = "meshes"

    name: str = Field(
        max_length=LONGEST_NAME,
        description="names the run directory: lower-case letters, digits and _",
    )
    config: LocalPath = Field(
        min_length=1, description="the learning config, relative to the mesh file"
    )
    hosts: HostsSpec = Field(
        default=HostsSpec(), description="where the roles run; a bare word is a kind"
    )
    plane: Literal["torchstore", "shared_memory", "auto"] = Field(
        default="torchstore",
        description="what carries tensors between processes; auto: shared_memory where all are on "
        "one host, else torchstore; shared_memory stands in for torchstore on one host without it",
    )
    publish: Literal["auto", "relayed", "direct"] = Field(
        default="auto",
        description="how published cartridges reach the hosts: relayed: each gets them once and "
        "hands them on; direct: every reader gets them from the store; auto: relayed where there "
        "are several hosts with a worker's address, else direct",
    )
    roles: Roles = Field(
        default={},
        description="replicas and processes of every role, those of plug-ins included",
        json_schema_extra=_with_role_names,
    )
    gpus: GpusSpec | None = Field(
        default=None,
        description="GPUs of this host, which processes share where they are fewer than asked for; "
        "null: not checked",
    )
    spares: int = Field(
        default=0,
        ge=0,
        description="warm processes, of each number of threads, to take a dead one's place",
    )
    health: HealthSpec = Field(default=HealthSpec(), description="heartbeats of every process")
    watchdog: WatchdogSpec = Field(default=WatchdogSpec(), description="runs that stand still")
    control: ControlSpec = Field(default=ControlSpec(), description="steering a run from outside")
    telemetry: TelemetrySpec = Field(
        default=TelemetrySpec(), description="metrics, trace and sinks"
    )
    records: RecordsSpec = Field(
        default=RecordsSpec(), description="what is recorded for those who look at the run"
    )
    call_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="most seconds of one call to an actor, its retries included",
    )
    spawn_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="most seconds in which a starting process makes no progress: reads nothing, "
        "prepares no cartridge and takes no memory",
    )

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise broken(
                "must be lower-case letters, digits and _, a letter first", "rename the mesh"
            )
        return value

    @field_validator("plane")
    @classmethod
    def _reaches_every_host(cls, value: str, info: ValidationInfo) -> str:
        hosts = info.data.get("hosts")
        if value == "shared_memory" and hosts is not None and hosts.kind != "local":
            raise broken(
                f"must reach every host of hosts.kind {hosts.kind}; shared memory is one host's",
                "set plane: torchstore",
            )
        return value

    @field_validator("publish")
    @classmethod
    def _has_hosts(cls, value: str, info: ValidationInfo) -> str:
        hosts = info.data.get("hosts")
        if value == "relayed" and hosts is not None and hosts.kind not in RELAYED_KINDS:
            raise broken(
                f"must be auto or direct with hosts.kind {hosts.kind}, whose hosts tell no address "
                "for a relay",
                "set publish: auto",
            )
        return value

    @property
    def relays(self) -> bool:
        """Return whether a relay on each host hands published cartridges on."""
        if self.publish != "auto":
            return self.publish == "relayed"
        # A pod is a host of its own, and a run has a generator and a trainer at least.
        return self.hosts.kind == "kubernetes" or len(self.hosts.addresses) > 1

    @property
    def model_on_gpus(self) -> bool:
        """Return whether a role that loads the base model has GPUs."""
        return any(self.roles[role].gpus for role in MODEL_ROLES)

    @property
    def carrier(self) -> Literal["torchstore", "shared_memory"]:
        """Return the tensor plane that is used."""
        if self.plane != "auto" and not self.lacks_torchstore:
            return self.plane
        return "shared_memory" if self.hosts.kind == "local" else "torchstore"

    @property
    def lacks_torchstore(self) -> bool:
        """Return whether shared memory stands in for torchstore, which is not installed."""
        one_host = self.plane == "torchstore" and self.hosts.kind == "local"
        return one_host and is_missing("torchstore")


class RunSpec(SpecSection):
    """Hold one run, resolved: local paths are absolute, every default is filled in, no secrets."""

    mesh: Annotated[SerializeAsAny[MeshSpec], PlainValidator(MeshSpec.read)] = Field(
        description="where it runs"
    )
    learn: Annotated[SerializeAsAny[LearnSpec], PlainValidator(LearnSpec.read)] = Field(
        description="what it learns"
    )

    @property
    def roles(self) -> tuple[tuple[str, RoleSpec], ...]:
        """Return (name, role) of the roles that this run needs, in the order of a step."""
        needed = self.learn.needed_roles
        names = [name for name in ROLES if name in needed]
        names += sorted(needed - ROLES.keys())  # of other packages
        roles = self.mesh.roles | {"trainer": self.trainer}
        return tuple((name, roles.get(name, RoleSpec())) for name in names)

    @property
    def trainer(self) -> RoleSpec:
        """Return the trainer's role as processes. Replicas that divide the cartridges are ranks of
        one: each call goes to all, and they are lost and replaced together."""
        role = self.mesh.roles["trainer"]
        if not self.divides_cartridges:
            return role
        return role.model_copy(update={"replicas": 1, "procs": role.replicas})

    @property
    def divides_cartridges(self) -> bool:
        """Return whether several trainers hold cartridges of their own."""
        return self.mesh.roles["trainer"].replicas > 1

    @property
    def default_run_root(self) -> Path:
        """Return the root of this mesh's runs, `runs/<mesh name>` in the current directory."""
        return Path("runs") / self.mesh.name

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or YAML; `RunSpec.model_validate` reads them back, equal."""
        return self.model_dump(mode="json")
