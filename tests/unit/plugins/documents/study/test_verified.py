"""Prefix repair by hand: the first refused token is replaced, and only that one."""

import asyncio
from collections.abc import Sequence

import pytest
from cartridge_forge.plugins.documents.study.prefix_repair import repaired

from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling
from cartridge_forge.training.records import StudyPrompt

END = 2


def prompt(name: str, most: int = 6) -> StudyPrompt:
    request = GenerateRequest(
        name, (4, 5), PrefixRef("cartridge/p1", 3), Sampling(max_tokens=most), 17
    )
    return StudyPrompt("p1", "recite", request, "p1", ("p1",), name)


def own(name: str, ids: tuple[int, ...], reason: str = "stop") -> Completion:
    return Completion(name, ids, (-0.5,) * len(ids), (3,) * len(ids), reason, served=("print",))


class Models:
    """Answer readings from a table of the teacher's log-probabilities and likeliest tokens, and
    continuations with token 30 and an end, at the student's log-probability -0.25."""

    def __init__(self, read: dict[str, tuple[tuple[float, ...], tuple[int, ...]]]) -> None:
        self.read, self.asked = read, list[GenerateRequest]()

    async def generate(self, requests: Sequence[GenerateRequest], *_: object) -> list[Completion]:
        self.asked.extend(requests)
        return [self.answer(r) for r in requests]

    def answer(self, request: GenerateRequest) -> Completion:
        name, _, verb = request.id.rpartition("/")
        if verb == "read":
            logprobs, likeliest = self.read[name]
            return Completion(
                request.id, (9,), (-1.0,), (0,), "length", prompt_logprobs=logprobs,
                prompt_likeliest=likeliest,
            )  # fmt: skip
        ids = (30, END)[: request.sampling.max_tokens]
        return Completion(
            request.id, ids, (-0.25,) * len(ids), (3,) * len(ids),
            "stop" if END in ids else "length", prompt_logprobs=(-7.0, -8.0, -3.0),
        )  # fmt: skip


def repair(
    models: Models, prompts: Sequence[StudyPrompt], written: Sequence[Completion]
) -> list[Completion]:
    ends = frozenset({END})
    found = asyncio.run(repaired(prompts, written, 0.1, ends, models.generate))
    return found


def test_the_first_token_that_the_teacher_refuses_is_replaced_and_the_student_goes_on() -> None:
    """ln 0.1 = -2.303: the third token at -2.4 is refused, the fourth at -9 never read again."""
    read = {"a": ((-5.0, -0.1, -2.3, -2.4, -9.0), (5, 10, 11, 20, 13))}
    models = Models(read)
    (found,) = repair(models, [prompt("a")], [own("a", (10, 11, 12, 13))])
    assert found == Completion(
        "a", (10, 11, 20, 30, END), (-0.5, -0.5, -3.0, -0.25, -0.25), (3,) * 5, "stop",
        served=("print",),
    )  # fmt: skip
    reading, going_on = models.asked
    assert reading.prefix == PrefixRef("document/p1", 0)
    assert reading.prompt_ids == (4, 5, 10, 11, 12, 13)
    assert going_on.prefix == PrefixRef("cartridge/p1", 3)
    assert going_on.prompt_ids == (4, 5, 10, 11, 20)
    assert (going_on.first_draw, going_on.sampling.max_tokens, going_on.seed) == (3, 3, 17)


def test_a_response_that_the_teacher_accepts_stays_as_it_is() -> None:
    models = Models({"a": ((-5.0, -0.1, -2.3), (5, 10, 11)), "b": ((-9.0,), (4,))})
    written = [own("a", (10, 11)), own("b", ())]
    assert repair(models, [prompt("a"), prompt("b")], written) == written
    assert [r.id for r in models.asked] == ["a/read", "b/read"]


@pytest.mark.parametrize(
    ("most", "likeliest", "reason"), [(6, END, "stop"), (2, 20, "length")]
)  # fmt: skip
def test_nothing_follows_an_end_or_the_last_token(most: int, likeliest: int, reason: str) -> None:
    models = Models({"a": ((-5.0, -0.1, -4.0), (5, 10, likeliest))})
    (found,) = repair(models, [prompt("a", most)], [own("a", (10, 11), "length")])
    assert (found.token_ids, found.logprobs) == ((10, likeliest), (-0.5, -3.0))
    assert found.finish_reason == reason


def test_responses_are_repaired_apart() -> None:
    read = {"a": ((-5.0, -0.1), (5, 10)), "b": ((-5.0, -4.0, -4.0), (5, 20, 21))}
    models = Models(read)
    written = [own("a", (10,)), own("b", (10, 11))]
    first, second = repair(models, [prompt("a"), prompt("b")], written)
    assert first == written[0]
    assert second.token_ids == (20, 30, END)
