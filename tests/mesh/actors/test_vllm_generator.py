"""Test vLLM's generator in a mesh, and a replica of it that dies."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from monarch.actor import concurrent_endpoint
from vllm_replica import (
    END,
    Replica,
    Tiny,
    over,
    over_all,
    prompts,
    replica,
    require_vllm,
    tiny_model,
)

from cartridge_forge.actors.engine_generator import EngineGeneratorActor
from cartridge_forge.learning.cartridge import fingerprint, shifted
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.teacher import context_ids, document_kv
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.pool.health import EngineLost, ReplicaLost

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ALIGNED, UNALIGNED, LONG = 64, 50, 200  # whole blocks; not; and more than four chunks


class Forgetful(EngineGeneratorActor):
    """Its worker can be made to lose a version that requests may still name."""

    @concurrent_endpoint
    async def forget(self, version: int) -> None:
        from cartridge_forge.plugins.decoding.engine_thread import EngineCall

        done: Future[None] = Future()

        def work(future: Future[None]) -> None:
            lost = [(name, version) for name in "ab"]
            self._engine._engine._engine.collective_rpc("drop_cartridges", args=(lost,))
            future.set_result(None)

        self._engine._post(EngineCall(work, done)).result(60)

    @concurrent_endpoint
    async def exchange(self, version: int, other: int) -> None:
        """Its worker holds the numbers of `other` under `version` from now on."""
        from cartridge_forge.plugins.decoding.engine_thread import EngineCall
        from cartridge_forge.plugins.vllm.connector import _connector

        done: Future[None] = Future()

        def work(future: Future[None]) -> None:
            held = _connector()._held
            for name in "ab":
                held[name, version] = held[name, other]
            future.set_result(None)

        self._engine._post(EngineCall(work, done)).result(60)

    @concurrent_endpoint
    async def pretend(self, path: str) -> str:
        """Take this for the model's directory from now on; the one before."""
        engine = self._engine._engine
        before, engine._path = engine._path, path
        return before


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    model = tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    with replica(model, Forgetful, chunk_tokens=48) as started:
        yield started


def close(actual: tuple[float, ...], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(actual), expected, atol=1e-3, rtol=0, check_dtype=False)


def test_every_kind_of_prefix_in_one_batch(engine: Replica) -> None:
    model = engine.model
    versions = [
        engine.publish(model.cartridges(seed, 2, tokens))
        for seed, tokens in enumerate((ALIGNED, UNALIGNED, LONG))
    ]
    refs = [(f"cartridge/{name}", v) for v in versions for name in "ab"]
    refs += [("document/d", 0), ("document/none", 0)]
    lengths = (1, 7, 40, 130)  # the last two do not fit one chunk beside others, nor at all
    asked = [
        over(name, version, prompt)
        for name, version in refs
        for prompt in prompts(len(lengths), lengths.__getitem__, seed=version)
    ]
    done = engine.generate(*asked)
    embedded = engine.embedded(*asked)
    for r, c, e in zip(asked, done, embedded, strict=True):
        kv = engine.lookup(r.prefix)
        assert list(c.token_ids) == model.greedy(kv, r.prompt_ids, 6) == list(e.token_ids)
        assert c.versions == (r.prefix.version,) * 6
        assert c.finish_reason == "length"
        document = r.prefix.name.startswith("document/")
        assert c.served == (("",) if document else (fingerprint(kv),))
        said = model.logprobs(kv, r.prompt_ids + c.token_ids)[-7:-1]
        close(c.logprobs, said[range(6), list(c.token_ids)])
    # Different prefixes do make different continuations, or this test would see nothing.
    assert len({c.token_ids for c in done[3::4]}) > 5


