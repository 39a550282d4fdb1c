"""The engine's thread, over a fake engine whose steps the test lets through one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeId
from cartridge_forge.plugins.decoding.engine_thread import EngineDied, EngineThread
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling

KV = torch.zeros(1, 2, 1, 1, 1)
SOON = 60.0
MOMENT = 0.05


class Fake:
    """An engine whose requests take `sampling.max_tokens` steps. Notes every call in order."""

    first_token_seconds: float | None = None

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.left: dict[str, tuple[GenerateRequest, int]] = {}
        self.turns = threading.Semaphore(0)
        self.thread = threading.current_thread()
        self.closing_fails = False
        self.streams: set[str] = set()
        self.prefixes: dict[str, PrefixRef] = {}

    def _note(self, *event: Any) -> None:
        assert threading.current_thread() is self.thread, "another thread touched the engine"
        self.events.append(event)

    def add(
        self, key: str, request: GenerateRequest, prefix: PrefixRef, stream: bool = False
    ) -> None:
        self._note("add", request.id)
        self.prefixes[request.id] = prefix
        if not request.prompt_ids:
            raise DataError("an empty prompt")
        self.left[key] = (request, request.sampling.max_tokens)
        if stream:
            self.streams.add(key)

    def cancel(self, key: str) -> None:
        self._note("cancel", self.left[key][0].id)
        self.left[key] = (self.left[key][0], 0)

    def step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        assert self.turns.acquire(timeout=SOON), "the test let no step through"
        self._note("step", *sorted(r.id for r, _ in self.left.values()))
        for key, (request, left) in list(self.left.items()):
            if request.id == "poison":
                raise MemoryError("no block left")
            if key in self.streams and left:
                yield key, TokenChunk(request.id, request.sampling.max_tokens - left, (5,), (0.0,))
            if left > 1:
                self.left[key] = (request, left - 1)
            else:
                del self.left[key]
                reason = "stop" if left else "cancelled"
                yield key, Completion(request.id, (5,), (0.0,), (request.prefix.version,), reason)

    def hold(self, cartridges: Mapping[CartridgeId, Tensor]) -> None:
        self._note("hold", *cartridges)
        if any(len(kv) != 1 for kv in cartridges.values()):
            raise PublishError("another model's layers")

    def let_go(self, cartridges: Sequence[CartridgeId]) -> None:
        self._note("let go", *cartridges)

    def loads(self) -> tuple[int, int]:
        return 3, 84

    def close(self) -> None:
        self._note("close")


Start = Callable[..., tuple[EngineThread, Fake]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an engine in its thread; every thread has ended when the test has."""
    before = set(threading.enumerate())
    started: list[tuple[EngineThread, Fake]] = []

    def begin(in_flight: Literal["finish", "drain"] = "finish", keep: int = 2) -> Any:
        made: Future[Fake] = Future()

        def build() -> Fake:
            fake = Fake()
            made.set_result(fake)
            return fake

        thread = EngineThread(build, keep, in_flight)
        thread.started.result(SOON)
        started.append((thread, made.result()))
        return started[-1]

    yield begin
    for thread, fake in started:
        thread.close()
        fake.turns.release(1000)
        fake.thread.join(SOON)
    assert set(threading.enumerate()) == before


def hold(thread: EngineThread, version: int, kv: Tensor) -> Future[int]:
    """A version whose one cartridge is new."""
    return thread.hold(version, {"p": version}, {"p": kv})


def request(name: str, version: int, steps: int = 1) -> GenerateRequest:
    prefix = PrefixRef("cartridge/p", version) if version >= 0 else PrefixRef("document/d", 0)
    return GenerateRequest(name, (4,), prefix, Sampling(max_tokens=steps), 0)


def test_requests_end_in_their_own_time_on_the_version_they_named(start: Start) -> None:
    thread, fake = start()
    assert hold(thread, 0, KV).result(SOON) == 0
    long, short = thread.submit(request("long", 0, 3)), thread.submit(request("short", -1))
    fake.turns.release(3)
    assert short.result(SOON).versions == (0,)
    assert long.result(SOON).request_id == "long"
    assert fake.events[0] == ("hold", ("p", 0))
    assert fake.events[-3:] != [("step",)] * 3, "an idle engine is not stepped"
    assert [e[0] for e in fake.events].count("step") == 3


