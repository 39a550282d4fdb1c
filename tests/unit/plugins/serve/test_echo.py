"""An echoed prompt as completions reply it: places, nulls and log-probabilities, worked by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from serving_setup import READER

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.wire.detokenizer import TextPiece, TokenRecord
from cartridge_forge.plugins.chat.wire.openai_chat import ForgeExtension, usage
from cartridge_forge.plugins.serve.request import ServingRequest, requests_of
from cartridge_forge.plugins.serve.responses import CompletionWire, echoed, unsaid
from cartridge_forge.plugins.serve.tokenization import EchoedPrompt, Tokenization, TokenizedPrompt
from cartridge_forge.protocols.step import Completion, PrefixRef, Sampling

WORDS = ["<bos>", "a", " b", "c", "d"]
HEAD = {"id": "cmpl-1", "created": 0, "model": "m"}
PROMPT = EchoedPrompt("a bc", (1, 2, 3), (0, 1, 3))
# Of the ids <bos> a b c: three are predicted, and a was asked for without its own.
READ = Completion(
    "r", (4,), (-0.5,), (0,), "length", (-1.0, -2.0, -9e9), (),
    prompt_top_logprobs=(((1, -1.0),), ((4, -0.1),), ((2, -0.25),)),
)  # fmt: skip
SAID = TextPiece("d", (TokenRecord(4, -0.5, ((4, -0.5),), 0),), "length")


def choice(piece: TextPiece, top: int | None) -> dict[str, Any]:
    wire = CompletionWire(HEAD, lambda i: (WORDS[i], []), top)
    forge = ForgeExtension(seed=0, cartridge_tokens=0)
    (found,) = wire.whole([piece], usage(4, 1), forge)["choices"]
    return found


def test_the_prompt_stands_before_the_response_and_its_first_token_has_null() -> None:
    assert choice(echoed(PROMPT, READ, SAID), 1) == {
        "index": 0,
        "text": "a bcd",
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["a", " b", "c", "d"],
            "token_logprobs": [None, -2.0, -9999.0, -0.5],
            "top_logprobs": [None, {"d": -0.1, " b": -2.0}, {" b": -0.25, "c": -9999.0},
                             {"d": -0.5}],
            "text_offset": [0, 1, 3, 4],
        },
    }  # fmt: skip


def test_a_first_token_that_was_sent_gives_the_next_its_own() -> None:
    prompt = EchoedPrompt("<bos>a bc", (0, 1, 2, 3), (0, 5, 6, 8))
    found = choice(echoed(prompt, READ, SAID), 0)["logprobs"]
    assert found["token_logprobs"] == [None, -1.0, -2.0, -9999.0, -0.5]
    assert found["text_offset"] == [0, 5, 6, 8, 9]


def test_one_token_behind_a_cartridge_is_predicted_by_nothing() -> None:
    alone = EchoedPrompt("a", (1,), (0,))
    read = Completion("r", (4,), (-0.5,), (7,), "length")
    found = choice(echoed(alone, read, SAID), 2)["logprobs"]
    assert found["token_logprobs"] == [None, -0.5]
    assert found["top_logprobs"] == [None, {"d": -0.5}]


def test_a_request_for_no_token_replies_the_prompt_alone() -> None:
    done = unsaid(READ)
    assert (done.token_ids, done.logprobs, done.finish_reason) == ((), (), "length")
    found = choice(echoed(PROMPT, done, TextPiece("", (), "length")), 1)
    assert found["text"] == "a bc"
    assert found["logprobs"]["token_logprobs"] == [None, -2.0, -9999.0]
    assert choice(echoed(PROMPT, done, TextPiece("", (), "length")), None)["logprobs"] is None


@pytest.mark.parametrize("top", [None, 0, 3])
def test_generators_are_asked_for_a_token_and_score_the_prompt_where_it_is_told(
    top: int | None,
) -> None:
    prompt = TokenizedPrompt((0, 1, 2, 3), 4, PROMPT)
    asked = ServingRequest("x", "m", (prompt,), 2, Sampling(max_tokens=0), 5, top_logprobs=top)
    assert asked.echo
    for request in requests_of(asked, PrefixRef("document/", 0)):
        assert request.sampling.max_tokens == 1
        assert request.prompt_logprobs is (top is not None)
        assert request.top_logprobs == (top or 0)


@cache
def texts() -> Tokenization:
    return Tokenization(load_tokenizer(str(READER)))


def test_a_text_is_echoed_as_it_was_sent() -> None:
    """The tokenizer puts a blank before it; é has two tokens, which begin where it does."""
    found = texts().prompt("Who? é!", True, "prompt", echo=True)
    assert found.echoed is not None
    assert found.ids == found.echoed.ids
    assert found.echoed.text == "Who? é!"
    words = [texts().token(i)[0] for i in found.ids]
    assert words == [" ", "W", "h", "o", "?", " ", "\ufffd", "\ufffd", "!"]
    assert found.echoed.offsets == (0, 0, 1, 2, 3, 4, 5, 5, 6)


def test_ids_are_echoed_as_they_were_sent() -> None:
    text, ids = "<|bos|> Who?", texts().prompt("Who?", True, "prompt").ids
    bare = texts().prompt([1, *ids], False, "prompt", echo=True)
    assert (bare.ids, bare.counted) == ((1, *ids), len(ids) + 1)
    assert bare.echoed == EchoedPrompt(text, (1, *ids), (0, 7, 8, 9, 10, 11))
    without = texts().prompt(ids, False, "prompt", echo=True)
    assert (without.ids, without.counted) == ((1, *ids), len(ids) + 1)
    assert without.echoed == EchoedPrompt(" Who?", ids, (0, 1, 2, 3, 4))
    over = texts().prompt([1, *ids], True, "prompt", echo=True)
    assert (over.ids, over.echoed) == ((1, *ids), bare.echoed)