def test_a_cartridge_of_attention_matching_makes_the_same_tokens(engine: Replica) -> None:
    """Its biases are in its keys: greedy, by vLLM, the embedded engine and plain transformers."""
    model, ids = engine.model, context_ids(engine.model.documents, "d")
    document = document_kv(model.ours, ids)
    made = [attention_matched(model.ours, ids, document, tokens, 1) for tokens in (33, 20)]
    unfolded = shifted(document, 33 - document.shape[3], model.ours.frequencies())
    apart = torch.cdist(made[0][:, 0, :, 1:], unfolded[:, 0]).amin(-1)
    assert apart.max() > 0.1, "keys that no token of the document has"
    version = engine.publish(made)
    asked = [
        over(f"cartridge/{name}", version, prompt, 12)
        for name in "ab"
        for prompt in prompts(4, (1, 7, 40, 130).__getitem__, seed=21)
    ]
    for r, c, e in zip(asked, engine.generate(*asked), engine.embedded(*asked), strict=True):
        kv = engine.lookup(r.prefix)
        assert list(c.token_ids) == list(e.token_ids) == model.greedy(kv, r.prompt_ids, 12)
        assert c.served == (fingerprint(kv),)


def test_what_the_worker_holds_is_fingerprinted_not_what_it_was_told(engine: Replica) -> None:
    """Tensors exchanged in the worker, also below blocks that were filled before."""
    first, second = (engine.publish(engine.model.cartridges(s, 2, ALIGNED)) for s in (71, 72))
    a, b = (fingerprint(engine.published[first][name]) for name in "ab")
    both = over_all([("cartridge/b", first), ("cartridge/a", first)], (5, 6, 7))
    of_b = over("cartridge/b", first, (5, 6, 7))
    assert [c.served for c in engine.generate(both, of_b)] == [(b, a), (b,)]
    engine.call("exchange", first, second)
    (done,) = engine.generate(over("cartridge/b", first, (5, 6, 7, 8)))
    assert done.served == (fingerprint(engine.published[second]["b"]),)
    assert done.versions == (first,) * 6, "the label is still the old one"


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}])
def test_sampled_tokens_are_the_embedded_backend_s(engine: Replica, cut: dict[str, Any]) -> None:
    """The same draws by seed; log-probabilities at temperature 1, before truncation."""
    version = engine.publish(engine.model.cartridges(5, 2, UNALIGNED))
    asked = [
        over("cartridge/" + "ab"[i % 2], version, p, 12,
             **{"temperature": 1.0, **cut})
        for i, p in enumerate(prompts(10, lambda i: 5 + 13 * i, seed=9))
    ]  # fmt: skip
    done = engine.generate(*asked)
    assert [c.token_ids for c in done] == [c.token_ids for c in engine.embedded(*asked)]
    for r, c in zip(asked, done, strict=True):
        said = engine.model.logprobs(engine.lookup(r.prefix), r.prompt_ids + c.token_ids)
        close(c.logprobs, said[-13:-1][range(12), list(c.token_ids)])
    alone = engine.generate(asked[3])
    assert alone == done[3:4], "the same seed, whatever else is in the batch"
    greedy = [over(r.prefix.name, version, r.prompt_ids, 12) for r in asked]
    assert [c.token_ids for c in engine.generate(*greedy)] != [c.token_ids for c in done]


def test_whole_blocks_are_loaded_once_for_all_requests_of_a_version(engine: Replica) -> None:
    asked = prompts(6, lambda i: 20, seed=3)
    version = engine.publish(engine.model.cartridges(6, 2, ALIGNED))
    before = engine.loads()
    engine.generate(*(over("cartridge/a", version, p) for p in asked))
    engine.generate(*(over("cartridge/a", version, p) for p in reversed(asked)))
    after = engine.loads()
    assert (after[0] - before[0], after[1] - before[1]) == (1, ALIGNED)
    engine.generate(over("cartridge/b", version, asked[0]))
    assert engine.loads() == (after[0] + 1, after[1] + ALIGNED)


