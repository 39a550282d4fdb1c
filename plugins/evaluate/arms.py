"""Run the arms of `forge eval` on one evaluation suite, and keep every answer.

teacher   the whole document: sampled answers to every question, once
bare      no document: sampled answers to every probe, once; greedy ones to format prompts
arm       answers greedily -> right, exact, F1, unparsed
          reads the right answers, the passages -> perplexity
          reads the teacher's answers -> agreement; the bare model's -> forgetting
          begins the passages, the teacher goes on -> perplexity of the teacher's words
          writes where passages are asked for, the teacher reads -> accepted, precision, KL
          samples answers -> right; answers format prompts -> obeyed
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.chat.rollouts import hash_of, mean_nll
from cartridge_forge.plugins.documents.study.agreement import (
    HeldOutQuestion,
    StudyQuestion,
    compared,
    users_answer,
)
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.evaluate.own_text import WrittenText, summary
from cartridge_forge.plugins.evaluate.questions import EvalQuestion, EvalSuite, QuestionReading
from cartridge_forge.plugins.evaluate.records import (
    AfterOwn,
    EvalRow,
    Forgetting,
    Formats,
    FreeRunning,
    PairedDifference,
    Perplexity,
)
from cartridge_forge.plugins.evaluate.spec import EvalSpec
from cartridge_forge.plugins.statistics.intervals import (
    AT_LEAST_ZERO,
    SHARE_DIFFERENCE,
    mean_interval,
    paired_difference,
    resamples,
    wilson_interval,
)
from cartridge_forge.plugins.statistics.results import Agreement
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.records.answers import Answer, to_row
from cartridge_forge.protocols.step import (
    BARE,
    SEPARATOR,
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    stream_seed,
)

Generating = Callable[[Sequence[GenerateRequest]], Awaitable[Sequence[Completion]]]
# (what a prompt is about, its ids, its prefix) -> its ids with passages, and their prefix
PassagePlace = Callable[[str, tuple[int, ...], PrefixRef], tuple[tuple[int, ...], PrefixRef]]
AT_ONCE = 64  # requests of a call: more would wait in the engines until it times out


@dataclass(frozen=True)
class EvalArm:
    """Describe the prefix before the questions. `prefixes` has one for everything that a question
    of the suite is about (`EvalSuite.abouts`), None stands for no document at all; `routed` has
    others for single questions, by their ids after a prefix, and `passages` makes the prompt of an
    arm that retrieves them. `tokens` is the mean length of a prefix."""

    name: str
    kind: str
    prefixes: Mapping[str, PrefixRef] | None
    tokens: float
    budget: int | None = None
    run: str = ""
    mesh: str = ""
    step: int = 0
    trained_tokens: int = 0
    routed: Mapping[tuple[int, ...], PrefixRef] = field(default_factory=dict)
    passages: PassagePlace | None = None


@dataclass(frozen=True)
class ArmAnswers:
    """Hold an arm's row, its scores by question, to compare arms by, and its answers."""

    row: EvalRow
    scores: tuple[float, ...]
    answers: tuple[dict[str, Any], ...]


async def sit(
    paper: EvalSuite,
    arms: Sequence[EvalArm],
    spec: EvalSpec,
    max_tokens: int,
    generate: Generating,
    show: Callable[[EvalRow], None] = lambda row: None,
) -> list[ArmAnswers]:
    """Return every arm's results on the whole suite. Raises PublishError for a refused request."""
    room = RequestWindow(paper, spec, max_tokens, generate)
    await room.prepare()
    scores = []
    for arm in arms:
        scores.append(await room.sit(arm))
        show(scores[-1].row)
    return scores


def pairs(
    sat: Sequence[ArmAnswers], questions: Sequence[UserQuestion], spec: EvalSpec
) -> list[PairedDifference]:
    """Compare every pair of arms over the same resamples of the questions."""
    documents = [q.document for q in questions]
    draws = resamples(documents, [q.fact for q in questions], spec.resamples, spec.seed)
    comparisons = []
    for a, b in combinations(sat, 2):
        estimate = paired_difference(a.scores, b.scores, draws, SHARE_DIFFERENCE)
        comparisons.append(
            PairedDifference(
                a=a.row["arm"], b=b.row["arm"], difference=estimate.mean, ci95=list(estimate.ci95),
                share=estimate.share,
            )
        )  # fmt: skip
    return comparisons


