"""The tiny clerk: what its corpus shows, and what the shipped model makes of it."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import Counter
from itertools import pairwise

from rooms.environments.clinic_setup import CLERK, MODELS, Parts, episodes
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.desk import HINTS, parse_call
from models.pretrain.clerk_tasks import LADDER, draw_row, rows
from models.pretrain.train import encode, hire


def test_a_seed_names_its_episodes() -> None:
    first, again, other = (random.Random(n) for n in ("clerk/1", "clerk/1", "clerk/2"))
    rows = [draw_row(first, 3) for _ in range(20)]
    assert rows == [draw_row(again, 3) for _ in range(20)]
    assert rows != [draw_row(other, 3) for _ in range(20)]


def test_half_the_rows_have_a_handbook() -> None:
    rng = random.Random("rows")
    rows = [draw_row(rng, 1) for _ in range(1000)]
    sizes = [len(desk.handbook) for desk, _ in rows if desk.handbook]
    assert 450 <= len(sizes) <= 550  # 500, one standard deviation is 16
    assert (min(sizes), max(sizes)) == (6, 24)


def test_what_is_trained_is_the_conversation_of_the_template(clerk: Parts) -> None:
    """Token by token; and of it the calls with their ends, of each taught kind one label."""
    _, tokenizer = clerk
    drawn = rows(random.Random("template"), len(LADDER) - 1, Namespace(batch=40, episodes=1))
    batch = encode(tokenizer, drawn)
    rng = random.Random("template")
    for b in range(40):
        desk, told = draw_row(rng, 1)
        head = [{"role": "system", "content": desk.document}] if desk.handbook else []
        kinds, label = batch.kinds[b].copy(), 0
        for segment, episode in enumerate(told, start=1):
            messages = head + [{"role": said.role, "content": said.text} for said in episode]
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            own = (batch.segment[b] == 0) | (batch.segment[b] == segment)
            assert batch.ids[b][own].tolist() == ids
            assert batch.position[b][own].tolist() == list(range(len(ids)))
            for said in episode:
                if said.kind:
                    label += 1
                    text = tokenizer.decode(batch.ids[b][batch.trained[b] == label])
                    assert text == f" {said.text}<|end|>"
                    assert kinds.pop(0) == said.kind
        assert kinds == []


def test_mistakes_are_mistakes_of_their_kind() -> None:
    for said in episodes("kinds", False, False, 500):
        for call, reply in pairwise(s for s in said if s.role != "user"):
            text = {
                "unknown_tool": "no such tool.",
                "bad_arguments": "bad call.",
                "wrong_note": f"no note {parse_call(call.text).arguments.get('note')}.",
            }.get(call.kind)
            if text:
                assert reply.text.removesuffix(" the time is over.") == text


def test_a_guess_is_never_made_twice_and_is_any_department() -> None:
    first: Counter[str] = Counter()
    for said in episodes("guesses", False, False, 1600):
        places = [parse_call(s.text).arguments["department"] for s in said if s.kind == "guess"]
        assert len(set(places)) == len(places)
        first.update(places[:1])
    assert set(first) == set(words.DEPARTMENTS)
    assert max(first.values()) < 1.4 * min(first.values())


def test_a_hint_stands_before_the_call_that_follows_it() -> None:
    seen = 0
    for said in episodes("hints", False, True, 500):
        field = said[0].text.removeprefix("what is the ").removesuffix("?")
        for hint, call in pairwise(said[1:]):
            if hint.role != "user":
                continue
            seen += 1
            assert call.role == "assistant"
            assert call.kind in ("hinted", "guess")  # never a mistake
            if hint.text.startswith("the handbook says"):
                department = hint.text.removesuffix(".").split()[-1]
                assert hint.text == HINTS["where"].format(field=field, department=department)
                assert call.text == f"find {field} in {department}."
            elif hint.text.startswith("read note"):
                assert call.text == hint.text
    assert seen > 400


def test_a_reader_is_hired_with_one_token_more() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODELS / "clinic-reader")
    model = LlamaForCausalLM.from_pretrained(MODELS / "clinic-reader")
    before = len(tokenizer)
    old = model.model.embed_tokens.weight.detach().clone()
    hire(tokenizer, model, 0)
    assert tokenizer.get_vocab()["<|tool|>"] == before
    rows = model.lm_head.weight.detach()  # tied
    assert rows.shape[0] == before + 1
    assert rows[:before].equal(old)
    user = rows[tokenizer.get_vocab()["<|user|>"]]
    assert 0 < (rows[before] - user).norm() < 0.5 * user.norm()


def test_the_shipped_clerk_is_a_small_plain_llama() -> None:
    config = json.loads((CLERK / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 1459
    assert {f.name for f in CLERK.iterdir()} == {
        f.name for f in (MODELS / "clinic-reader").iterdir()
    }
    assert sum(f.stat().st_size for f in CLERK.iterdir()) <= 10_000_000