def test_a_tail_that_shares_its_block_with_the_prompt_is_loaded_by_each(engine: Replica) -> None:
    asked = prompts(6, lambda i: 20, seed=4)
    version = engine.publish(engine.model.cartridges(7, 2, UNALIGNED))
    before = engine.loads()
    engine.generate(*(over("cartridge/a", version, p) for p in asked))
    after = engine.loads()
    tail = UNALIGNED % 32
    assert (after[0] - before[0], after[1] - before[1]) == (6, UNALIGNED + 5 * tail)


def test_a_publish_is_what_the_next_request_sees(engine: Replica) -> None:
    """The same prompt over other tensors: a stale block would give the old answer."""
    (prompt,) = prompts(1, lambda i: 33, seed=5)
    answers = []
    for seed in (10, 11):
        version = engine.publish(engine.model.cartridges(seed, 2, ALIGNED))
        for _ in range(2):  # the second time every whole block is in the prefix cache
            (c,) = engine.generate(over("cartridge/a", version, prompt))
            kv = engine.published[version]["a"]
            assert list(c.token_ids) == engine.model.greedy(kv, prompt, 6)
            assert set(c.versions) == {version}
        answers.append(c.token_ids)
    assert answers[0] != answers[1]
    (old,) = engine.generate(over("cartridge/a", version - 1, prompt))
    assert (old.token_ids, set(old.versions)) == (answers[0], {version - 1})
    for again in (version, version - 1):
        other = engine.snapshot(again, ("a", "b"), engine.model.cartridges(99, 2, ALIGNED))
        with pytest.raises(PublishError, match=f"version {again} was offered after .* never reuse"):
            engine.call("load", other)
    (still,) = engine.generate(over("cartridge/a", version, prompt))
    assert still.token_ids == answers[1]


def test_a_publish_of_another_shape_is_refused_and_harms_nobody(engine: Replica) -> None:
    wrong = engine.model.cartridges(1, 2, ALIGNED)[:, :1]
    with pytest.raises(PublishError, match=r"\[1, 2, 2, 64, 32\] and this generator's model"):
        engine.call("load", engine.snapshot(engine.newest + 1, ("a", "b"), wrong))
    version = engine.publish(engine.model.cartridges(1, 2, ALIGNED))
    (c,) = engine.generate(over("cartridge/a", version, (5, 6)))
    assert c.finish_reason == "length"


def test_a_cartridge_that_did_not_change_is_not_loaded_again(engine: Replica) -> None:
    """Version 2 changes a alone: b's whole blocks stay valid, and each version serves its own."""
    model = engine.model
    (prompt,) = prompts(1, lambda i: 9, seed=18)
    old = engine.publish(model.cartridges(101, 2, ALIGNED))
    engine.generate(*(over(f"cartridge/{name}", old, prompt) for name in "ab"))
    before = engine.loads()
    new = engine.change(a=model.cartridges(102, 1, UNALIGNED)[0])
    asked = [over(f"cartridge/{name}", v, prompt) for v in (old, new) for name in "ab"]
    both = over_all([("cartridge/b", new), ("cartridge/a", new)], prompt)
    done = engine.generate(*asked, both)
    embedded = engine.embedded(*asked, both)
    assert [c.token_ids for c in done] == [c.token_ids for c in embedded]
    assert [set(c.versions) for c in done] == [{old}, {old}, {new}, {new}, {new}]
    a, b = (fingerprint(engine.published[old][name]) for name in "ab")
    changed = fingerprint(engine.published[new]["a"])
    assert [c.served for c in done] == [(a,), (b,), (changed,), (b,), (b, changed)]
    assert done[0].token_ids != done[2].token_ids
    after = engine.loads()
    # The changed a once, and both parts of the composition, which shares no block.
    assert (after[0] - before[0], after[1] - before[1]) == (3, 2 * UNALIGNED + ALIGNED)


