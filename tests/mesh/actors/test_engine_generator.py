"""An engine in its actor, embedded and vLLM's: streams, early ends, cancelling, files. Each against
the embedded backend's whole batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Channel
from safetensors.torch import save_file
from vllm_replica import NO_END, Replica, over, prompts, require_vllm, tiny_model
from vllm_replica import replica as started

from cartridge_forge.actors.base import missing_vllm
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import text_of
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import TokenChunk, TokenPort
from cartridge_forge.protocols.step import Completion, GenerateRequest, StopCondition
from cartridge_forge.services.pool.pool import ask

BACKENDS = [
    pytest.param("torch"),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)]),
]


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    if request.param == "vllm" and missing_vllm():
        require_vllm()
    model = tiny_model("llama", tmp_path_factory.mktemp("llama"))
    with started(model, backend=request.param) as one:
        one.publish(model.cartridges(1, 2, 50))
        yield one


def streamed(engine: Replica, *requests: GenerateRequest) -> tuple[list[TokenChunk], Any]:
    async def both() -> tuple[list[TokenChunk], Any]:
        port, receiver = Channel.open()
        given = (requests, TokenPort("test", port))
        call = asyncio.ensure_future(ask(engine.member, "generate", given, time.monotonic() + 60))
        came: list[TokenChunk] = []

        async def hear() -> None:
            while True:
                came.extend(await receiver.recv())

        hearing = asyncio.ensure_future(hear())
        done = (await asyncio.wait_for(call, 60)).completions
        async with asyncio.timeout(60):
            while {c.request_id for c in came} != {r.id for r in requests}:  # noqa: ASYNC110  a port tells nobody
                await asyncio.sleep(0.01)
        hearing.cancel()
        return came, done

    return asyncio.run(both())


def same(one: Completion, other: Completion) -> None:
    assert (one.token_ids, one.finish_reason, one.ended_by) == (
        other.token_ids, other.finish_reason, other.ended_by,
    )  # fmt: skip
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def asked(count: int, **sampling: Any) -> list[GenerateRequest]:
    drawn = prompts(count, lambda i: 3 + 5 * i, seed=count)
    return [
        replace(over("cartridge/" + "ab"[i % 2], 0, p, 12, **sampling), id=f"{count}/{i}")
        for i, p in enumerate(drawn)
    ]


def test_streams_add_up_to_what_a_batch_says(engine: Replica) -> None:
    requests = [replace(r, top_logprobs=3) for r in asked(6, temperature=1.0)]
    came, done = streamed(engine, *requests)
    for r, c, e in zip(requests, done, engine.embedded(*requests), strict=True):
        same(c, e)
        mine = [piece for piece in came if piece.request_id == r.id]
        assert [p.first for p in mine] == [
            sum(len(q.token_ids) for q in mine[:i]) for i in range(len(mine))
        ]
        told = tuple(t for p in mine for t in p.token_ids)
        assert 0 < len(told) < len(c.token_ids)  # the completion alone has the last
        assert told == c.token_ids[: len(told)]
        assert tuple(t for p in mine for t in p.logprobs) == c.logprobs[: len(told)]
        assert tuple(t for p in mine for t in p.top_logprobs) == c.top_logprobs[: len(told)]
        for ours, theirs in zip(c.top_logprobs, e.top_logprobs, strict=True):
            assert [t for t, _ in ours] == [t for t, _ in theirs]
            assert [lp for _, lp in ours] == pytest.approx([lp for _, lp in theirs], abs=1e-3)


def test_log_probabilities_that_nobody_asks_for_are_left_out(engine: Replica) -> None:
    plain = asked(6, temperature=1.0)
    confident = StopCondition(window=3, floor=1e9, top=5)  # reads them: they stay
    wanted = [*plain, replace(plain[0], id="confident", until=confident)]
    wanted += [replace(plain[1], id="top", top_logprobs=2)]
    silent = [replace(r, logprobs=False) for r in wanted]
    for c, e in zip(engine.generate(*silent), engine.embedded(*wanted), strict=True):
        assert (c.token_ids, c.finish_reason) == (e.token_ids, e.finish_reason)
        kept = e.logprobs if c.request_id in {"confident", "top"} else ()
        assert c.logprobs == pytest.approx(kept, abs=1e-3)
    came, done = streamed(engine, *silent[:6])
    assert {chunk.logprobs for chunk in came} == {()}
    assert [c.logprobs for c in done] == [()] * 6


def test_responses_end_by_text_and_by_confidence(engine: Replica) -> None:
    text = text_of(engine.model.path)
    free = engine.embedded(*asked(6, temperature=1.0))
    words = [text(c.token_ids[4:5]).strip() for c in free]
    untils = [
        StopCondition(strings=(words[0],)),
        StopCondition(patterns=(rf"\b{words[1]}\b",), after=3),
        StopCondition(strings=(words[2],), before=True),
        StopCondition(window=3, floor=1e9, top=5),
        StopCondition(window=3, floor=-1e9),
        StopCondition(strings=("never said",)),
    ]
    requests = [replace(r, until=u) for r, u in zip(asked(6, temperature=1.0), untils, strict=True)]
    done = engine.generate(*requests)
    for c, e, whole in zip(done, engine.embedded(*requests), free, strict=True):
        same(c, e)
        assert c.token_ids == whole.token_ids[: len(c.token_ids)]
    assert [c.finish_reason for c in done] == ["until"] * 4 + ["length"] * 2
    assert len(done[0].token_ids) <= 5
    assert (done[3].ended_by, len(done[3].token_ids)) == ("confidence", 3)


def test_a_response_in_two_requests_is_the_one(engine: Replica) -> None:
    (r, *_) = asked(3, temperature=1.0)
    (whole,) = engine.generate(r)
    rest = replace(
        r, prompt_ids=(*r.prompt_ids, *whole.token_ids[:5]), first_draw=5,
        sampling=replace(r.sampling, max_tokens=7),
    )  # fmt: skip
    assert engine.generate(rest)[0].token_ids == whole.token_ids[5:]


def test_cancelling_stops_decoding_of_those_alone(engine: Replica) -> None:
    long = replace(asked(1)[0], id="long")
    long = replace(long, sampling=replace(long.sampling, max_tokens=700))
    running = engine.start("generate", (long,))
    (other,) = engine.generate(asked(2)[0])
    engine.call("cancel", ["long"])
    (c,) = running.get(timeout=60).completions
    assert c.finish_reason == "cancelled"
    assert len(c.token_ids) < 700
    assert other.finish_reason == "length"


def test_a_cartridge_of_a_file_is_served_until_it_is_dropped(
    engine: Replica, tmp_path: Path
) -> None:
    kv = engine.model.cartridges(9, 1, 40)
    save_file({"kv": kv[0].contiguous()}, tmp_path / "c.safetensors")
    assert engine.call("load_file", 7, "c", str(tmp_path / "c.safetensors")) == 7
    r = over("cartridge/c", 7, (5, 6, 7))
    (c,) = engine.generate(r)
    (e,) = generate(engine.model.ours, [r], lambda ref: kv[0], NO_END)
    same(c, e)
    engine.call("drop", 7)
    (refused,) = engine.generate(r)
    assert (refused.finish_reason, "not held" in refused.error) == ("error", True)
    save_file({"kv": kv[0, :1].contiguous()}, tmp_path / "short.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    for name in ("short", "broken", "missing"):
        with pytest.raises(PublishError):
            engine.call("load_file", 8, name, str(tmp_path / f"{name}.safetensors"))
    assert engine.generate(asked(2)[0])[0].finish_reason == "length"


def test_a_bad_pattern_is_the_caller_s_mistake_and_no_crash(engine: Replica) -> None:
    bad = replace(asked(1)[0], until=StopCondition(patterns=("(",)))
    with pytest.raises(DataError, match="no regular expression"):
        engine.generate(bad)
    assert engine.generate(asked(2)[0])[0].finish_reason == "length"