def test_finish_loads_beside_requests_in_flight(start: Start) -> None:
    thread, fake = start("finish", keep=1)
    hold(thread, 0, KV).result(SOON)
    old = thread.submit(request("old", 0, 3))
    fake.turns.release(1)
    published = hold(thread, 1, KV)
    fake.turns.release(1)
    assert published.result(SOON) == 1, "it did not wait for the request in flight"
    late = thread.submit(request("late", 0))
    new = thread.submit(request("new", 1))
    assert not old.done()
    fake.turns.release(2)
    assert old.result(SOON).versions == (0,)
    assert new.result(SOON).versions == (1,)
    # Evicted by then, and kept only for the request that had begun.
    assert late.result(SOON).error.startswith("cartridge p version 0 is not held here (held: [1])")
    thread.report().result(SOON)
    assert fake.events.count(("let go", ("p", 0))) == 1
    last_old_step = max(i for i, e in enumerate(fake.events) if e[0] == "step" and "old" in e)
    assert fake.events.index(("let go", ("p", 0))) > last_old_step


def test_drain_waits_for_requests_in_flight_and_later_ones_wait_for_it(start: Start) -> None:
    thread, fake = start("drain", keep=1)
    hold(thread, 0, KV).result(SOON)
    old = thread.submit(request("old", 0, 2))
    fake.turns.release(1)
    published = hold(thread, 1, KV)
    new = thread.submit(request("new", 1))
    with pytest.raises(NotYet):
        published.result(MOMENT)
    fake.turns.release(2)
    assert old.result(SOON).versions == (0,)
    assert new.result(SOON).versions == (1,)
    order = [e for e in fake.events if e[0] != "step"]
    assert order == [
        ("hold", ("p", 0)), ("add", "old"), ("hold", ("p", 1)), ("let go", ("p", 0)),
        ("add", "new"),
    ]  # fmt: skip
    assert ("step", "new", "old") not in fake.events


def test_a_version_id_is_refused_before_the_engine_sees_its_tensors(start: Start) -> None:
    thread, fake = start()
    hold(thread, 3, KV).result(SOON)
    for again in (3, 2):
        with pytest.raises(PublishError, match=f"version {again} was offered after version 3"):
            hold(thread, again, KV).result(SOON)
    assert fake.events == [("hold", ("p", 3))]


def test_tensors_that_the_engine_refuses_leave_no_version(start: Start) -> None:
    thread, _ = start()
    with pytest.raises(PublishError, match="another model's layers"):
        hold(thread, 0, KV.expand(2, 2, 1, 1, 1)).result(SOON)
    assert "is not held here (held: [])" in thread.submit(request("x", 0)).result(SOON).error
    assert hold(thread, 0, KV).result(SOON) == 0


def test_a_malformed_request_fails_alone(start: Start) -> None:
    thread, fake = start()
    hold(thread, 0, KV).result(SOON)
    good = thread.submit(request("good", 0, steps=2))
    bad = thread.submit(GenerateRequest("bad", (), PrefixRef("cartridge/p", 0), Sampling(), 0))
    fake.turns.release(1)  # the engine may have begun a step before `bad` came
    with pytest.raises(DataError, match="an empty prompt"):
        bad.result(SOON)
    fake.turns.release(1)
    assert good.result(SOON).finish_reason == "stop"
    # Nor is its version held on to: keep is 2, and the third publish lets go of version 0.
    for version in (1, 2):
        hold(thread, version, KV).result(SOON)
    assert fake.events[-1] == ("let go", ("p", 0))