def test_one_batch_over_a_corpus_compositions_and_none(engine: Replica) -> None:
    """One cartridge of a whole corpus, two of documents that are shorter, of unequal length: alone,
    composed, and no cartridge at all."""
    model = engine.model
    names = ("corpus", "a", "b")
    lengths = (LONG, UNALIGNED, 7)
    kv = [model.cartridges(110 + i, 1, n)[0] for i, n in enumerate(lengths)]
    version = engine.publish(kv, names)
    refs = [[n] for n in names] + [["a", "b"], ["b", "a"], ["corpus", "b"], ["b", "corpus", "a"]]
    orders = [[(f"cartridge/{n}", version) for n in ref] for ref in refs]
    orders.append([("document/none", 0)])
    asked = [
        over_all(order, prompt, 8, temperature=temperature)
        for order in orders
        for prompt in prompts(2, (9, 70).__getitem__, seed=19)
        for temperature in (0.0, 1.0)
    ]
    done, embedded = engine.generate(*asked), engine.embedded(*asked)
    for c, e in zip(done, embedded, strict=True):
        assert (c.token_ids, c.finish_reason) == (e.token_ids, "length")
        close(c.logprobs, torch.tensor(e.logprobs))
    for r, c in list(zip(asked, done, strict=True))[::2]:
        assert list(c.token_ids) == model.greedy(engine.lookup(r.prefix), r.prompt_ids, 8)
    assert len({c.token_ids for c in done[::2]}) > 5, "prefixes make different continuations"


def test_requests_in_flight_finish_on_the_version_they_started_with(engine: Replica) -> None:
    """Beside the next ones: the publish does not wait for them."""
    (prompt,) = prompts(1, lambda i: 9, seed=6)
    old = engine.publish(engine.model.cartridges(20, 2, ALIGNED))
    running = engine.start("generate", (over("cartridge/a", old, prompt, 300),))
    new = engine.publish(engine.model.cartridges(21, 2, ALIGNED))
    (beside,) = engine.generate(over("cartridge/a", new, prompt, 2))
    report = engine.call("report")  # answered while the engine is busy
    (done,) = running.get(timeout=60).completions
    assert report.first_token_seconds is not None
    assert set(done.versions) == {old}
    assert set(beside.versions) == {new}
    assert done.token_ids == engine.embedded(over("cartridge/a", old, prompt, 300))[0].token_ids
    assert list(beside.token_ids) == engine.model.greedy(engine.published[new]["a"], prompt, 2)


def test_an_unknown_or_evicted_cartridge_fails_its_request_alone(engine: Replica) -> None:
    versions = [engine.publish(engine.model.cartridges(30 + i, 2, ALIGNED)) for i in range(4)]
    good = over("cartridge/a", versions[3], (7, 8, 9))
    done = engine.generate(
        over("cartridge/a", versions[0], (7, 8, 9)),
        good,
        over("cartridge/z", versions[3], (7, 8, 9)),
        over("cartridge/a", versions[3] + 1, (7, 8, 9)),
    )
    assert [c.finish_reason for c in done] == ["error", "length", "error", "error"]
    assert done[0].error == (
        f"cartridge a version {versions[0]} is not held here (held: {versions[1:]}): it was never "
        "loaded by this generator, or was evicted"
    )
    assert f"version {versions[3]} has no cartridge 'z'" in done[2].error
    assert f"version {versions[3] + 1} is not held here" in done[3].error
    assert done[1].token_ids == engine.embedded(good)[0].token_ids
    assert {c.token_ids for c in done if c.error} == {()}


def test_a_worker_that_lost_a_cartridge_fails_its_requests_alone(engine: Replica) -> None:
    lost = engine.publish(engine.model.cartridges(40, 2, ALIGNED))
    held = engine.publish(engine.model.cartridges(41, 2, ALIGNED))
    engine.call("forget", lost)
    good = over("cartridge/a", held, (7, 8, 9))
    done = engine.generate(
        over("cartridge/a", lost, (7, 8, 9)), good, over("cartridge/a", lost, (10, 11))
    )
    assert [c.finish_reason for c in done] == ["error", "length", "error"]
    assert f"the worker does not hold cartridge/a version {lost}" in done[0].error
    assert done[1].token_ids == engine.embedded(good)[0].token_ids


