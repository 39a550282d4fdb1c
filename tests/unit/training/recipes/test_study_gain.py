"""What a document tells about answers, worked by hand; what it does not tell is refused."""

import asyncio
from collections.abc import Sequence

from cartridge_forge.plugins.documents.study.agreement import StudyQuestion
from cartridge_forge.plugins.documents.study.rows import gains, weighed
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow
from cartridge_forge.protocols.step import Completion, GenerateRequest


def question(key: str, answer: tuple[int, ...]) -> StudyQuestion:
    return StudyQuestion(key, "kestrel", "cloze", (), (5, 6), answer)


def row(key: str) -> StudyRow:
    return StudyRow(
        key=key, document="kestrel", source="k", sha256="0", tokens=(0, 1), chars=(0, 1),
        kind="cloze", asker="plain", question="?", question_sampling={}, question_seed=0,
        answer_sampling={}, answer_seed=0, model="m", config="c", generator="g", time="t",
    )  # fmt: skip


def test_the_gain_is_what_the_document_adds_to_an_answers_mean_log_probability() -> None:
    """a: (-1 - 3)/2 with the document, (-5 - 5)/2 without: 3. b: the same either way."""
    logprobs = {
        "gain/document/a": (-9.0, -1.0, -3.0), "gain/none/a": (-9.0, -5.0, -5.0),
        "gain/document/b": (-9.0, -2.0), "gain/none/b": (-9.0, -2.0),
    }  # fmt: skip
    asked: list[GenerateRequest] = []

    async def generate(requests: Sequence[GenerateRequest], *_: object) -> list[Completion]:
        asked.extend(requests)
        return [
            Completion(r.id, (), (), (), "length", prompt_logprobs=logprobs[r.id]) for r in requests
        ]

    studied = [question("a", (7, 8)), question("b", (7,)), question("unanswered", ())]
    bare = {key: (1, 5, 6) for key in ("a", "b", "unanswered")}
    found = asyncio.run(gains(studied, bare, generate))
    assert found == {"a": 3.0, "b": 0.0}
    assert [(r.prompt_ids, r.prefix.name) for r in asked[:2]] == [
        ((5, 6, 7, 8), "document/kestrel"), ((1, 5, 6, 7, 8), "document/none"),
    ]  # fmt: skip
    rows = weighed([row("a"), row("b"), row("unanswered")], found, 0.1)
    assert [(r.gain, r.refused) for r in rows] == [(3.0, ""), (0.0, "no_gain"), (None, "")]