def test_a_crash_reaches_everybody_who_waits_and_who_comes_later(start: Start) -> None:
    thread, fake = start("drain")
    hold(thread, 0, KV).result(SOON)
    waiting = [thread.submit(request("other", 0, 9)), thread.submit(request("poison", 0))]
    waiting.append(hold(thread, 1, KV))
    waiting.append(thread.submit(request("behind it", 1)))
    fake.turns.release(2)  # the first step may have begun before `poison` came
    for future in waiting:
        with pytest.raises(EngineDied, match="MemoryError: no block left"):
            future.result(SOON)
    for call in (
        lambda: thread.submit(request("later", 0)), lambda: hold(thread, 2, KV),
        thread.report, thread.close,
    ):  # fmt: skip
        with pytest.raises(EngineDied):
            call().result(SOON)
    fake.thread.join(SOON)
    assert fake.events[-1] == ("close",)


def test_an_engine_that_does_not_start_says_why(start: Start) -> None:
    def build() -> Fake:
        raise OSError("no model here")

    thread = EngineThread(build, 2, "finish")
    with pytest.raises(OSError, match="no model here"):
        thread.started.result(SOON)
    with pytest.raises(EngineDied, match="OSError: no model here"):
        thread.submit(request("x", 0)).result(SOON)
    with pytest.raises(EngineDied):
        thread.close().result(SOON)


def test_closing_fails_what_is_in_flight_and_reports(start: Start) -> None:
    thread, fake = start()
    hold(thread, 0, KV).result(SOON)
    running = thread.submit(request("running", 0, 9))
    fake.turns.release(1)
    closing = thread.close()
    fake.turns.release(1)
    report = closing.result(SOON)
    assert (report.loads, report.loaded_tokens, report.first_token_seconds) == (3, 84, None)
    assert report.stop_seconds is not None
    assert report.stop_seconds >= 0
    with pytest.raises(EngineDied, match="it was shut down"):
        running.result(SOON)
    assert thread.close() is closing
    assert fake.events[-1] == ("close",)


def test_nobody_can_cancel_the_engine_s_work(start: Start) -> None:
    """A caller that times out cancels its future; the engine must not stumble over that."""
    thread, fake = start()
    hold(thread, 0, KV).result(SOON)
    given_up = thread.submit(request("given up", 0))
    assert given_up.cancel() is False
    fake.turns.release(1)
    assert given_up.result(SOON).request_id == "given up"


def test_a_stream_is_told_step_by_step_and_its_last_tokens_by_its_completion(start: Start) -> None:
    thread, fake = start()
    came: list[Sequence[TokenChunk] | Completion] = []
    future = thread.submit(request("s", -1, steps=3), came.append)
    plain = thread.submit(request("p", -1, steps=3))
    future.add_done_callback(lambda done: came.append(done.result()))
    fake.turns.release(4)  # `s` may have been stepped once before `p` came
    plain.result(SOON)
    *told, completion = came
    assert [[c.first for c in step] for step in told if not isinstance(step, Completion)] == [
        [0], [1],
    ]  # fmt: skip
    assert isinstance(completion, Completion)


def test_streams_of_one_callback_are_told_together(start: Start) -> None:
    thread, fake = start()
    came: list[list[tuple[str, int]]] = []

    def told(chunks: Sequence[TokenChunk]) -> None:
        came.append([(c.request_id, c.first) for c in chunks])

    futures = [thread.submit(request(name, -1, steps=4), told) for name in "ab"]
    fake.turns.release(9)
    for future in futures:
        future.result(SOON)
    both = [[("a", i), ("b", i)] for i in range(3)]
    after = [[("a", 0)], *([("a", i + 1), ("b", i)] for i in range(2)), [("b", 2)]]
    assert came in (both, after)  # `a` may have been stepped before `b` came


def test_cancelling_ends_those_requests_alone(start: Start) -> None:
    thread, fake = start()
    long, other = thread.submit(request("a", -1, steps=99)), thread.submit(request("b", -1, 2))
    fake.turns.release(1)
    thread.cancel({"a", "never there"}).result(SOON)
    fake.turns.release(3)
    assert long.result(SOON).finish_reason == "cancelled"
    assert other.result(SOON).finish_reason == "stop"
    assert [e for e in fake.events if e[0] == "cancel"] == [("cancel", "a")]