def test_malformed_requests_are_refused_by_name(engine: Replica) -> None:
    version = engine.publish(engine.model.cartridges(1, 2, ALIGNED))
    empty = GenerateRequest("e", (), PrefixRef("cartridge/a", version), Sampling(), 0)
    for bad, message in (
        (empty, "request e has an empty prompt"),
        (over("document/x", 0, (5,)), r"no document 'x'; this run has \['d', 'none'\]"),
        (over("cartridge/a", version, (5,) * 2000), "64 prefix . 2000 prompt . 6 new tokens"),
    ):
        with pytest.raises(DataError, match=message):
            engine.generate(bad)
    assert engine.generate(over("cartridge/a", version, (5, 6)))[0].finish_reason == "length"


@pytest.mark.parametrize("tokens", [ALIGNED, UNALIGNED, LONG])
def test_prompt_logprobs_over_a_cartridge(engine: Replica, tokens: int) -> None:
    """Also where prefix cache and cartridge would tempt vLLM to skip or recompute them."""
    version = engine.publish(engine.model.cartridges(50, 2, tokens))
    asked = [
        over("cartridge/a", version, p, 3) for p in prompts(4, (1, 2, 40, 130).__getitem__, seed=8)
    ]
    plain = engine.generate(*asked)  # their blocks are now in the prefix cache
    scored = [dataclasses.replace(r, prompt_logprobs=True, top_logprobs=3) for r in asked]
    for _ in range(2):
        for r, c, p in zip(scored, engine.generate(*scored), plain, strict=True):
            expected = engine.model.logprobs(engine.lookup(r.prefix), r.prompt_ids)
            steps = range(len(r.prompt_ids) - 1)
            close(c.prompt_logprobs, expected[:-1][steps, list(r.prompt_ids[1:])])
            assert c.prompt_likeliest == tuple(expected[:-1].argmax(-1).tolist())
            best = expected[:-1].topk(3)
            assert [[i for i, _ in top] for top in c.prompt_top_logprobs] == best.indices.tolist()
            close(tuple(x for top in c.prompt_top_logprobs for _, x in top), best.values.flatten())
            assert (c.token_ids, p.prompt_logprobs) == (p.token_ids, ())


@pytest.mark.parametrize("name", ["document/d", "document/none", "document/"])
def test_prompt_logprobs_over_a_document(engine: Replica, name: str) -> None:
    (prompt,) = prompts(1, lambda i: 60, seed=12)
    asked = dataclasses.replace(over(name, 0, prompt), prompt_logprobs=True)
    (embedded,) = engine.embedded(asked)
    for _ in range(2):
        (c,) = engine.generate(asked)
        expected = engine.model.logprobs(engine.lookup(asked.prefix), prompt)[:-1]
        close(c.prompt_logprobs, expected[range(59), list(prompt[1:])])
        close(embedded.prompt_logprobs, expected[range(59), list(prompt[1:])])


@pytest.mark.parametrize("lengths", [(50, 40), (50, 10), (ALIGNED, LONG)])
def test_compositions_are_those_of_the_embedded_backend(
    engine: Replica, lengths: tuple[int, int]
) -> None:
    """Of several versions, in any order; a second time beside blocks in the prefix cache."""
    model = engine.model
    a, b = (
        ("cartridge/" + name, engine.publish(model.cartridges(60 + tokens, 2, tokens)))
        for name, tokens in zip("ab", lengths, strict=True)
    )
    short, long = prompts(2, (9, 70).__getitem__, seed=13)
    orders = [[a, b], [b, a], [a, b, a], [a]]
    asked = [over_all(order, prompt) for order in orders for prompt in (short, long)]
    asked += [over_all(order, short, 12, temperature=1.0) for order in orders]
    embedded = engine.embedded(*asked)
    for _ in range(2):
        for r, c, e in zip(asked, engine.generate(*asked), embedded, strict=True):
            assert (c.token_ids, c.finish_reason) == (e.token_ids, "length")
            close(c.logprobs, torch.tensor(e.logprobs))
            assert set(c.versions) == {r.prefix.version}
    for r, e in zip(asked[:8], embedded, strict=False):
        assert list(e.token_ids) == model.greedy(engine.lookup(r.prefix), r.prompt_ids, 6)
    assert len({e.token_ids for e in embedded[:8:2]}) > 2, "orders make different continuations"


