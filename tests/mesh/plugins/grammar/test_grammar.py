"""Responses of the tiny reader match what they must, greedy and drawn, and nothing else changes."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, text_of, tokenizer_of
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.decoding.engine import TorchEngine
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import GrammarKind, ResponseGrammar
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling

READER = str(Path(__file__).parents[4] / "models/clinic-reader")
END = frozenset({2})
TEXT = text_of(READER)
BARE = PrefixRef("document/none", 0)

PATIENT = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "ward": {"enum": ["cardiology", "neurology"]},
        "drugs": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/visit"}]},
    },
    "required": ["age", "ward", "next"],
    "additionalProperties": False,
    "$defs": {
        "visit": {
            "type": "object",
            "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
            "required": ["hour"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[dict[str, Any]] = [
    PATIENT,
    {"type": "boolean"},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 2,
     "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{2}$"},
    {"oneOf": [{"const": "yes"}, {"type": "number", "minimum": 0, "maximum": 1}]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "maxProperties": 2,
     "additionalProperties": False},
]  # fmt: skip


@cache
def model() -> Any:
    return load_model(READER)


@cache
def known() -> Grammars:
    return Grammars(partial(tokenizer_of, READER), END)


@pytest.fixture
def grammars() -> Grammars:
    return known()


@pytest.fixture(scope="module")
def prefix() -> torch.Tensor:
    return document_kv(model(), (1,))


def request(grammar: ResponseGrammar | None, seed: int = 0, **sampling: Any) -> GenerateRequest:
    prompt = tuple(tokenizer_of(READER)("Who is the surgeon?").input_ids)
    most = Sampling(**{"max_tokens": 160, **sampling})
    return GenerateRequest(f"r{seed}", prompt, BARE, most, seed, grammar=grammar)


def schema(value: Any) -> ResponseGrammar:
    return ResponseGrammar("json_schema", json.dumps(value))


@pytest.mark.parametrize("wanted", SCHEMAS, ids=lambda s: s.get("type", "oneOf"))
def test_every_response_satisfies_its_schema(
    grammars: Grammars, prefix: torch.Tensor, wanted: dict[str, Any]
) -> None:
    """Greedy, at temperature 1, hot, and cut to the likeliest, decoded together."""
    asked = [request(schema(wanted), 0, temperature=0.0)]
    asked += [request(schema(wanted), seed) for seed in range(4)]
    asked += [request(schema(wanted), seed, temperature=1.9) for seed in range(4)]
    asked += [request(schema(wanted), seed, top_k=3, top_p=0.6) for seed in range(4)]
    done = generate(model(), asked, lambda _: prefix, END, TEXT, grammars=grammars)
    assert [c.finish_reason for c in done] == ["stop"] * len(done)
    for completion in done:
        jsonschema.validate(json.loads(TEXT(completion.token_ids)), wanted)


NAMES = st.text("abcdeXYZ_", min_size=1, max_size=6)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 20}),
    st.integers(0, 5).map(lambda n: {"type": "string", "maxLength": n}),
    st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True).map(lambda v: {"enum": v}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    return properties.map(
        lambda p: {
            "type": "object", "properties": p, "required": list(p)[:2],
            "additionalProperties": False,
        }
    )  # fmt: skip


TREES = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner) | inner.map(lambda i: {"type": "array", "items": i, "maxItems": 2})
    ),
    max_leaves=4,
)


@given(TREES, st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 2.0]))
def test_any_schema_is_satisfied(wanted: Any, seed: int, temperature: float) -> None:
    """The model's part is played by drawn logits: what is allowed decides alone."""
    matcher = known().matcher(schema(wanted))
    draws = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while tokens[-1:] != [2]:
        assert len(tokens) < 1000
        logits = torch.randn(1458, generator=draws) * temperature
        logits[~matcher.allowed(logits)] = float("-inf")
        tokens.append(int(logits.argmax()))
        matcher.add(tokens[-1])
        assert matcher.error == ""
    jsonschema.validate(json.loads(TEXT(tokens)), wanted)


@pytest.mark.parametrize(
    ("kind", "text", "as_python"),
    [
        ("regex", "[A-C]{2}[0-9]{3}", "[A-C]{2}[0-9]{3}"),
        ("regex", "ä(ö|ü)+x", "ä(ö|ü)+x"),
        ("lark", 'start: "the surgeon" | " x."', "the surgeon| x\\."),
    ],
)
def test_regular_expressions_and_choices_hold_from_end_to_end(
    grammars: Grammars, prefix: torch.Tensor, kind: GrammarKind, text: str, as_python: str
) -> None:
    asked = [request(ResponseGrammar(kind, text), seed) for seed in range(8)]
    done = generate(model(), asked, lambda _: prefix, END, TEXT, grammars=grammars)
    for completion in done:
        assert completion.finish_reason == "stop"
        assert re.fullmatch(as_python, TEXT(completion.token_ids))


