r"""Extract the answer from a response, and cluster equal answers for voting.

    form        where it stands                           equal when
    math        the last \boxed{..}                       mathematically equal: 0.5, \frac{1}{2}
    rg          the last <answer>..</answer>              equal text
    supergpqa   the last \boxed{..}, one letter A to J    equal letter
    clinic      after the last "the answer is"            equal text, folded; a letter with its
                                                          bracket is that letter
    general     after the last "answer:" or "the answer   equal text, folded
                is"; without one the whole text

A response without an answer has None, which never votes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Literal, get_args

from cartridge_forge.plugins.clinic.text import plain_signs, said_answer
from cartridge_forge.plugins.strategies.answers.equivalence import need_judge, plain_math, same_math
from cartridge_forge.protocols.errors import DataError

Form = Literal["math", "rg", "supergpqa", "clinic", "general"]
FORMS: tuple[Form, ...] = get_args(Form)

_BOX = "\\boxed{"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_GENERAL = re.compile(r"(?:answer\s*:|\banswer is\b:?)\s*([^\n]*)", re.IGNORECASE)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_LETTER = re.compile(r"\(?([A-Ja-j])(?:[).:,].*|\s*)", re.DOTALL)


def extract(text: str, form: Form) -> str | None:
    """Return the answer in a response, as it is written; None if it has none. Raises DataError for
    an unknown form."""
    if form in ("math", "supergpqa"):
        boxed = _boxed(text)
        return _lettered(boxed) if form == "supergpqa" and boxed else boxed
    if form == "rg":
        tagged = _TAGGED.findall(text)
        return tagged[-1].strip() or None if tagged else None
    if form == "clinic":
        return _of_clinic(text)
    if form == "general":
        answers = _GENERAL.findall(text)
        return (answers[-1] if answers else text).strip() or None
    raise DataError(f"answer form: got {form!r}; expected one of {', '.join(FORMS)}")


def same_answer(a: str, b: str, form: Form) -> bool:
    """Return whether two extracted answers are equal. Of `math` the call may block for seconds
    (`same_math`), and expressions that are no numbers may be equal to a third and not to each
    other; `clusters` joins them."""
    if form == "math":
        return same_math(a, b)
    if form in ("clinic", "general"):
        return _folded(a) == _folded(b)
    return a == b


def plain_answer(answer: str, form: Form) -> str:
    """Return an answer equal to `answer` in plain signs, for a scorer that knows one spelling of
    each: "28080" of "28,080" in `math`, "Paris" of "\'Paris.\'" in `general`."""
    if form == "math":
        return plain_math(answer)
    if form in ("clinic", "general"):
        return _trimmed(answer)
    return answer


def clusters(answers: Sequence[str | None], form: Form) -> list[list[int]]:
    """Return the indices of equal answers, clusters and members in order of appearance.

    `clusters(["1/2", None, "3", "0.5"], "math")` is [[0, 3], [2]]. An answer joins all clusters
    with a member that it equals into one, so that the order of the answers decides nothing.
    """
    groups: list[list[int]] = []
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        joined = [c for c in groups if any(same_answer(str(answers[j]), answer, form) for j in c)]
        merged = [*sorted(j for c in joined for j in c), i]
        groups = sorted([*(c for c in groups if c not in joined), merged])
    return groups


async def clustered(answers: Sequence[str | None], form: Form) -> list[list[int]]:
    """Return `clusters`, computed in a thread if that may take long.

    Fast cases stay in the event loop, so that concurrent questions stay in step.
    """
    if form == "math" and need_judge(a for a in answers if a is not None):
        return await asyncio.to_thread(clusters, answers, form)
    return clusters(answers, form)


def _boxed(text: str) -> str | None:
    """Return the content of the last box; None if it is empty or not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for i in range(start, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i].strip() or None
    return None


def _lettered(box: str) -> str | None:
    match = _LETTER.fullmatch(_WORDS.sub(r"\1", box).strip(" $."))
    return match[1].upper() if match else None


def _of_clinic(text: str) -> str | None:
    answer = said_answer(text)
    if answer is None:
        return None
    first = _folded(re.split(r"\n|\.\s", answer, maxsplit=1)[0])
    letter = re.fullmatch(r"\(?([a-e])(?:[).:,].*)?", first)
    return (letter[1] if letter else first) or None


def _folded(text: str) -> str:
    return _trimmed(text.casefold())


def _trimmed(text: str) -> str:
    return " ".join(plain_signs(text).split()).strip(" .\"'")