class RequestWindow:
    def __init__(
        self, paper: EvalSuite, spec: EvalSpec, max_tokens: int, generate: Generating
    ) -> None:
        self._paper, self._spec, self._max_tokens = paper, spec, max_tokens
        self._generate = generate
        self._taught: list[HeldOutQuestion] = []
        self._general: list[HeldOutQuestion] = []
        self._bare_accuracy = 0.0
        self._bare_obeyed: list[float] = []

        read = {about: PrefixRef(f"document/{about}", 0) for about in paper.abouts}
        self._whole = EvalArm("document", "", read, 0.0)

    async def prepare(self) -> None:
        """Sample the answers of the teacher and of the bare model, once for all arms."""
        bare = EvalArm("none", "", None, 0.0)
        self._taught = await self._exams(self._whole, self._paper.items)
        self._general = await self._exams(bare, self._paper.probes)
        if self._paper.probes:
            self._bare_accuracy = fmean(await self._right(bare, self._paper.probes))
        self._bare_obeyed = await self._obeyed(bare)

    async def sit(self, arm: EvalArm) -> ArmAnswers:
        items = self._paper.items
        completions = await self._completions(arm, items, "asked")
        texts = [self._paper.about.conversation.decode(c.token_ids).strip() for c in completions]
        answered = list(zip(items, texts, strict=True))
        judged = [i.asked.scores(a) if i.known else (0.0, 0.0, True) for i, a in answered]
        words = [i.asked.words(a) if i.known else (0.0, 0.0) for i, a in answered]
        kl, agreement = compared(self._taught, await self._read(arm, _readings(self._taught)))
        has_answers = all(i.known for i in items)
        right = [score for score, _, _ in judged]
        low, high = wilson_interval(round(sum(right)), len(right))
        wanted = [i.right for i in items if i.right is not None] or _readings(self._taught)
        answers_read, nll = await self._perplexity(arm, wanted)
        free, free_rows = await self._free_running(arm) if self._spec.free_tokens else (None, ())
        obeyed = await self._obeyed(arm)
        heads = self._paper.heads
        learned = self._paper.about.layout.contexts.values()
        sizes = [sum(len(heads[c]) for c in contexts) for contexts in learned]
        row = EvalRow(
            arm=arm.name, kind=arm.kind, run=arm.run, mesh=arm.mesh, step=arm.step,
            budget=arm.budget, prefix_tokens=arm.tokens, document_tokens=fmean(sizes),
            compression=None if arm.prefixes is None else fmean(sizes) / arm.tokens,
            trained_tokens=arm.trained_tokens, n=len(items),
            accuracy=fmean(right) if has_answers else None,
            ci95=[low, high] if has_answers else None,
            exact=fmean(e for e, _ in words) if has_answers else None,
            f1=fmean(f for _, f in words) if has_answers else None,
            parse_failures=sum(not gave for _, _, gave in judged),
            answers=answers_read,
            passages=(await self._perplexity(arm, self._paper.passages))[0]
            if self._paper.passages else None,
            after_own=await self._after_own(arm)
            if self._paper.passages and self._spec.own_tokens else None,
            teacher=_agreement(kl, agreement, self._taught),
            forgetting=await self._forgetting(arm) if self._paper.probes else None,
            free_running=free,
            formats=Formats(
                obeyed=fmean(obeyed), obeyed_without=fmean(self._bare_obeyed), n=len(obeyed)
            )
            if obeyed else None,
        )  # fmt: skip
        answers = [
            self._answer(arm, i, c, a, nll.get(i.asked.id))
            for i, c, a in zip(items, completions, texts, strict=True)
        ]
        rows = tuple(
            {
                **to_row(answer, arm.name, arm.step, sampled=False),
                "gave": gave, "exact": e if i.known else None, "f1": f if i.known else None,
                "kl": k, "top1": s,
            }
            for i, answer, (_, _, gave), (e, f), k, s in zip(
                items, answers, judged, words, kl, agreement, strict=True
            )
        )  # fmt: skip
        return ArmAnswers(row, tuple(right if has_answers else agreement), (*rows, *free_rows))

    def _answer(
        self, arm: EvalArm, item: EvalQuestion, completion: Completion, text: str, nll: float | None
    ) -> Answer:
        """Return the record of an arm's answer to a question."""
        about = self._paper.about
        answer = users_answer(item.asked, completion, text, nll, about.hashes)
        if not item.known:
            answer = replace(answer, right=None)
        return replace(
            answer,
            cartridge=arm.routed[item.prompt_ids].name.removeprefix("cartridge/")
            if arm.routed
            else about.layout.cartridge_of(item.asked.document),
            contexts=tuple(item.about.split(SEPARATOR)),
        )

    async def _free_running(self, arm: EvalArm) -> tuple[FreeRunning, tuple[dict[str, Any], ...]]:
        """Return what an arm does by itself, with a row of each text and each sampled answer."""
        greedy = await self._own_texts(arm, sampled=False)
        sampled = await self._own_texts(arm, sampled=True)
        items, ambiguous = self._paper.items, self._paper.ambiguous
        drawn = await self._completions(arm, items, "sampled", temperature=1.0)
        decode = self._paper.about.conversation.decode
        answers = [
            self._answer(arm, i, c, decode(c.token_ids).strip(), None)
            for i, c in zip(items, drawn, strict=True)
        ]
        answers = [
            replace(a, right=None) if (a.document, a.id) in ambiguous else a for a in answers
        ]
        right = [a.right for a in answers if a.right is not None]
        free = FreeRunning(
            greedy=summary([t for _, t in greedy]) if greedy else None,
            sampled=summary([t for _, t in sampled]) if sampled else None,
            accuracy=fmean(right) if right else None,
            ci95=list(wilson_interval(round(sum(right)), len(right))) if right else None,
            n=len(right),
            ambiguous=len(ambiguous),
        )
        rows = [
            *(dict(to_row(a, arm.name, arm.step, sampled=True)) for a in answers),
            *(self._text_row(arm, p, t) for p, t in (*greedy, *sampled)),
        ]
        return free, tuple(rows)

    async def _own_texts(
        self, arm: EvalArm, *, sampled: bool
    ) -> list[tuple[QuestionReading, WrittenText]]:
        """Have the arm write where each passage is asked for, and the document's teacher read it.
        Sampling is untruncated, at temperature 1."""
        passages, about = self._paper.passages, self._paper.about
        how = "sampled" if sampled else "greedy"
        tokens = self._spec.free_tokens
        sampling = Sampling(temperature=1.0 if sampled else 0.0, max_tokens=tokens)
        completions = await self._all(
            [
                self._request(arm, f"{arm.name}/own/{how}/{p.id}", p, sampling,
                              stream_seed(f"eval/own/{self._spec.seed}/{p.id}"))
                for p in passages
            ]
        )  # fmt: skip
        readings = [
            replace(p, answer_ids=c.token_ids) for p, c in zip(passages, completions, strict=True)
        ]
        read = await self._read(self._whole, readings)
        return [
            (
                p,
                WrittenText(
                    text=about.conversation.decode(c.token_ids),
                    document=about.texts[p.about],
                    logprobs=c.logprobs,
                    teacher_logprobs=r.prompt_logprobs[-len(c.token_ids) :],
                    matches=tuple(
                        a == b
                        for a, b in zip(
                            c.token_ids, r.prompt_likeliest[-len(c.token_ids) :], strict=True
                        )
                    ),
                    ended=c.finish_reason == "stop",
                    sampled=sampled,
                ),
            )
            for p, c, r in zip(passages, completions, read, strict=True)
        ]

    def _text_row(
        self, arm: EvalArm, passage: QuestionReading, text: WrittenText
    ) -> dict[str, Any]:
        """Return the row of an arm's own text; each passage is a fact of its own."""
        about = self._paper.about
        document = about.layout.documents[passage.about]
        prompt = about.conversation.decode(passage.prompt_ids)
        answer = Answer(
            id=passage.id, fact=passage.id, document=document,
            document_hash=about.hashes[document], question_hash=hash_of(prompt), text=text.text,
            tokens=len(text.logprobs), cartridge=about.layout.cartridge_of(document),
            contexts=(passage.about,),
        )  # fmt: skip
        sentences = text.sentences
        return {
            **to_row(answer, arm.name, arm.step, sampled=text.sampled),
            "accepted": text.accepted, "own_kl": text.kl,
            "precision": fmean(map(float, sentences)) if sentences else None,
        }  # fmt: skip

    async def _obeyed(self, arm: EvalArm) -> list[float]:
        """Return 1 or 0 for each format prompt."""
        items = [question for _, question in self._paper.formats]
        completions = await self._completions(arm, items, "format")
        decode = self._paper.about.conversation.decode
        return [
            float(prompt.obeys(decode(c.token_ids).strip()))
            for (prompt, _), c in zip(self._paper.formats, completions, strict=True)
        ]

    async def _forgetting(self, arm: EvalArm) -> Forgetting:
        kl, agreement = compared(self._general, await self._read(arm, _readings(self._general)))
        mean = fmean(kl)
        return Forgetting(
            kl=mean,
            perplexity_ratio=math.exp(min(mean, 700.0)),
            top1=fmean(agreement),
            tokens=sum(len(e.answer_ids) for e in self._general),
            accuracy=fmean(await self._right(arm, self._paper.probes)),
            accuracy_without=self._bare_accuracy,
            n=len(self._general),
        )

    async def _right(self, arm: EvalArm, items: Sequence[EvalQuestion]) -> list[float]:
        completions = await self._completions(arm, items, "probe")
        answers = [self._paper.about.conversation.decode(c.token_ids).strip() for c in completions]
        return [i.asked.scores(a)[0] for i, a in zip(items, answers, strict=True)]

    async def _perplexity(
        self, arm: EvalArm, readings: Sequence[QuestionReading]
    ) -> tuple[Perplexity, dict[str, float | None]]:
        """Return the perplexity of all readings, and the mean loss of each (nats) by its id."""
        read = await self._read(arm, readings)
        tokens = sum(len(r.answer_ids) for r in readings)
        scored = list(zip(readings, read, strict=True))
        lost = -math.fsum(x for r, c in scored for x in c.prompt_logprobs[-len(r.answer_ids) :])
        # A diverged prefix may make a token all but impossible: keep the value within a float.
        perplexity = Perplexity(value=math.exp(min(lost / tokens, 700.0)), tokens=tokens)
        return perplexity, {r.id: mean_nll(c, len(r.answer_ids)) for r, c in scored}

    async def _after_own(self, arm: EvalArm) -> AfterOwn | None:
        """Have the arm begin each passage greedily, and the document's teacher go on by sampling;
        return how likely the teacher's words are to the arm, None where it ended all of them."""
        passages, tokens = self._paper.passages, self._spec.own_tokens
        greedy = Sampling(temperature=0.0, max_tokens=tokens)
        openings = await self._all(
            [self._request(arm, f"{arm.name}/begins/{p.id}", p, greedy, 0) for p in passages]
        )
        continued = [
            replace(
                p, prompt_ids=(*p.prompt_ids, *c.token_ids), bare_ids=(*p.bare_ids, *c.token_ids)
            )
            for p, c in zip(passages, openings, strict=True)
            if c.finish_reason == "length"  # after its end token nothing goes on
        ]
        sampled = Sampling(max_tokens=tokens)
        gone_on = await self._all(
            [
                self._request(
                    self._whole, f"{arm.name}/goes_on/{p.id}", p, sampled,
                    stream_seed(f"eval/{self._spec.seed}/{p.id}"),
                )
                for p in continued
            ]
        )  # fmt: skip
        readings = [
            replace(p, answer_ids=c.token_ids) for p, c in zip(continued, gone_on, strict=True)
        ]
        if not readings:
            return None
        perplexity, nll = await self._perplexity(arm, readings)
        return AfterOwn(
            **perplexity, nll={key: loss for key, loss in nll.items() if loss is not None}
        )

    async def _exams(self, arm: EvalArm, items: Sequence[EvalQuestion]) -> list[HeldOutQuestion]:
        """Sample an arm's answers and its own log-probabilities of them: untruncated, at
        temperature 1, or the mean of log T - log S would not estimate KL(T || S)."""
        sampling = Sampling(max_tokens=self._max_tokens)
        completions = await self._all(
            [
                self._request(arm, f"{arm.name}/said/{i.asked.id}", i, sampling,
                              stream_seed(f"eval/{self._spec.seed}/{i.asked.id}"))
                for i in items
            ]
        )  # fmt: skip
        readings = [
            QuestionReading(i.asked.id, i.about, i.prompt_ids, i.bare_ids, c.token_ids)
            for i, c in zip(items, completions, strict=True)
        ]
        read = await self._read(arm, readings)
        return [
            HeldOutQuestion(
                StudyQuestion(r.id, r.about, "", (), r.prompt_ids, ()), r.bare_ids, r.answer_ids,
                c.prompt_logprobs[-len(r.answer_ids) :], c.prompt_likeliest[-len(r.answer_ids) :],
            )
            for r, c in zip(readings, read, strict=True)
        ]  # fmt: skip

    async def _completions(
        self, arm: EvalArm, items: Sequence[EvalQuestion], what: str, temperature: float = 0.0
    ) -> list[Completion]:
        sampling = Sampling(temperature=temperature, max_tokens=self._max_tokens)
        return await self._all(
            [
                self._request(arm, f"{arm.name}/{what}/{i.asked.id}", i, sampling,
                              stream_seed(f"eval/{what}/{self._spec.seed}/{i.asked.id}"))
                for i in items
            ]
        )  # fmt: skip

    async def _read(self, arm: EvalArm, readings: Sequence[QuestionReading]) -> list[Completion]:
        sampling = Sampling(temperature=0.0, max_tokens=1)
        return await self._all(
            [
                self._request(arm, f"{arm.name}/read/{r.id}", r, sampling, 0, r.answer_ids)
                for r in readings
            ]
        )

    def _request(
        self, arm: EvalArm, name: str, item: EvalQuestion | QuestionReading, sampling: Sampling,
        seed: int,
        answer: tuple[int, ...] = (),
    ) -> GenerateRequest:  # fmt: skip
        """Return a request; `answer` goes to the end of the prompt for its log-probabilities."""
        bare = arm.prefixes is None
        ids = item.bare_ids if bare else item.prompt_ids
        prefix = BARE if arm.prefixes is None else arm.prefixes[item.about]
        prefix = arm.routed.get(item.prompt_ids, prefix)
        if arm.passages is not None:
            ids, prefix = arm.passages(item.about, ids, prefix)
        return GenerateRequest(
            name, (*ids, *answer), prefix, sampling, seed, prompt_logprobs=bool(answer)
        )

    async def _all(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        completions: list[Completion] = []
        for start in range(0, len(requests), AT_ONCE):
            completions += await self._generate(requests[start : start + AT_ONCE])
        for completion in completions:
            if completion.error:
                raise PublishError(f"{completion.request_id}: {completion.error}")
        return completions


def _readings(exams: Sequence[HeldOutQuestion]) -> list[QuestionReading]:
    return [
        QuestionReading(
            e.studied.key, e.studied.document, e.studied.prompt_ids, e.bare_ids, e.answer_ids
        )
        for e in exams
    ]  # fmt: skip


def _agreement(
    kl: Sequence[float], agreement: Sequence[float], exams: Sequence[HeldOutQuestion]
) -> Agreement:
    mean = fmean(kl)
    return Agreement(
        kl=mean,
        kl_ci95=list(mean_interval(kl, AT_LEAST_ZERO) or (mean, mean)),
        top1=fmean(agreement),
        tokens=sum(len(e.answer_ids) for e in exams),
    )
