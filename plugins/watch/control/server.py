"""Serve the gRPC control plane for `forge status`, `forge scale` and any gRPC client of a run.

    client -- control.proto --> ControlPlane -- RunControl (plugins.watch.control.commands) --> run

The server runs on the event loop of its caller. Every call carries a token, health checks and
reflection included: that of `control.token_env`, else one that the run draws. Beyond loopback the
spec demands a client's certificate too.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

# Otherwise gRPC's core prints every failed handshake into the run's display.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import SecretStr

from cartridge_forge.plugins.watch.control.commands import RunControl
from cartridge_forge.plugins.watch.control.endpoints import read_token
from cartridge_forge.protocols.errors import DataError, ForgeError, SpecError
from cartridge_forge.protocols.spec.services import ControlSpec
from cartridge_forge.protocols.wire import control_pb2 as pb
from cartridge_forge.protocols.wire import control_pb2_grpc
from cartridge_forge.protocols.wire.control_messages import (
    CONTROL,
    RUN_KEY,
    pool_message,
    run_message,
)

GRACE_SECONDS = 2.0  # for calls in flight when the run ends
CALL_SECONDS = 10.0  # maximum for a call, even when its client allows more
CHECKPOINT_SECONDS = 600.0  # waits for the step in progress
MOST_CALLS = 64  # at one time; more are refused at once
MOST_WAITING = 32  # of them event streams and other calls that may last: the rest can steer the run
# Calls that last for minutes: they must not keep Stop, Scale and Status out.
WAITING = frozenset({
    f"/{CONTROL}/Events", f"/{CONTROL}/Checkpoint", f"/{health.SERVICE_NAME}/Watch",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
})  # fmt: skip
# Connections that are open, and seconds for one to begin to speak: each takes a descriptor of the
# controller, which could write no more of the run without one.
MOST_CONNECTIONS = 128
HELLO_SECONDS = 5
MESSAGE_BYTES = 64 * 1024  # the longest request

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = grpc.aio.ServicerContext


class ControlPlane:
    """Serve one run's `RunControl`: `async with ControlPlane(control, spec, run_id) as plane:`.

    `address` is where it listens, with the actual port. Raises SpecError on entry for certificates
    or a token that cannot be read, and for an address that it cannot listen on.
    """

    def __init__(
        self, control: RunControl, spec: ControlSpec, run: str, token: SecretStr | None = None
    ) -> None:
        """`token` is asked for where `spec` names none."""
        self._spec = spec
        self._token = token if spec.token_env is None else read_token(spec.token_env)
        self._service = ControlServicer(control, run)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        server = grpc.aio.server(
            interceptors=[TokenInterceptor(self._token), WaitingInterceptor()],
            maximum_concurrent_rpcs=MOST_CALLS,
            options=[
                # A port that another run listens on is refused, not shared with it.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
                ("grpc.server_handshake_timeout_ms", HELLO_SECONDS * 1000),
                # Ends the stream of a client whose host is gone.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # Clients may ping as often.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                # A process that was paused reads the pings of that time at once.
                ("grpc.http2.max_ping_strikes", 30),
            ],
        )
        control_pb2_grpc.add_ControlServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        for name in ("", CONTROL):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.address = self._listen(server)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Stop within GRACE_SECONDS: event streams end at once, calls in flight may finish."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._service.ending.set()
        await self._health.enter_graceful_shutdown()
        await server.stop(GRACE_SECONDS)

    async def __aenter__(self) -> ControlPlane:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _listen(self, server: grpc.aio.Server) -> str:
        listen, cert, key = self._spec.listen, self._spec.tls_cert, self._spec.tls_key
        ca = self._spec.tls_ca
        try:
            if cert is None or key is None:
                port = server.add_insecure_port(listen)
            else:
                pair = (_pem("tls_key", key), _pem("tls_cert", cert))
                authorities = None if ca is None else _pem("tls_ca", ca)
                credentials = grpc.ssl_server_credentials([pair], authorities, ca is not None)
                port = server.add_secure_port(listen, credentials)
        except RuntimeError:
            of_key = "" if cert is None else f", and that {cert} and {key} are a pair in PEM"
            raise SpecError(
                f"control.listen: cannot listen on {listen}; check that this host has the address, "
                f"that nothing else listens there{of_key}"
            ) from None
        return f"{listen.rpartition(':')[0]}:{port}"


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Implement the calls of control.proto; method names follow that file."""

    def __init__(self, control: RunControl, run: str) -> None:
        self._control = control
        self._run = run
        self.ending = asyncio.Event()

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        status = await self._ask(context, self._control.status)
        return pb.StatusResponse(run=self._run, status=run_message(status))

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        pool = await self._ask(context, lambda: self._control.scale(request.role, request.replicas))
        return pb.ScaleResponse(pool=pool_message(pool))

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        await self._ask(context, self._control.pause)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        await self._ask(context, self._control.resume)
        return pb.ResumeResponse()

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: Context
    ) -> pb.CheckpointResponse:
        name = await self._ask(context, self._control.checkpoint, CHECKPOINT_SECONDS)
        return pb.CheckpointResponse(name=name)

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        await self._ask(context, self._control.stop)
        return pb.StopResponse()

    async def Events(self, request: pb.EventsRequest, context: Context) -> None:
        await self._check_run(context)
        sending = asyncio.create_task(self._send(request.replay, context))
        ending = asyncio.create_task(self.ending.wait())
        try:
            await asyncio.wait((sending, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the client disconnects, which cancels this call
            sending.cancel()
            ending.cancel()
            await asyncio.wait((sending, ending), timeout=GRACE_SECONDS)
            ended = sending.done() and not sending.cancelled()
            error = sending.exception() if ended else None
        if error is not None:
            await _refuse(context, error)

    async def _send(self, replay: int, context: Context) -> None:
        events = self._control.events(replay)
        try:
            async for event in events:
                moment = Timestamp()
                moment.FromDatetime(datetime.fromisoformat(event["time"]))
                fields = {key: v for key, v in event.items() if key not in ("time", "event")}
                text = json.dumps(fields, ensure_ascii=False)
                await context.write(
                    pb.EventsResponse(time=moment, event=event["event"], fields_json=text)
                )
        finally:
            # Close a generator here, not whenever it is garbage-collected.
            if (close := getattr(events, "aclose", None)) is not None:
                await close()

    async def _ask(
        self,
        context: Context,
        question: Callable[[], Awaitable[Answer]],
        seconds: float = CALL_SECONDS,
    ) -> Answer:
        """Return the run's reply, or end the call with its refusal as a gRPC status."""
        await self._check_run(context)
        try:
            async with asyncio.timeout(seconds):
                return await question()
        except Exception as error:
            await _refuse(context, error)

    async def _check_run(self, context: Context) -> None:
        """Refuse a call that is meant for another run: a dead run's endpoints.json may name the
        port of this one."""
        run = dict(context.invocation_metadata() or ()).get(RUN_KEY, self._run)
        if run != self._run:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this is run {self._run}, not {str(run)[:200]!r}, which is not running here; "
                "name the run that you mean",
            )


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Pass the calls that carry the token, or every call where there is none."""

    def __init__(self, token: SecretStr | None) -> None:
        self._expected = None if token is None else f"Bearer {token.get_secret_value()}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if self._expected is None or handler is None:
            return handler
        token = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        token = token if isinstance(token, bytes) else token.encode()
        if hmac.compare_digest(token, self._expected):
            return handler
        # A stream is refused before its first request, which a client need not send.
        return grpc.stream_stream_rpc_method_handler(_no_token)


class WaitingInterceptor(grpc.aio.ServerInterceptor):
    """Serve at most MOST_WAITING calls of WAITING at a time and refuse more at once: as many places
    are left for calls that steer the run. Give up a call whose request does not come within
    CALL_SECONDS."""

    def __init__(self) -> None:
        self._waiting = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        waits = handler_call_details.method in WAITING

        # A stream's handler is called before the first request: a call counts from its beginning.
        async def limited(requests: AsyncIterator[Any], context: Context) -> None:
            if not waits:
                return await _answer(handler, requests, context)
            if self._waiting >= MOST_WAITING:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MOST_WAITING} calls follow this run, or wait for a checkpoint; end one of "
                    "them. Status, scale, pause, resume and stop are served all the same",
                )
            self._waiting += 1
            try:
                await _answer(handler, requests, context)
            finally:
                self._waiting -= 1

        return grpc.stream_stream_rpc_method_handler(
            limited, handler.request_deserializer, handler.response_serializer
        )


async def _answer(handler: Any, requests: AsyncIterator[Any], context: Context) -> None:
    """Write the handler's replies to one call."""
    if handler.request_streaming:
        async for reply in handler.stream_stream(requests, context):
            await context.write(reply)
        return
    try:
        async with asyncio.timeout(CALL_SECONDS):
            request = await anext(requests, None)
    except TimeoutError:
        request = None
    if request is None:
        await context.abort(
            grpc.StatusCode.CANCELLED, "the call's request did not come; send it with the call"
        )
    if handler.response_streaming:
        await handler.unary_stream(request, context)
    else:
        await context.write(await handler.unary_unary(request, context))


async def _no_token(request: object, context: Context) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the run's token must come with every call, as the metadata authorization: Bearer TOKEN; "
        "name the environment variable that holds it with --token-env",
    )


async def _refuse(context: Context, error: BaseException) -> NoReturn:
    """End the call with the status for the error. The text of an unexpected error goes to the run's
    log and not to the client."""
    if isinstance(error, SpecError | DataError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, ForgeError):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    if isinstance(error, TimeoutError):
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED, "the run did not answer in time; ask again"
        )
    _log.error("a call of the control plane failed", exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, "the run could not answer; the controller's log says why"
    )


def _pem(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"control.{key}: cannot read {path}: {error.strerror}; give a PEM file"
        ) from None