def test_a_dropped_version_is_refused_and_let_go_of_once_nothing_uses_it(start: Start) -> None:
    thread, fake = start()
    hold(thread, 0, KV).result(SOON)
    running = thread.submit(request("a", 0, steps=4))
    dropped = thread.drop(0)
    fake.turns.release(1)
    dropped.result(SOON)
    late = thread.submit(request("b", 0))
    fake.turns.release(1)
    assert late.result(SOON).finish_reason == "error"
    assert ("let go", ("p", 0)) not in fake.events
    fake.turns.release(2)
    assert running.result(SOON).finish_reason == "stop"
    with pytest.raises(PublishError, match="nothing to drop"):
        thread.drop(0).result(SOON)
    assert ("let go", ("p", 0)) in fake.events


def test_every_version_of_a_composition_is_kept_and_must_be_there(start: Start) -> None:
    thread, fake = start()
    for version in (0, 1):
        hold(thread, version, KV).result(SOON)
    ref = PrefixRef("cartridge/p", 1, (PrefixRef("cartridge/p", 0),))
    running = thread.submit(GenerateRequest("a", (4,), ref, Sampling(max_tokens=2), 0))
    dropped = [thread.drop(version) for version in (0, 1)]
    late = thread.submit(GenerateRequest("b", (4,), ref, Sampling(), 0))
    fake.turns.release(1)
    for future in dropped:
        future.result(SOON)
    assert late.result(SOON).finish_reason == "error"
    assert not [e for e in fake.events if e[0] == "let go"]
    fake.turns.release(1)
    assert running.result(SOON).finish_reason == "stop"
    thread.report().result(SOON)
    assert fake.events[-1] == ("let go", ("p", 1), ("p", 0))


def test_versions_share_what_did_not_change(start: Start) -> None:
    """p changes with every version, q with version 0 alone: it is loaded once, and requests of
    versions 0 and 2 read the same q. It is let go of with the last version that has it."""
    thread, fake = start(keep=2)
    thread.hold(0, {"p": 0, "q": 0}, {"p": KV, "q": KV}).result(SOON)
    assert thread.missing({"p": 1, "q": 0}).result(SOON) == {"p"}
    for version in (1, 2):
        thread.hold(version, {"p": version, "q": 0}, {"p": KV}).result(SOON)
    ref = PrefixRef("cartridge/q", 2, (PrefixRef("cartridge/p", 1), PrefixRef("document/d", 0)))
    asked = thread.submit(GenerateRequest("both", (4,), ref, Sampling(max_tokens=1), 0))
    fake.turns.release(1)
    assert asked.result(SOON).versions == (2,), "the label is the version that was asked for"
    held = (PrefixRef("cartridge/p", 1), PrefixRef("document/d", 0))
    assert fake.prefixes["both"] == PrefixRef("cartridge/q", 0, held)
    thread.hold(3, {"p": 2, "q": 3}, {"q": KV}).result(SOON)
    thread.hold(4, {"p": 2, "q": 3}, {}).result(SOON)
    assert [e for e in fake.events if e[0] in ("hold", "let go")] == [
        ("hold", ("p", 0), ("q", 0)),
        ("hold", ("p", 1)),
        ("hold", ("p", 2)),
        ("let go", ("p", 0)),
        ("hold", ("q", 3)),
        ("let go", ("p", 1)),
        ("let go", ("q", 0)),
    ]


@pytest.mark.parametrize(
    ("since", "new", "message"),
    [
        ({"p": 1, "q": 0}, {}, r"are not held here \(p since 1\)"),
        ({"p": 0, "q": 0}, {"q": KV}, r"are not held here \(q since 0\)"),
    ],
)
def test_a_version_comes_with_what_is_missing_and_nothing_else(
    start: Start, since: dict[str, int], new: dict[str, Tensor], message: str
) -> None:
    """Else a version would have a hole, or numbers that requests read would be replaced."""
    thread, fake = start()
    thread.hold(0, {"p": 0, "q": 0}, {"p": KV, "q": KV}).result(SOON)
    with pytest.raises(PublishError, match=message):
        thread.hold(1, since, new).result(SOON)
    assert fake.events == [("hold", ("p", 0), ("q", 0))]
