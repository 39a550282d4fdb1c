"""Call the control plane of a run over gRPC.

Calls have deadlines, replies are plain data, and errors are ControlError with a remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

# gRPC's core logs every failed connection; ControlError reports it once.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from pydantic import SecretStr

from cartridge_forge.plugins.watch.control.endpoints import (
    drawn_token,
    is_loopback,
    not_running,
)
from cartridge_forge.protocols.errors import ControlError, DataError
from cartridge_forge.protocols.files import utc_text
from cartridge_forge.protocols.records.status import MOST, PoolStatus, RunStatus
from cartridge_forge.protocols.wire import control_pb2 as pb
from cartridge_forge.protocols.wire.control_messages import RUN_KEY, pool_status, run_status
from cartridge_forge.protocols.wire.control_pb2_grpc import ControlStub

CONNECT_SECONDS = 5.0
CALL_SECONDS = 10.0
CHECKPOINT_SECONDS = 600.0  # the step in progress ends first


@dataclass(frozen=True)
class ControlTarget:
    """Name a control plane. `run` is the run directory that gave the address, None without one,
    which also has the token where `token` is None and the run drew one;
    `ca` the PEM text that verifies its certificate, None without TLS; `cert` and `key` those of
    this client, None where it needs none."""

    address: str
    run: Path | None = None
    ca: bytes | None = None
    token: SecretStr | None = None
    cert: bytes | None = None
    key: bytes | None = None


class ControlClient:
    """Call one: `with ControlClient(ControlTarget("127.0.0.1:41233")) as c: c.scale("generator",
    2)`. Every method raises ControlError for a run that cannot be reached, does not answer in time,
    or refuses."""

    def __init__(self, target: ControlTarget, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._target = target
        options: list[tuple[str, Any]] = [
            ("grpc.min_reconnect_backoff_ms", round(connect_seconds * 1000)),  # one attempt
            ("grpc.enable_http_proxy", int(not is_loopback(target.address))),
            # Without keepalive a stream of events never notices a lost server.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        if target.ca is None:
            self._channel = grpc.insecure_channel(target.address, options)
        else:
            credentials = grpc.ssl_channel_credentials(target.ca, target.key, target.cert)
            self._channel = grpc.secure_channel(target.address, credentials, options)
        self._stub = ControlStub(self._channel)
        self._metadata: list[tuple[str, str]] = []
        if target.run is not None:
            self._metadata.append((RUN_KEY, target.run.name))
        token = target.token
        if token is None and target.run is not None:
            token = drawn_token(target.run)
        if token is not None:
            self._metadata.append(("authorization", f"Bearer {token.get_secret_value()}"))

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def status(self) -> tuple[str, RunStatus]:
        """Return the run's id and its status."""
        answer = self._call(self._stub.Status, pb.StatusRequest())
        return answer.run, run_status(answer.status)

    def scale(self, role: str, replicas: int) -> PoolStatus:
        """Set a pool's target; returns its status. Raises DataError for what is no number of
        replicas; the run itself refuses those beyond its bound."""
        if type(replicas) is not int or not 1 <= replicas <= MOST:
            raise DataError(
                "replicas must be a whole number, >= 1 and <= control.max_replicas of the run "
                f"(never above {MOST}); give such a number"
            )
        answer = self._call(self._stub.Scale, pb.ScaleRequest(role=role, replicas=replicas))
        return pool_status(answer.pool)

    def pause(self) -> None:
        self._call(self._stub.Pause, pb.PauseRequest())

    def resume(self) -> None:
        self._call(self._stub.Resume, pb.ResumeRequest())

    def checkpoint(self) -> str:
        """Write a checkpoint after the step in progress; returns its name once it is on disk."""
        request = pb.CheckpointRequest()
        name: str = self._call(self._stub.Checkpoint, request, CHECKPOINT_SECONDS).name
        return name

    def stop(self) -> None:
        self._call(self._stub.Stop, pb.StopRequest())

    def events(self, replay: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of events.jsonl: the last `replay`, then each new one, until the run ends.
        There is no deadline; a lost server is noticed within half a minute."""
        call = self._stub.Events(pb.EventsRequest(replay=replay), metadata=self._metadata)
        try:
            for answer in call:
                time = utc_text(answer.time.ToDatetime(UTC))
                yield {"time": time, "event": answer.event, **json.loads(answer.fields_json)}
        except grpc.RpcError as error:
            raise self._failure(error) from None
        finally:
            call.cancel()

    def _call(
        self, method: Callable[..., Any], request: object, seconds: float = CALL_SECONDS
    ) -> Any:
        try:
            return method(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failure(error) from None

    def _failure(self, error: Any) -> ControlError:
        code, details = error.code(), error.details() or ""
        address, run = self._target.address, self._target.run
        if code is grpc.StatusCode.UNAVAILABLE:
            if run is not None and "refused" in details:
                return not_running(run, f"nothing listens on {address}")
            return ControlError(
                f"cannot reach a control plane at {address}: {_reason(details)}; check the "
                "address, and --ca, --cert and --key for a run that uses TLS"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ControlError(
                f"what answers at {address} does not know this call; use the forge of its version"
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ControlError(
                f"the run at {address} did not answer in time; ask again, or look at its log"
            )
        return ControlError(details or f"the run at {address} answered {code.name}")


def _reason(details: str) -> str:
    """Return the root cause, at the end of gRPC's chain of causes."""
    return details.rsplit("last error: ", 1)[-1].strip()
