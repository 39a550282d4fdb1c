"""Configure the services: health, routing, scaling, control plane and telemetry.

These are sections of `meshes/*.yaml` and of its roles; all defaults suit one machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.secrets import SecretName
from cartridge_forge.protocols.spec.base import AsTuple, LocalPath, SpecSection, bounded, broken

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SinkName = Literal["tensorboard", "wandb", "otlp", "trackio"]
RouterName = Literal["round_robin", "least_loaded", "session"]


class HealthSpec(SpecSection):
    """Configure when a silent replica becomes suspect, and when it is dead and replaced."""

    heartbeat_s: float = Field(
        default=0.5,
        gt=0,
        description="seconds between two heartbeats; a process of this host that replies to calls "
        "meanwhile is sent every fourth",
    )
    suspect_after_s: float = Field(
        default=2.0, gt=0, description="silence after which a replica gets no new requests, seconds"
    )
    dead_after_s: float = Field(
        default=5.0, gt=0, description="silence after which a replica is replaced, seconds"
    )

    _outlasts_a_beat = bounded(
        "suspect_after_s", ">", "health.heartbeat_s", "wait for two beats at least"
    )
    _outlasts_suspicion = bounded("dead_after_s", ">", "health.suspect_after_s", "raise it")


class AutoscaleSpec(SpecSection):
    """Configure a pool's size by its load: ongoing and waiting requests per replica."""

    min: int = Field(ge=1, description="fewest replicas")
    max: int = Field(ge=1, description="most replicas")
    target_ongoing: float = Field(
        default=2.0, gt=0, description="requests per replica that the pool is sized for"
    )
    tolerance: float = Field(
        default=0.2, ge=0, lt=1, description="share around the target in which the size stays"
    )
    up_delay_s: float = Field(default=5.0, ge=0, description="seconds of high load before growing")
    down_delay_s: float = Field(
        default=60.0, ge=0, description="seconds of low load before shrinking"
    )

    _holds_the_least = bounded("max", ">=", "min", "raise it")


class ControlSpec(SpecSection):
    """Configure the gRPC control plane. Its address is in the run directory's endpoints.json."""

    listen: str = Field(
        default="127.0.0.1:0", description="host:port of the control plane; port 0 takes a free one"
    )
    token_env: SecretName | None = Field(
        default=None,
        description="environment variable, or file:PATH, with the bearer token that every call "
        "must carry",
    )
    max_replicas: int = Field(
        default=64, ge=1, description="most replicas that a command may scale a role to"
    )
    tls_ca: LocalPath | None = Field(
        default=None,
        description="PEM file of the authorities that a client's certificate must come from; null: "
        "clients need none",
    )
    tls_cert: LocalPath | None = Field(
        default=None, description="PEM file of the server's certificate"
    )
    tls_key: LocalPath | None = Field(default=None, description="PEM file of its private key")

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return host_and_port(value)

    @field_validator("tls_key")
    @classmethod
    def _is_guarded(cls, value: str | None, info: ValidationInfo) -> str | None:
        if not info.data.keys() >= {"listen", "token_env", "tls_ca", "tls_cert"}:
            return value  # one of them is invalid and reported on its own
        if (value is None) != (info.data["tls_cert"] is None):
            raise broken("must be given with control.tls_cert", "give both or neither")
        if value is None and info.data["tls_ca"] is not None:
            raise broken("must be given with control.tls_ca", "give tls_cert and tls_key too")
        listen = info.data["listen"]
        open_to_all = listen.rpartition(":")[0] not in LOOPBACK
        if open_to_all and None in (value, info.data["token_env"], info.data["tls_ca"]):
            raise broken(
                "must be given, with control.tls_ca and control.token_env, where control.listen "
                f"({listen}) is not loopback",
                "set tls_ca, tls_cert, tls_key and token_env, or listen on 127.0.0.1:0",
            )
        return value


class TelemetrySpec(SpecSection):
    """Configure metrics, trace and sinks beside a run's JSON-lines files, which it always has."""

    metrics: str | None = Field(
        default="127.0.0.1:0", description="host:port of Prometheus' /metrics; null for none"
    )
    tls: LocalPath | None = Field(
        default=None,
        description="directory with ca.crt, tls.crt and tls.key, for mutual TLS with whoever reads "
        "/metrics; null: plain HTTP",
    )
    insecure: bool = Field(
        default=False, description="plain HTTP beyond loopback too: anyone may read /metrics"
    )
    trace: bool = Field(default=True, description="write trace.json, which opens in Perfetto")
    sinks: Annotated[tuple[SinkName, ...], AsTuple] = Field(
        default=(), description="tensorboard, wandb, otlp, trackio: optional packages"
    )

    @field_validator("metrics")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else host_and_port(value)

    @field_validator("insecure")
    @classmethod
    def _is_meant(cls, value: bool, info: ValidationInfo) -> bool:
        metrics, tls = info.data.get("metrics"), info.data.get("tls")
        if value and tls is not None:
            raise broken("excludes telemetry.tls", "remove one of them")
        if not value and tls is None and metrics and metrics.rpartition(":")[0] not in LOOPBACK:
            raise broken(
                f"must be true, or telemetry.tls given, where telemetry.metrics ({metrics}) is not "
                "loopback",
                "set telemetry.tls, or telemetry.insecure for anyone to read /metrics",
            )
        return value


class RecordsSpec(SpecSection):
    """Configure where a run is kept beside its directory, and what it records only for those who
    look at it."""

    store: str | None = Field(
        default=None,
        pattern=r"^(s3|gs|az)://[^/@?#\s]+(/[^@?#\s]*)?$|^file:///[^@?#]+$",
        description="object store to which the run is copied at checkpoints and at its end, and "
        "from which --resume fetches it, such as s3://bucket/runs; credentials come from the "
        "environment alone; null: none",
    )

    token_scores: bool = Field(
        default=True,
        description="write doc_kl of every trained token, and the likeliest of the teacher, "
        "to token_scores.jsonl",
    )
    token_scores_mib: int = Field(
        default=64, ge=1, description="size at which token_scores.jsonl ends, MiB"
    )


@dataclass(frozen=True)
class StoredPlace:
    """Name a run in a store: the `url` of all runs, `s3://bucket/runs`, and `run`, its place there,
    `longhealth/20260726T101530Z-3fa9`."""

    url: str
    run: str

    def within(self, writer: str) -> str:
        """Return the prefix of a writer's folder."""
        return f"{self.run}/{writer}"


class WatchdogSpec(SpecSection):
    """Configure when a run without progress counts as stalled."""

    stall_s: float = Field(
        default=60.0, gt=0, description="seconds without any progress before stacks are written"
    )


def host_and_port(value: str) -> str:
    """Return the address unchanged. Raises a rule error for anything but host:port."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):([0-9]{1,5})", value)
    if not match or int(match[2]) > 65535:
        raise broken("must be host:port", "write it as 127.0.0.1:0")
    return value
