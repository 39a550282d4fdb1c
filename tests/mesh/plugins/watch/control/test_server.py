"""The control plane over real connections: answers, refusals, TLS and tokens, streams, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from fake_run_control import HISTORY, POOL, STATUS, FakeSteering, Served, served
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cartridge_forge.plugins.watch.control import server
from cartridge_forge.plugins.watch.control.server import ControlPlane
from cartridge_forge.protocols.errors import (
    CheckpointError,
    DataError,
    ForgeError,
    PlaneError,
    PublishError,
    RunError,
    SpecError,
    StaleTokenError,
)
from cartridge_forge.protocols.spec.services import ControlSpec
from cartridge_forge.protocols.wire import control_pb2 as pb
from cartridge_forge.protocols.wire.control_messages import CONTROL, pool_status, run_status
from cartridge_forge.protocols.wire.control_pb2_grpc import ControlStub

TOKEN = "s3cret-token"
BEARER = (("authorization", f"Bearer {TOKEN}"),)
SECONDS = 60.0  # of every call
LONG = 6000.0  # longer than any test may take


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def guarded(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlSpec:
    """TLS for localhost, and a token in the environment."""
    pair = authority.issue_cert("localhost")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    monkeypatch.setenv("CONTROL_TOKEN", TOKEN)
    return ControlSpec(
        listen="localhost:0",
        token_env="CONTROL_TOKEN",
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )


@pytest.fixture
def run() -> Iterator[Served]:
    with served() as here:
        yield here


@contextlib.contextmanager
def connected(address: str, authority: trustme.CA | None = None) -> Iterator[grpc.Channel]:
    if authority is None:
        channel = grpc.insecure_channel(address)
    else:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        channel = grpc.secure_channel(address, credentials)
    with channel:
        yield channel


def refused(
    call: Callable[..., Any], *arguments: object, **options: object
) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with, and its details; a stream is read to its end."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call(*arguments, timeout=SECONDS, **options))
    return caught.value.code(), caught.value.details()


def test_every_question_reaches_the_run_and_its_answer_comes_back(run: Served) -> None:
    with connected(run.address) as channel:
        stub = ControlStub(channel)
        looked = stub.Status(pb.StatusRequest(), timeout=SECONDS)
        assert (looked.run, run_status(looked.status)) == ("r1", STATUS)
        scaled = stub.Scale(pb.ScaleRequest(role="generator", replicas=8), timeout=SECONDS)
        assert pool_status(scaled.pool).target == 8
        assert pool_status(scaled.pool).replicas == POOL.replicas
        stub.Pause(pb.PauseRequest(), timeout=SECONDS)
        assert stub.Status(pb.StatusRequest(), timeout=SECONDS).status.paused
        stub.Resume(pb.ResumeRequest(), timeout=SECONDS)
        written = stub.Checkpoint(pb.CheckpointRequest(), timeout=SECONDS)
        assert written.name == "step-000012"
        stub.Stop(pb.StopRequest(), timeout=SECONDS)
    assert run.steering.asked == [
        ("status",), ("scale", "generator", 8), ("pause",), ("status",), ("resume",),
        ("checkpoint",), ("stop",),
    ]  # fmt: skip


REFUSALS = [
    (SpecError("no role x; pick another"), grpc.StatusCode.INVALID_ARGUMENT),
    (DataError("no such document"), grpc.StatusCode.INVALID_ARGUMENT),
    (CheckpointError("nothing to write yet"), grpc.StatusCode.FAILED_PRECONDITION),
    (RunError("the run has ended"), grpc.StatusCode.FAILED_PRECONDITION),
    (PlaneError("the plane is gone"), grpc.StatusCode.FAILED_PRECONDITION),
    (PublishError("version 3 twice"), grpc.StatusCode.FAILED_PRECONDITION),
    (StaleTokenError("a token is old"), grpc.StatusCode.FAILED_PRECONDITION),
]


@pytest.mark.parametrize(
    ("failure", "code"), REFUSALS, ids=[type(failure).__name__ for failure, _ in REFUSALS]
)
def test_a_refusal_comes_with_its_words(
    run: Served, failure: ForgeError, code: grpc.StatusCode
) -> None:
    run.steering.failure = failure
    with connected(run.address) as channel:
        stub = ControlStub(channel)
        assert refused(stub.Pause, pb.PauseRequest()) == (code, str(failure))
        assert refused(stub.Events, pb.EventsRequest(replay=1)) == (code, str(failure))


def test_our_own_bugs_are_logged_and_not_told(
    run: Served, caplog: pytest.LogCaptureFixture
) -> None:
    run.steering.failure = KeyError("/home/someone/secret")
    told = (grpc.StatusCode.INTERNAL, "the run could not answer; the controller's log says why")
    with caplog.at_level(logging.ERROR), connected(run.address) as channel:
        stub = ControlStub(channel)
        assert refused(stub.Stop, pb.StopRequest()) == told
        assert refused(stub.Events, pb.EventsRequest()) == told
    assert [record.name for record in caplog.records] == [
        "cartridge_forge.plugins.watch.control.server"
    ] * 2
    assert "/home/someone/secret" in caplog.text


def test_a_run_that_does_not_answer_is_given_up(
    run: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHECKPOINT_SECONDS", 0.05)
    run.do(run.steering.release.clear)
    with connected(run.address) as channel:
        assert refused(ControlStub(channel).Checkpoint, pb.CheckpointRequest()) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the run did not answer in time; ask again",
        )


def test_a_call_that_means_another_run_is_refused(run: Served) -> None:
    with connected(run.address) as channel:
        stub = ControlStub(channel)
        stub.Stop(pb.StopRequest(), timeout=SECONDS, metadata=(("forge-run", "r1"),))
        told = (
            grpc.StatusCode.FAILED_PRECONDITION,
            "this is run r1, not 'r2', which is not running here; name the run that you mean",
        )
        other = (("forge-run", "r2"),)
        assert refused(stub.Stop, pb.StopRequest(), metadata=other) == told
        assert refused(stub.Events, pb.EventsRequest(replay=1), metadata=other) == told
    assert run.steering.asked == [("stop",)]


def test_events_are_the_last_ones_and_then_those_that_come(run: Served) -> None:
    with connected(run.address) as channel:
        stream = ControlStub(channel).Events(pb.EventsRequest(replay=2), timeout=SECONDS)
        first = [next(stream), next(stream)]
        assert [json.loads(event.fields_json) for event in first] == [
            {"arm": "on_policy", "step": 2},
            {"arm": "on_policy", "step": 3},
        ]
        assert [event.time.ToJsonString() for event in first] == [
            "2026-07-26T10:15:42Z",
            "2026-07-26T10:15:43Z",
        ]
        run.do(run.steering.tell, {**HISTORY[0], "note": "ärger", "pid": 2**53 + 1})
        later = next(stream)
        assert later.event == "step"
        assert json.loads(later.fields_json)["note"] == "ärger"
        assert '"pid": 9007199254740993' in later.fields_json  # a Struct would say ...992
        run.do(run.steering.tell, None)
        assert list(stream) == []
        assert stream.code() is grpc.StatusCode.OK


def test_a_stream_that_its_reader_leaves_is_closed(run: Served) -> None:
    with connected(run.address) as channel:
        stub = ControlStub(channel)
        streams = [stub.Events(pb.EventsRequest(replay=1), timeout=SECONDS) for _ in range(3)]
        for stream in streams:
            next(stream)
        assert run.steering.streams == 3
        streams[0].cancel()
        streams[1].cancel()
        assert soon(lambda: run.steering.streams == 1)
    # The connection is gone, and with it the third.
    assert soon(lambda: run.steering.streams == 0)


def test_a_stream_that_breaks_is_closed_before_its_reader_is_told(
    run: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(run.address) as channel:
        stream = ControlStub(channel).Events(pb.EventsRequest(replay=1), timeout=SECONDS)
        next(stream)
        run.do(run.steering.tell, {"event": "step"})  # without its time
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert run.steering.streams == 0


def test_stop_ends_open_streams_at_once_and_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", LONG)
    with served() as here, connected(here.address) as channel:
        stream = ControlStub(channel).Events(pb.EventsRequest(replay=3), timeout=SECONDS)
        assert [json.loads(next(stream).fields_json)["step"] for _ in range(3)] == [1, 2, 3]
        here.stop()
        assert list(stream) == []
        assert stream.code() is grpc.StatusCode.OK
        assert here.steering.streams == 0


def test_stop_lets_a_call_end_within_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", LONG)

    async def check() -> str:
        steering = FakeSteering()
        steering.release.clear()
        async with (
            ControlPlane(steering, ControlSpec(), "r1") as control,
            grpc.aio.insecure_channel(control.address) as channel,
        ):
            call = ControlStub(channel).Checkpoint(pb.CheckpointRequest(), timeout=SECONDS)
            await steering.waiting.wait()
            stopping = asyncio.create_task(control.stop())
            await asyncio.sleep(0.1)
            steering.release.set()
            name = (await call).name
            await stopping
            return name

    assert asyncio.run(check()) == "step-000012"


def test_stop_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.GRACE_SECONDS == 2.0
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.3)

    async def check() -> grpc.StatusCode:
        steering = FakeSteering()
        steering.release.clear()
        async with (
            ControlPlane(steering, ControlSpec(), "r1") as control,
            grpc.aio.insecure_channel(control.address) as channel,
        ):
            call = ControlStub(channel).Checkpoint(pb.CheckpointRequest(), timeout=LONG)
            await steering.waiting.wait()
            await control.stop()
            return await call.code()

    assert asyncio.run(check()) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


def test_nothing_is_left_after_the_end() -> None:
    async def check() -> str:
        async with ControlPlane(FakeSteering(), ControlSpec(), "r1") as control:
            address = control.address
            async with grpc.aio.insecure_channel(address) as channel:
                stream = ControlStub(channel).Events(pb.EventsRequest(replay=1), timeout=SECONDS)
                await stream.read()
        await control.stop()  # a second time is no error
        async with asyncio.timeout(SECONDS):
            while ours():  # noqa: ASYNC110  # of their end there is no event
                await asyncio.sleep(0.01)
        return address

    def ours() -> list[str]:
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        return [name for name in names if "_Control" in name or "ControlPlane" in name]

    address = asyncio.run(check())
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=SECONDS)


def test_tls_and_token_let_through(guarded: ControlSpec, authority: trustme.CA) -> None:
    with served(guarded) as here, connected(here.address, authority) as channel:
        assert here.address.startswith("localhost:")
        answer = ControlStub(channel).Status(pb.StatusRequest(), timeout=SECONDS, metadata=BEARER)
        assert answer.run == "r1"


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", TOKEN),),
        (("authorization", "Bearer wrong-token"),),
        (("authorization", f"Bearer {TOKEN}x"),),
        (("authorization", f"bearer {TOKEN}"),),
        (("authorization", f"Basic {TOKEN}"),),
    ],
    ids=["none", "bare", "wrong", "longer", "lower case", "other scheme"],
)
def test_every_call_needs_the_token(
    guarded: ControlSpec, authority: trustme.CA, metadata: tuple[tuple[str, str], ...]
) -> None:
    with served(guarded) as here, connected(here.address, authority) as channel:
        stub = ControlStub(channel)
        checks = health_pb2_grpc.HealthStub(channel)
        mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = [
            refused(stub.Stop, pb.StopRequest(), metadata=metadata),
            refused(stub.Events, pb.EventsRequest(replay=1), metadata=metadata),
            refused(checks.Check, health_pb2.HealthCheckRequest(), metadata=metadata),
            refused(checks.Watch, health_pb2.HealthCheckRequest(), metadata=metadata),
            refused(mirror.ServerReflectionInfo, iter(()), metadata=metadata),
        ]
        assert here.steering.asked == []
    assert {code for code, _ in answers} == {grpc.StatusCode.UNAUTHENTICATED}
    assert not any(TOKEN in details for _, details in answers)


def test_a_token_guards_loopback_without_tls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTROL_TOKEN", TOKEN)
    with (
        served(ControlSpec(token_env="CONTROL_TOKEN")) as here,
        connected(here.address) as channel,
    ):
        stub = ControlStub(channel)
        assert refused(stub.Status, pb.StatusRequest())[0] is grpc.StatusCode.UNAUTHENTICATED
        stub.Status(pb.StatusRequest(), timeout=SECONDS, metadata=BEARER)


def test_a_plain_client_and_a_stranger_reach_no_tls_server(
    guarded: ControlSpec, authority: trustme.CA
) -> None:
    with served(guarded) as here:
        for trusted in (None, trustme.CA()):
            with connected(here.address, trusted) as channel:
                code, _ = refused(ControlStub(channel).Stop, pb.StopRequest(), metadata=BEARER)
                assert code is grpc.StatusCode.UNAVAILABLE
        assert here.steering.asked == []


@pytest.mark.parametrize("shows", ["nothing", "of another authority"])
def test_a_client_without_the_authoritys_certificate_is_refused(
    guarded: ControlSpec, authority: trustme.CA, tmp_path: Path, shows: str
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    mutual = guarded.model_copy(update={"tls_ca": str(tmp_path / "ca.pem")})
    trusted = authority.cert_pem.bytes()
    pairs = [maker.issue_cert("client") for maker in (authority, trustme.CA())]
    member, stranger = ((p.private_key_pem.bytes(), p.cert_chain_pems[0].bytes()) for p in pairs)
    shown = (None, None) if shows == "nothing" else stranger
    with served(mutual) as here:
        for pair in (shown, member):
            credentials = grpc.ssl_channel_credentials(trusted, *pair)
            with grpc.secure_channel(here.address, credentials) as channel:
                status = ControlStub(channel).Status
                if pair == member:
                    status(pb.StatusRequest(), timeout=SECONDS, metadata=BEARER)
                else:
                    code, _ = refused(status, pb.StatusRequest(), metadata=BEARER)
                    assert code is grpc.StatusCode.UNAVAILABLE
                    assert here.steering.asked == []


def test_health_says_serving_until_the_end(run: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.2)
    with connected(run.address) as channel:
        checks = health_pb2_grpc.HealthStub(channel)
        for service in ("", CONTROL):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = checks.Check(request, timeout=SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        unknown = health_pb2.HealthCheckRequest(service="other")
        assert refused(checks.Check, unknown)[0] is grpc.StatusCode.NOT_FOUND
        watch = checks.Watch(health_pb2.HealthCheckRequest(service=CONTROL), timeout=SECONDS)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        run.stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_tells_what_control_proto_says(run: Served) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=CONTROL),
    ]
    with connected(run.address) as channel:
        mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, found = mirror.ServerReflectionInfo(iter(requests), timeout=SECONDS)
    assert CONTROL == "cartridge_forge.control.v1.Control"
    assert {service.name for service in listed.list_services_response.service} == {
        CONTROL, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(text)
        for text in found.file_descriptor_response.file_descriptor_proto
    ]
    control = next(file for file in files if file.name.endswith("protocols/wire/control.proto"))
    assert [method.name for method in control.service[0].method] == [
        "Status", "Scale", "Pause", "Resume", "Checkpoint", "Stop", "Events",
    ]  # fmt: skip


def test_more_calls_than_it_serves_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CALLS", 2)
    with served() as here, connected(here.address) as channel:
        stub = ControlStub(channel)
        streams = [stub.Events(pb.EventsRequest(replay=1), timeout=SECONDS) for _ in range(2)]
        for stream in streams:
            next(stream)
        assert refused(stub.Status, pb.StatusRequest())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        streams[0].cancel()
        assert soon(lambda: here.steering.streams == 1)
        assert stub.Status(pb.StatusRequest(), timeout=SECONDS, wait_for_ready=True).run == "r1"


def test_followers_leave_room_for_those_who_steer(run: Served) -> None:
    ended = threading.Event()
    with connected(run.address) as channel:
        stub = ControlStub(channel)
        silent = [channel.stream_stream(f"/{CONTROL}/Events")(hanging(ended)) for _ in range(8)]
        streams = [stub.Events(pb.EventsRequest(replay=1), timeout=SECONDS) for _ in range(64)]
        codes = [answered(stream) for stream in streams]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 64 - server.MOST_WAITING
        assert run.steering.streams <= server.MOST_WAITING
        stub.Stop(pb.StopRequest(), timeout=SECONDS)
        assert stub.Status(pb.StatusRequest(), timeout=SECONDS).run == "r1"
        assert run.steering.asked[-2:] == [("stop",), ("status",)]
        full = refused(stub.Events, pb.EventsRequest(replay=1))
        assert full[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert full[1].startswith("32 calls follow this run, or wait for a checkpoint; end one")
        checks = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert refused(checks.Watch, request)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert checks.Check(request, timeout=SECONDS).status == 1
        ended.set()
        for call in [*silent, *streams]:
            call.cancel()
        assert soon(lambda: run.steering.streams == 0)
        assert next(stub.Events(pb.EventsRequest(replay=1), timeout=SECONDS)).event == "step"


def hanging(ended: threading.Event) -> Iterator[bytes]:
    """The requests of a client that begins a call and sends nothing until then."""
    ended.wait(LONG)
    yield from ()


def answered(stream: Any) -> grpc.StatusCode | None:
    """None for a stream with a first event, else how it was refused."""
    try:
        next(stream)
    except grpc.RpcError as error:
        return error.code()
    return None


@pytest.mark.parametrize("method", ["Stop", "Events"])
def test_a_call_without_its_request_is_given_up(
    run: Served, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(server, "CALL_SECONDS", 0.1)
    with connected(run.address) as channel:
        ended = threading.Event()
        call = channel.stream_stream(f"/{CONTROL}/{method}")(hanging(ended), timeout=SECONDS)
        with pytest.raises(grpc.RpcError, match="the call's request did not come"):
            next(call)
        ended.set()
    assert run.steering.asked == []


def start_refused(spec: ControlSpec) -> str:
    with pytest.raises(SpecError) as caught, served(spec):
        pass
    return str(caught.value)


def test_silent_connections_are_few_and_give_way(run: Served) -> None:
    """Each takes a descriptor of the controller, which writes the run with others."""
    host, _, port = run.address.rpartition(":")
    with contextlib.ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection((host, int(port)), 20))
            for _ in range(2 * server.MOST_CONNECTIONS)
        ]

        def closed() -> int:
            return sum(is_closed(one) for one in silent)

        assert soon(lambda: closed() >= server.MOST_CONNECTIONS), "those beyond the most"
        assert soon(lambda: closed() == len(silent)), "the others, which do not begin to speak"
        with grpc.insecure_channel(run.address) as channel:
            asked = pb.StatusRequest()
            assert ControlStub(channel).Status(asked, timeout=SECONDS, wait_for_ready=True).run


def is_closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while data := one.recv(4096):
            assert data  # the server's own greeting
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_a_port_is_not_shared_with_another_run(run: Served) -> None:
    assert start_refused(ControlSpec(listen=run.address)) == (
        f"control.listen: cannot listen on {run.address}; check that this host has the address, "
        "that nothing else listens there"
    )


def test_certificates_that_cannot_be_used(guarded: ControlSpec, tmp_path: Path) -> None:
    no_key = guarded.model_copy(update={"tls_key": "no/key.pem"})
    assert start_refused(no_key) == (
        "control.tls_key: cannot read no/key.pem: No such file or directory; give a PEM file"
    )
    (tmp_path / "key.pem").write_text("not a key\n")
    assert start_refused(guarded) == (
        "control.listen: cannot listen on localhost:0; check that this host has the address, that "
        f"nothing else listens there, and that {tmp_path}/cert.pem and {tmp_path}/key.pem are a "
        "pair in PEM"
    )


@pytest.mark.parametrize("value", [None, "", "two words", "tab\t", "ümlaut"])
def test_a_token_that_cannot_be_used(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTROL_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("CONTROL_TOKEN", value)
    got = "something with blanks or beyond ASCII" if value else "none"
    assert start_refused(ControlSpec(token_env="CONTROL_TOKEN")) == (
        "control.token_env: the environment variable CONTROL_TOKEN must hold the control plane's "
        f"token, got {got}; export it"
    )


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it holds within a few seconds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
