"""A replica's life: draining, ending, crashing, dying; and vLLM where it is not installed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from monarch.actor import concurrent_endpoint
from vllm_replica import END, Replica, Tiny, over, over_all, replica, require_vllm, tiny_model

from cartridge_forge.actors.engine_generator import EngineGeneratorActor
from cartridge_forge.learning.decode import generate
from cartridge_forge.services.pool.health import EngineLost, ReplicaLost

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Fragile(EngineGeneratorActor):
    """Its engine's next step can be made to fail, as when memory runs out."""

    @concurrent_endpoint
    async def break_next_step(self) -> None:
        def step() -> None:
            raise MemoryError("no block left")

        self._engine._engine._engine.step = step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def drained(model: Tiny) -> Iterator[Replica]:
    """An engine with `in_flight: drain` and room for little more than one long request; the
    tests below use it up in their order."""
    with replica(model, Fragile, in_flight="drain", kv_gib=0.0012) as r:
        yield r


def test_drain_publishes_when_the_requests_in_flight_have_ended(drained: Replica) -> None:
    old = drained.publish(drained.model.cartridges(1, 2, 64))
    long = over("cartridge/a", old, (5, 6), 200)
    running = drained.start("generate", (long,))
    new = drained.publish(drained.model.cartridges(2, 2, 64))  # comes back once it is loaded
    drained.call("cancel", [long.id])
    (done,) = running.get(timeout=60).completions
    assert done.finish_reason == "length", "it was not waited for"
    assert set(done.versions) == {old}
    (c,) = drained.generate(over("cartridge/a", new, (5, 6), 2))
    assert set(c.versions) == {new}


def test_preempted_requests_load_their_cartridge_again(drained: Replica) -> None:
    """More tokens than the paged memory holds: vLLM drops requests and starts them again."""
    version = drained.publish(drained.model.cartridges(3, 2, 50))  # its tail is loaded by each
    parts = [("cartridge/a", version), ("cartridge/b", version)]
    asked = [over_all(parts[-1 - i % 2 :: -1], (5 + i, 6), 260,
                      temperature=1.0) for i in range(8)]  # fmt: skip
    before = drained.loads()[0]
    done = drained.generate(*asked)
    least = sum(len(r.prefix.parts) for r in asked)
    assert drained.loads()[0] - before > least, "nothing was preempted: give the engine less memory"
    assert [c.token_ids for c in done] == [c.token_ids for c in drained.embedded(*asked)]


def test_a_crash_of_the_engine_is_the_replica_s_failure_and_no_hang(drained: Replica) -> None:
    running = drained.start("generate", (over("cartridge/a", drained.newest, (5, 6), 500),))
    drained.call("break_next_step")
    crash = r"MemoryError: no block left"
    with pytest.raises(Exception, match=crash):
        running.get(timeout=60)
    for method, arguments in (
        ("generate", ((over("cartridge/a", drained.newest, (5, 6)),),)),
        ("report", ()),
        ("shut_down", ()),
    ):
        with pytest.raises(EngineLost, match=crash):
            drained.call(method, *arguments)


def test_a_shutdown_reports_and_a_killed_process_is_seen(model: Tiny) -> None:
    ends = frozenset({END})
    with replica(model, end_ids=ends) as r:
        pid = r.call("ready")
        version = r.publish(model.cartridges(1, 2, 64))
        asked = [over("cartridge/a", version, (i, 6), 60, temperature=1.0) for i in range(3, 9)]
        done = r.generate(*asked)
        for c, e in zip(done, generate(model.ours, asked, r.lookup, ends), strict=True):
            assert (c.token_ids, c.finish_reason) == (e.token_ids, e.finish_reason)
            assert (c.token_ids[-1] == END) == (c.finish_reason == "stop")
        assert {c.finish_reason for c in done} == {"stop", "length"}
        report = r.call("shut_down")
        assert (report.loads, report.loaded_tokens) == (1, 64)
        assert 0 < report.first_token_seconds < report.start_seconds
        assert report.stop_seconds > 0
        with pytest.raises(EngineLost, match="was shut down"):
            r.generate(over("cartridge/a", version, (5, 6)))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReplicaLost):
            r.call("ready")
        assert not Path(f"/proc/{pid}/fd/0").exists()


def test_two_ranks_share_an_engine(model: Tiny) -> None:
    """Tensor parallelism over two processes: each takes its own key/value heads, from a file."""
    with replica(model, tensor_parallel=2) as r:
        version = r.publish(model.cartridges(1, 2, 50))
        asked = [over(f"cartridge/{n}", version, (i, 6, 7)) for n in "ab" for i in range(3, 6)]
        asked.append(over("document/d", 0, (5, 6)))
        parts = [("cartridge/a", version), ("cartridge/b", version)]
        asked += [over_all(order, (5, 6, 7)) for order in (parts, parts[::-1])]
        done = r.generate(*asked)
        for c, e in zip(done, r.embedded(*asked), strict=True):
            assert c.token_ids == e.token_ids
            assert c.logprobs == pytest.approx(e.logprobs, abs=1e-3)
        new = r.publish(model.cartridges(2, 2, 50))
        (c,) = r.generate(over("cartridge/a", new, (5, 6, 7)))
        assert c.token_ids == r.embedded(over("cartridge/a", new, (5, 6, 7)))[0].token_ids
        assert not list(Path("/dev/shm").glob("forge-vllm-*"))
        # Its ranks do not outlive it, however it ends.
        pid = r.call("ready")
        ranks = [p for p in Path("/proc").glob("[0-9]*/stat") if parent(p) == pid]
        assert len(ranks) >= 2
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while any(p.exists() for p in ranks):
            assert time.monotonic() < deadline, "a rank lives on"
            time.sleep(0.1)


def parent(stat: Path) -> int:
    """The parent's process id in /proc/<id>/stat; 0 for a process that is gone."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
