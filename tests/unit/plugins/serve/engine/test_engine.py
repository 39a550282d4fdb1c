"""Continuous batching: requests that come and go get what they would have got alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rooms.learning.decoding_setup import ASKED, END, alone, decode, engine, request
from safetensors.torch import save_file

from cartridge_forge.learning.cartridge import composed, fingerprint
from cartridge_forge.learning.decode import generate
from cartridge_forge.plugins.decoding.engine import PassError, TorchEngine
from cartridge_forge.plugins.serve.engine.in_process import local_sampler
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
    composed_ref,
)

if TYPE_CHECKING:
    from twins import Twin


def add(served: TorchEngine, r: GenerateRequest) -> None:
    served.add(r.id, r, r.prefix)


def test_what_is_streamed_adds_up(twin: Twin) -> None:
    served, (r, other) = engine(twin), (request("s", "a", 4, 10, top_logprobs=2), ASKED[1])
    served.add("s", r, r.prefix, stream=True)
    served.add("b", other, other.prefix)
    news = [(key, what) for _ in range(40) for key, what in served.step()]
    pieces = [what for key, what in news if isinstance(what, TokenChunk)]
    done = next(what for key, what in news if key == "s" and isinstance(what, Completion))
    assert [p.first for p in pieces] == list(range(len(pieces)))
    assert tuple(t for p in pieces for t in p.token_ids) == done.token_ids
    assert tuple(t for p in pieces for t in p.top_logprobs) == done.top_logprobs
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in done.top_logprobs)
    assert {key for key, what in news if isinstance(what, TokenChunk)} == {"s"}


def test_a_cancelled_request_ends_and_makes_room(twin: Twin) -> None:
    served = engine(twin, max_rows=1)
    add(served, request("long", "a", 3, 400, 0.0))
    add(served, request("next", "a", 3, 2, 0.0))
    assert dict(served.step()) == {}
    served.cancel("long")
    done = dict(served.step())
    assert done["long"].finish_reason == "cancelled"
    assert len(done["long"].token_ids) >= 1
    assert dict(served.step())["next"].finish_reason == "length"
    served.cancel("long")  # long gone: nothing happens
    assert dict(served.step()) == {}


def test_a_waiting_request_is_cancelled_unread(twin: Twin) -> None:
    served = engine(twin, max_rows=1)
    add(served, request("first", "a", 3, 3, 0.0))
    add(served, request("second", "a", 3, 3, 0.0))
    served.cancel("second")
    done = dict(served.step())
    assert (done["second"].finish_reason, done["second"].token_ids) == ("cancelled", ())
    while "first" not in done:
        done |= dict(served.step())
    assert dict(served.step()) == {}, "its place in the queue is passed over"


def test_a_response_goes_on_in_a_second_request_as_in_one(twin: Twin) -> None:
    whole = alone(twin, request("w", "a", 5, 12))
    begun = alone(twin, request("w", "a", 5, 4))
    ids = (*request("w", "a", 5, 4).prompt_ids, *begun.token_ids)
    rest = GenerateRequest(
        "w", ids, PrefixRef("document/a", 0), Sampling(max_tokens=8), 17, first_draw=4
    )
    assert (*begun.token_ids, *alone(twin, rest).token_ids) == whole.token_ids


def test_confidence_and_top_logprobs_are_the_model_s_own(twin: Twin) -> None:
    r = request("t", "b", 6, 6, 0.0, top_logprobs=97)
    free = alone(twin, r)
    for chosen, top in zip(free.logprobs, free.top_logprobs, strict=True):
        assert sum(torch.tensor([lp for _, lp in top]).exp()) == pytest.approx(1.0, abs=1e-5)
        assert top[0][1] == pytest.approx(chosen, abs=1e-6)  # greedy
    confidence = [-sum(lp for _, lp in top[:4]) / 4 for top in free.top_logprobs]
    pairs = [(a + b) / 2 for a, b in pairwise(confidence)]
    floor = sorted(pairs)[1]  # one window alone is below
    first = pairs.index(min(pairs)) + 2
    stopped = alone(twin, request("t", "b", 6, 6, 0.0,
                                  until=StopCondition(window=2, floor=floor, top=4)))  # fmt: skip
    assert (stopped.finish_reason, stopped.ended_by) == ("until", "confidence")
    assert stopped.token_ids == free.token_ids[:first]


def test_cartridges_are_held_by_version_and_must_fit(twin: Twin) -> None:
    served, kv = engine(twin), twin.kv["a"]
    served.hold({("p", 4): kv[..., :3, :], ("q", 4): kv})
    over = GenerateRequest("x", (8, 9), PrefixRef("cartridge/q", 4), Sampling(0.0, max_tokens=3), 0)
    served.add("x", over, over.prefix)
    found = {}
    while not found:
        found = dict(served.step())
    plain = GenerateRequest("x", (8, 9), PrefixRef("document/a", 0), over.sampling, 0)
    assert found["x"].token_ids == alone(twin, plain).token_ids
    assert set(found["x"].versions) == {4}
    served.let_go([("p", 4), ("q", 4)])
    with pytest.raises(PublishError, match=r"cartridge q of shape .* does not fit this model"):
        served.hold({("p", 5): kv, ("q", 5): kv[:1]})
    assert not served._held


def test_requests_of_two_versions_share_what_did_not_change(twin: Twin) -> None:
    """q since version 4, asked for as of 4 and of 5: one batch, and each says its own version."""
    served = engine(twin)
    served.hold({("q", 4): twin.kv["a"]})
    for version in (4, 5):
        asked = GenerateRequest(
            str(version), (8, 9), PrefixRef("cartridge/q", version), Sampling(0.0, max_tokens=3), 0
        )
        served.add(asked.id, asked, PrefixRef("cartridge/q", 4))
    found: dict[str, Completion] = {}
    while len(found) < 2:
        found |= {key: c for key, c in served.step() if isinstance(c, Completion)}
        assert served._batch is None or len(served._batch._prefixes) == 1
    assert {set(found[v].versions) == {int(v)} for v in "45"} == {True}
    assert found["4"].token_ids == found["5"].token_ids
    assert found["4"].served == found["5"].served == (fingerprint(twin.kv["a"]),)


def test_bad_requests_are_refused_at_once(twin: Twin) -> None:
    served = engine(twin)
    with pytest.raises(DataError, match="empty prompt"):
        add(served, request("e", "a", 0, 3))
    with pytest.raises(DataError, match="no document 'z'"):
        add(served, request("z", "z", 2, 3))
    with pytest.raises(DataError, match="no tokenizer is here"):
        generate(
            twin.model, [request("u", "a", 2, 3, until=StopCondition())], twin.kv.__getitem__, END
        )


def test_tokens_that_a_response_ended_before_are_counted(twin: Twin) -> None:
    free = alone(twin, request("d", "a", 4, 12))
    word = decode(free.token_ids[4:7])
    until = StopCondition(strings=(word,), before=True)
    cut = alone(twin, request("d", "a", 4, 12, until=until))
    kept = decode(free.token_ids).index(word)
    assert cut.token_ids == free.token_ids[:kept]
    assert (cut.finish_reason, cut.ended_by, cut.dropped) == ("until", word, 3)


def test_a_composition_is_sampled_as_plain_transformers_scores_it(twin: Twin) -> None:
    """Cartridge c of version 3, then the document b: one prefix of 31 + 17, a prompt behind it."""
    parts = (PrefixRef("cartridge/c", 3), PrefixRef("document/b", 0))
    one = engine(twin)
    one.hold({("c", 3): twin.kv["c"]})
    asked = {
        order: GenerateRequest(order, (9, 8, 7), composed_ref(refs), Sampling(0.0, max_tokens=5), 0)
        for order, refs in (("cb", parts), ("bc", parts[::-1]))
    }
    for order, r in asked.items():
        one.add(order, r, r.prefix)
    done: dict[str, Completion] = {}
    while len(done) < 2:
        done |= {key: news for key, news in one.step() if isinstance(news, Completion)}
    for order, completion in done.items():
        kv = composed(twin.model, [twin.kv[name] for name in order])
        logits = twin.logits((9, 8, 7, *completion.token_ids), kv)[2:-1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])
        assert completion.logprobs == pytest.approx(chosen[:, 0].tolist(), abs=1e-3)
    assert done["cb"].versions == (3,) * len(done["cb"].token_ids)
    assert done["cb"].logprobs != pytest.approx(done["bc"].logprobs, abs=1e-2)


def test_a_composition_with_a_document_that_there_is_not_is_refused(llama: Twin) -> None:
    ref = PrefixRef("document/a", 0, (PrefixRef("document/z", 0),))
    with pytest.raises(DataError, match="no document 'z'"):
        add(engine(llama), GenerateRequest("x", (9,), ref, Sampling(), 0))


def test_a_pass_that_fails_tells_what_it_was_over(twin: Twin) -> None:
    """The pass that reads prompts is over the new requests alone, the next over those that go
    on."""
    fails = False

    def failing(module: torch.nn.Module, args: tuple[object, ...]) -> None:
        if fails:
            raise MemoryError("no memory")

    handle = twin.model.register_forward_pre_hook(failing)
    try:
        for late, over in ((True, {"a", "b"}), (False, {"d"})):
            served, fails = engine(twin), False
            if late:
                add(served, ASKED[0])
                add(served, ASKED[1])
                list(served.step())
                fails = True
            add(served, ASKED[3])
            fails = True
            with pytest.raises(PassError) as failed:
                list(served.step())
            assert failed.value.keys == over
            assert isinstance(failed.value.__cause__, MemoryError)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"prompt_ids": (6, 10**6)}, "the prompt of request x has the token id 1000000 at 1"),
        ({"prompt_ids": (-1,)}, "has the token id -1 at 0"),
        ({"sampling": Sampling(max_tokens=0)}, "sampling.max_tokens 0"),
        ({"sampling": Sampling(float("nan"))}, "sampling.temperature nan"),
        ({"sampling": Sampling(top_p=0.0)}, "sampling.top_p 0.0"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"first_draw": -1}, "first_draw -1"),
        ({"until": StopCondition(window=2, top=0)}, "until.top 0"),
    ],
)
def test_what_no_pass_could_serve_is_refused_before_one(
    twin: Twin, fault: dict[str, object], said: str
) -> None:
    served, wrong = engine(twin), replace(request("x", "a", 3, 4), **fault)  # type: ignore[arg-type]  # one fault each
    add(served, ASKED[0])
    with pytest.raises(DataError, match=said):
        add(served, wrong)
    with pytest.raises(DataError, match=said):
        generate(twin.model, [wrong], lambda ref: twin.kv[ref.name[-1]], END, decode)
    (done,) = [what for _ in range(20) for _, what in served.step()]
    assert done.token_ids == alone(twin, ASKED[0]).token_ids


MODEL = str(Path(__file__).parents[5] / "models" / "clinic-panel")


def test_a_cartridge_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"kv": torch.zeros(1, 2, 2, 8, 32)}, tmp_path / "other.safetensors")
    with (
        pytest.raises(PublishError, match="does not fit this model"),
        local_sampler(MODEL, cartridge=tmp_path / "other.safetensors"),
    ):
        pass