@pytest.mark.parametrize("count", [4, 8])
def test_compositions_of_four_and_eight(engine: Replica, count: int) -> None:
    """Forwards and backwards; a second time beside blocks in the prefix cache."""
    lengths = (50, 33, 17, ALIGNED, 21, 40, 9, 28)[:count]
    kv = [engine.model.cartridges(300 + i, 1, tokens)[0] for i, tokens in enumerate(lengths)]
    version = engine.publish(kv, [f"c{i}" for i in range(count)])
    parts = [(f"cartridge/c{i}", version) for i in range(count)]
    proofs = tuple(map(fingerprint, kv))
    asked = [over_all(o, p) for o in (parts, parts[::-1]) for p in prompts(2, (9, 70).__getitem__)]
    expected = engine.embedded(*asked)
    for done in (engine.generate(*asked), engine.generate(*asked)):
        for r, c, e in zip(asked, done, expected, strict=True):
            kv_of_all = engine.lookup(r.prefix)
            assert list(c.token_ids) == engine.model.greedy(kv_of_all, r.prompt_ids, 6)
            close(c.logprobs, torch.tensor(e.logprobs))
        assert [c.served for c in done] == [proofs, proofs, proofs[::-1], proofs[::-1]]
    assert expected[0].token_ids != expected[2].token_ids


def test_a_fill_may_begin_inside_any_part(engine: Replica) -> None:
    """[50, 40]: 64 of 90 tokens are whole blocks, the tail is b's. [50, 10]: 32 of 60, both's."""
    one, other = prompts(2, lambda i: 9, seed=14)
    for lengths, tails in (((50, 40), (1, 26)), ((50, 10), (2, 28)), ((64, 32), (0, 0))):
        version = engine.newest + 1
        for seed, tokens in enumerate(lengths):
            engine.publish(engine.model.cartridges(70 + seed, 2, tokens))
        parts = [("cartridge/a", version), ("cartridge/b", version + 1)]
        for prompt, loaded in ((one, (2, sum(lengths))), (other, tails)):
            asked = over_all(parts, prompt)
            before = engine.loads()
            (c,) = engine.generate(asked)
            after = engine.loads()
            assert (after[0] - before[0], after[1] - before[1]) == loaded
            assert c.token_ids == engine.embedded(asked)[0].token_ids


def test_orders_do_not_share_blocks(engine: Replica) -> None:
    """Nor does a cartridge alone with a composition that it begins: the salt is of the whole."""
    version = engine.publish(engine.model.cartridges(80, 2, ALIGNED))
    short = prompts(1, lambda i: 9, seed=15)[0]
    a, b = ("cartridge/a", version), ("cartridge/b", version)
    for parts in ([a, b], [b, a], [a], [a, a]):
        before = engine.loads()
        engine.generate(over_all(parts, short))
        engine.generate(over_all(parts, short))
        after = engine.loads()
        loaded = (len(parts), len(parts) * ALIGNED)
        assert (after[0] - before[0], after[1] - before[1]) == loaded


