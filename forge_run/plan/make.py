"""Choose steps, batch and cartridge so that a run over a user's documents fits its minutes. Pure.

seconds = start + reading + matching + self-study + steps * (rollout + teacher + training) + exam

The steps train on the documents' own words (`train.warm_start` of configs/documents.yaml), which
nobody writes and the teacher reads once. Ending on text of the student's own is worse
(studies/real: 0.21 nats). Verified text is not shown to teach more than the teacher's own
(studies/verified), and takes the seconds of several steps on own words: a user who sets fewer warm
steps gets it, and the plan counts it (docs/adr/0038-verified-rollouts.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cartridge_forge.forge_run.plan.documents import documents_text
from cartridge_forge.plugins.documents.spec.documents import WRITTEN_KINDS, StudyKind
from cartridge_forge.plugins.evaluate.calibration import MachineRates
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.formatting import bytes_text
from cartridge_forge.protocols.errors import DataError

RATIO = 10  # document tokens for each of a cartridge's, where the user says nothing
LEAST_TOKENS, MOST_TOKENS = 32, 512  # of a cartridge that is chosen
BATCHES = (16, 8, 4)  # prompts of a step, the first that leaves GOOD_STEPS
GOOD_STEPS, LEAST_STEPS = 30, 4
ANSWER_TOKENS, QUESTION_TOKENS = 64, 48
WORDS_TOKENS = 32  # of an answer in the document's own words, mean
STUDY_SHARE = 0.25  # of the minutes, at most, for writing questions
LEAST_QUESTIONS = 8
EXAM_QUESTIONS = 8
START_SECONDS, STEP_SECONDS = 20.0, 1.0  # of processes; of a step beside the model's work
# Attention matching takes so many times the reading of its rows: at most so many tokens of a
# document and of study (plugins.library.reference_rows; studies.real.closed_form). A first
# cartridge's gain is measured on so many more.
MATCHING, MATCHED_TOKENS, STUDIED_TOKENS = 6.0, 1024, 1024
GAIN_TOKENS = 3072
# A verified rollout takes so many times the seconds of a plain one where its rows share a document
# (studies/verified: 4.8 ms of sampling a trained token for 2.6).
VERIFIED_RATIO = 1.85
SLOWER = 2  # a document's later tokens read all before them; measured on 512 tokens
READERS = 3  # generator, teacher and trainer each hold the model
PROCESS_BYTES = 300 * 1024**2  # of one process without the model


# Measured where the user has questions: a cartridge beside what else as many tokens could hold.
ARMS_OF_QUESTIONS = ("none", "document", "retrieved", "on_policy", "retrieved_cartridge")


@dataclass(frozen=True)
class ModelBytes:
    """Hold the bytes of a model's weights in memory, and of one token's keys and values."""

    weights: int
    token: int


@dataclass(frozen=True)
class MakePlan:
    """Hold what a run is to be: `tokens` of each cartridge, `questions` about each document,
    `prompts` of a step, expected seconds, and bytes of memory."""

    documents: int
    parts: int  # of long ones, which each get a cartridge
    document_tokens: int
    tokens: int
    questions: int
    prompts: int
    steps: int
    start_seconds: float
    step_seconds: float
    seconds: float
    memory: int
    rates: MachineRates
    warm: int  # steps on the documents' own words first
    arms: tuple[str, ...]  # that are measured

    @property
    def sets(self) -> list[str]:
        """Return the plan as overrides of meshes/documents.yaml."""
        return [
            f"cartridge.tokens={self.tokens}",
            f"self_study.questions={self.questions}",
            f"self_study.question_tokens={QUESTION_TOKENS}",
            f"rollout.prompts={self.prompts}",
            f"rollout.max_tokens={ANSWER_TOKENS}",
            f"train.steps={self.steps}",
            f"train.warmup_steps={min(6, self.steps // 4)}",
            f"train.checkpoint_every={max(1, self.steps // 3)}",
            f"evaluate.arms=[{','.join(self.arms)}]",
            f"evaluate.questions={EXAM_QUESTIONS}",
            f"evaluate.max_tokens={ANSWER_TOKENS}",
            "evaluate.probe_every=0",
            "roles.generator.replicas=1",
            *([f"train.warm_start.steps={self.warm}"] if self.warm else []),
        ]

    def told(self) -> list[str]:
        """Return the plan in plain English, a line each."""
        rates = self.rates
        cartridge_text = "one cartridge" if self.parts == 1 else f"{self.parts} cartridges"
        of_parts = "part" if self.parts > self.documents else "document"
        return [
            f"{_documents(self.documents, self.parts)} of {self.document_tokens:,} tokens in "
            f"all; {cartridge_text} of {self.tokens} tokens, "
            f"{self.document_tokens / self.parts / self.tokens:.1f}x fewer",
            f"this machine reads {rates.forward:,.0f} tokens a second, trains on "
            f"{rates.backward:,.0f} and writes {rates.decode:,.0f}",
            f"{self.questions} questions about each {of_parts}, then {self.steps} steps of "
            f"{self.prompts} answers, {self.step_seconds:.0f} s each",
            f"about {self.seconds / 60:.0f} minutes: the first step after "
            f"{self.start_seconds / 60:.1f}; about {bytes_text(self.memory)} of memory",
        ]


def cartridge_tokens(counts: Sequence[int], tokens: int | None, ratio: float | None) -> int:
    """Return P for documents of so many tokens: as asked, by the ratio of the mean document to P,
    or by RATIO between LEAST_TOKENS and MOST_TOKENS. Documents that no cartridge of LEAST_TOKENS
    shortens do not count, unless there are no others. Raises DataError for a P below 2."""
    counted = [count for count in counts if count > LEAST_TOKENS] or counts
    mean = sum(counted) / len(counted)
    if tokens is None and ratio is None:
        return max(LEAST_TOKENS, min(MOST_TOKENS, round(mean / RATIO / 8) * 8))
    size = tokens if tokens is not None else round(mean / float(ratio or 1))
    if size < 2:
        option = f"--tokens {tokens}" if tokens is not None else f"--ratio {ratio:g}"
        raise DataError(f"{option} gives a cartridge of {size} tokens, and 2 is the least")
    return size


def planned(
    counts: Sequence[int], tokens: int, minutes: float, rates: MachineRates, learn: RsaLearn,
    size: ModelBytes, documents: int | None = None,
) -> MakePlan:  # fmt: skip
    """Return the plan for texts of so many tokens, which are parts of fewer `documents` where long
    ones are cut. Raises DataError, with the minutes that it takes, where not even LEAST_STEPS steps
    fit."""
    documents = len(counts) if documents is None else documents
    study = learn.self_study
    assert study is not None
    seconds, total = 60 * minutes, sum(counts)
    passage = min(max(counts), (study.min_chunk + study.max_chunk) / 2)
    asking = _written(study.mix) * (passage / rates.forward + QUESTION_TOKENS / rates.decode)
    questions = study.questions
    if asking:
        affordable = int(STUDY_SHARE * seconds / asking / len(counts))
        questions = max(LEAST_QUESTIONS, min(questions, affordable))
    reading = (SLOWER * total + _matching(counts, learn)) / rates.forward
    start = START_SECONDS + reading + questions * len(counts) * asking
    arms = ("on_policy",) if learn.data.questions is None else ARMS_OF_QUESTIONS
    exam = len(arms) * EXAM_QUESTIONS * ANSWER_TOKENS * (1 / rates.decode + 1 / rates.forward)
    exam += sum("retrieved" in arm for arm in arms) * EXAM_QUESTIONS * tokens / rates.forward
    remaining = seconds - start - exam
    first = learn.train.warm_start
    share = 0.0 if first is None else min(1.0, first.steps / learn.train.steps)
    rollouts = 1.0 if learn.rollout.verify is None else VERIFIED_RATIO
    for prompts in BATCHES:
        steps, step = _steps(remaining, prompts, questions * len(counts), rates, share, rollouts)
        if steps >= GOOD_STEPS:
            break
    if steps < LEAST_STEPS:
        needed = (start + exam + LEAST_STEPS * step) / 60
        raise DataError(
            f"{_documents(documents, len(counts))} of {total:,} tokens take at least "
            f"{needed:.0f} minutes here, and --minutes is {minutes:g}; raise it, or give fewer "
            "documents"
        )
    nbytes = READERS * size.weights + 2 * total * size.token + 2 * READERS * PROCESS_BYTES
    return MakePlan(
        documents, len(counts), total, tokens, questions, prompts, steps, start, step,
        start + steps * step + exam, nbytes, rates, round(steps * share), arms,
    )  # fmt: skip


def _matching(counts: Sequence[int], learn: RsaLearn) -> float:
    """Return the tokens whose reading takes as long as making the first cartridges."""
    if learn.cartridge.fresh != "attention_matching":
        return 0.0
    rows = sum(min(count, MATCHED_TOKENS) + STUDIED_TOKENS for count in counts)
    return MATCHING * rows + GAIN_TOKENS * len(counts)


def _written(mix: Mapping[StudyKind, float]) -> float:
    """Return the share of questions that the model writes; it reads a passage for each."""
    return sum(w for kind, w in mix.items() if kind in WRITTEN_KINDS) / sum(mix.values())


def _steps(
    seconds: float, prompts: int, questions: int, rates: MachineRates, share: float, rollouts: float
) -> tuple[int, float]:
    """Return how many steps of so many prompts fit, and the mean seconds of one. An answer is
    written in `rollouts` times the seconds of plain sampling, read by the teacher and trained on.
    In a `share` of the steps it is the document's own words, which nobody writes, and of which the
    teacher reads each of the `questions` once."""
    words, answer_tokens = QUESTION_TOKENS + WORDS_TOKENS, QUESTION_TOKENS + ANSWER_TOKENS
    write_seconds = ANSWER_TOKENS / rates.decode + QUESTION_TOKENS / rates.forward
    of_own = (
        rollouts * write_seconds + answer_tokens / rates.forward + answer_tokens / rates.backward
    )
    reading = words / rates.forward
    later = STEP_SECONDS + prompts * (share * words / rates.backward + (1 - share) * of_own)
    first = later + prompts * share * reading
    steps = max(int(seconds / first), int((seconds - questions * reading) / later))
    share_read = min(1.0, questions / max(1.0, steps * prompts * share))
    return steps, later + share_read * prompts * share * reading


def _documents(documents: int, parts: int) -> str:
    return "one document" if documents == parts == 1 else documents_text(documents, parts)
