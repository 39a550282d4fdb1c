"""Define how a request changes the logits before its tokens are drawn, in the terms of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0


@dataclass(frozen=True)
class LogitRules:
    """Hold the changes of logits that one request asks for; the default asks for none.

    `bias` has pairs (token id, number added to its logit). `repetition_penalty` divides the logit
    of every token of the prompt and of the response so far if it is above 0, and multiplies it
    otherwise. `frequency_penalty` is subtracted once for each time that a token stands in the
    response, `presence_penalty` once if it stands there. `min_p` leaves out the tokens whose
    probability, at the temperature of the draw, is below this share of the likeliest token's. The
    prompt is what the request sends: neither a document nor a cartridge before it.

    `LogitRules(bias=((13, -100.0),), repetition_penalty=1.1, min_p=0.05)`
    """

    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