def test_logprobs_are_those_before_the_grammar(grammars: Grammars, prefix: torch.Tensor) -> None:
    """Of a response that was forced: those that its tokens have when they are a prompt."""
    (made,) = generate(
        model(), [request(ResponseGrammar("regex", "cardiology"))], lambda _: prefix, END, TEXT,
        grammars=grammars,
    )  # fmt: skip
    assert TEXT(made.token_ids) == "cardiology"
    before = request(None).prompt_ids
    read = GenerateRequest(
        "read", (*before, *made.token_ids), BARE, Sampling(max_tokens=1), 0, prompt_logprobs=True
    )
    (told,) = generate(model(), [read], lambda _: prefix, END)
    assert made.logprobs == pytest.approx(told.prompt_logprobs[len(before) - 1 :], abs=1e-4)
    assert sum(made.logprobs) < -5, "it would not have said so by itself"


def test_other_rows_of_the_batch_do_not_notice(grammars: Grammars, prefix: torch.Tensor) -> None:
    engine = TorchEngine(model(), lambda _: prefix, END, TEXT, grammars)
    free = [request(None, seed, max_tokens=9) for seed in (50, 51)]
    for one in (free[0], request(schema(PATIENT), 1), free[1], request(schema({}), 2)):
        engine.add(one.id, one, BARE, stream=one.seed == 1)
    done: dict[str, Completion] = {}
    while len(done) < 4:
        done |= {key: news for key, news in engine.step() if isinstance(news, Completion)}
    alone = generate(model(), free, lambda _: prefix, END, TEXT)
    assert [done[c.request_id].token_ids for c in alone] == [c.token_ids for c in alone]
    jsonschema.validate(json.loads(TEXT(done["r1"].token_ids)), PATIENT)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", "[1]", "a schema is an object"),
        ("json_schema", "{", "it is no JSON"),
        ("json_schema", '{"not": {"type": "string"}}', r'Unimplemented keys: \["not"\]'),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented"),
        ("json_schema", '{"$ref": "file:///etc/hostname"}', "does not fetch resources"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "does not fetch resources"),
        ("json_schema", json.dumps({"enum": ["x" * 40_000]}), r"400\d\d bytes, and 32768"),
        ("json_schema", '{"items":' * 70 + "{}" + "}" * 70, "more than 64 deep"),
        ("regex", "(", "unclosed group"),
        ("regex", "((a{100}){100}){100}", "too many expressions"),
        ("regex", "a(?=b)", "look-around"),
        ("lark", "start: other", "unknown name"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    grammars: Grammars, kind: GrammarKind, text: str, why: str
) -> None:
    with pytest.raises(DataError, match=why) as found:
        grammars.matcher(ResponseGrammar(kind, text))
    assert "non-verbose" not in str(found.value)


def test_a_grammar_that_grows_too_costly_ends_its_response_alone(
    grammars: Grammars, prefix: torch.Tensor
) -> None:
    """Behind a name, and not before, any of 2,200 keys may stand."""
    keys = {"type": "object", "properties": {f"{i}": {} for i in range(2_200)}}
    wide = {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, keys],
        "minItems": 2,
    }
    asked = [request(schema(wide), 1), request(schema({"type": "boolean"}), 2)]
    costly, fine = generate(model(), asked, lambda _: prefix, END, TEXT, grammars=grammars)
    assert costly.finish_reason == "grammar"
    assert "items" in costly.ended_by
    assert fine.finish_reason == "stop"


def test_without_a_tokenizer_or_an_end_there_is_no_grammar(prefix: torch.Tensor) -> None:
    asked = request(schema({}))
    with pytest.raises(DataError, match="r0 has a grammar and has no tokenizer"):
        generate(model(), [asked], lambda _: prefix, END, TEXT)
    with pytest.raises(DataError, match="no token ends a response"):
        Grammars(partial(tokenizer_of, READER), frozenset()).matcher(schema({}))
    with pytest.raises(DataError, match=r"save it with tokenizer\.json"):
        Grammars(lambda: None, END).matcher(schema({}))