@pytest.mark.parametrize("tokens", [ALIGNED, UNALIGNED])
def test_prompt_logprobs_over_a_composition(engine: Replica, tokens: int) -> None:
    version = engine.publish(engine.model.cartridges(90, 2, tokens))
    parts = [("cartridge/b", version), ("cartridge/a", version)]
    asked = [over_all(parts, p, 3) for p in prompts(3, (2, 40, 130).__getitem__, seed=16)]
    plain = engine.generate(*asked)  # their blocks are now in the prefix cache
    scored = [dataclasses.replace(r, prompt_logprobs=True) for r in asked]
    embedded = engine.embedded(*scored)
    for _ in range(2):
        for c, e, p in zip(engine.generate(*scored), embedded, plain, strict=True):
            close(c.prompt_logprobs, torch.tensor(e.prompt_logprobs))
            assert c.prompt_likeliest == e.prompt_likeliest
            assert c.token_ids == p.token_ids == e.token_ids


def test_a_worker_that_lost_a_part_fails_the_composition_alone(engine: Replica) -> None:
    held, lost = (engine.publish(engine.model.cartridges(s, 2, UNALIGNED)) for s in (91, 92))
    engine.call("forget", lost)
    bad = over_all([("cartridge/a", held), ("cartridge/a", lost)], (7, 8, 9))
    good = over("cartridge/a", held, (7, 8, 9))
    done = engine.generate(bad, good)
    assert [c.finish_reason for c in done] == ["error", "length"]
    said = f"does not hold cartridge/a version {held} or cartridge/a version {lost}"
    assert said in done[0].error
    assert done[1].token_ids == engine.embedded(good)[0].token_ids


def test_a_composition_in_flight_keeps_all_its_versions(engine: Replica) -> None:
    old, older = (engine.publish(engine.model.cartridges(s, 2, UNALIGNED)) for s in (93, 94))
    asked = over_all([("cartridge/a", older), ("cartridge/b", old)], (7, 8, 9), 300)
    running = engine.start("generate", (asked,))
    for seed in range(3):  # as many as are kept
        engine.publish(engine.model.cartridges(seed, 2, ALIGNED))
    (late,) = engine.generate(dataclasses.replace(asked, sampling=Sampling(max_tokens=1)))
    assert "was evicted" in late.error
    (done,) = running.get(timeout=60).completions
    assert done.token_ids == engine.embedded(asked)[0].token_ids


def test_compositions_that_cannot_be_are_refused_by_name(engine: Replica, tmp_path: Path) -> None:
    version = engine.publish(engine.model.cartridges(95, 2, ALIGNED))
    a, d = ("cartridge/a", version), ("document/d", 0)
    said = r"composes document/d with other prefixes: .* tokens, .* or use generator.backend torch"
    for parts in ([a, d], [d, a], [d, d]):
        with pytest.raises(DataError, match=said):
            engine.generate(over_all(parts, (5, 6)))
    with pytest.raises(DataError, match=r"960 prefix . 100 prompt . 6 new tokens"):
        engine.generate(over_all([a] * 15, (5,) * 100))
    config = json.loads((Path(engine.model.path) / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = engine.call("pretend", str(tmp_path))
    with pytest.raises(DataError, match="embedding is dynamic, which is not the same at every"):
        engine.generate(over_all([a, a], (5, 6)))
    engine.call("pretend", before)
    asked = over_all([a, a], (5, 6))
    assert engine.generate(asked)[0].token_ids == engine.embedded(asked)[0].token_ids


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM's own imports
def test_an_engine_asks_for_the_share_of_its_gpu_that_it_is_told() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from cartridge_forge.plugins.vllm.engine import engine_arguments

    given = GeneratorSpec(backend="vllm", kv_gib=2.0, gpu_share=0.25)
    arguments = engine_arguments("model", "bfloat16", given)
    assert arguments.gpu_memory_utilization == 0.25
    assert arguments.kv_cache_memory_bytes == 2 * 2**30
    untold = engine_arguments("model", "bfloat16", GeneratorSpec(backend="vllm"))
    assert untold.gpu_memory_utilization == EngineArgs("model").gpu_memory_utilization


require_vllm()


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
    others = set(Path("/dev/shm").glob("forge-vllm-*"))  # of processes that were killed, say
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
        assert set(Path("/dev/shm").glob("forge-vllm-*")) <= others
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
