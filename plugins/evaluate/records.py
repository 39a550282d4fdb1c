"""Define the contents of eval.json, which `forge eval` writes."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from cartridge_forge.plugins.statistics.results import Agreement


class Perplexity(TypedDict):
    """Hold exp of a token's mean negative log-probability: `{"value": 3.2, "tokens": 1210}`."""

    value: float
    tokens: int


class Forgetting(TypedDict):
    """Measure how a prefix changes answers to questions that are unrelated to its document.

    `{"kl": 0.04, "perplexity_ratio": 1.04, "top1": 0.97, "tokens": 480, "accuracy": 0.88,
    "accuracy_without": 0.92, "n": 24}`: on answers that the model sampled without a prefix, `kl`
    estimates KL(bare || with the prefix) in nats a token. `perplexity_ratio` is exp of it:
    perplexity with the prefix over perplexity without. Both accuracies are those of greedy answers.
    """

    kl: float
    perplexity_ratio: float
    top1: float
    tokens: int
    accuracy: float
    accuracy_without: float
    n: int


class AfterOwn(TypedDict):
    """Hold the perplexity a token of what the document's teacher writes after an arm's own words,
    with the mean loss of each passage, nats a token: `{"value": 6.2, "tokens": 800, "nll":
    {"patient_01/passage/0": 1.83}}`."""

    value: float
    tokens: int
    nll: dict[str, float]


class OwnText(TypedDict):
    """Measure what an arm writes by itself (`plugins.evaluate.own_text`), over `tokens`.

    `{"tokens": 384, "teacher_nll": 0.41, "kl": 0.22, "accepted": 0.91, "until_refused": 0.68,
    "sentences": 21, "precision": 0.81}`: `kl` is null for greedy texts, `precision` where no
    sentence was ended.
    """

    tokens: int
    teacher_nll: float
    kl: float | None
    accepted: float
    until_refused: float
    sentences: int
    precision: float | None


class FreeRunning(TypedDict):
    """Hold what an arm does without being led: `greedy` and `sampled` are its own texts where
    passages are asked for, null without a passage; `accuracy` is that of sampled answers to `n`
    questions, null where no answers are known or all questions are ambiguous. `ambiguous` counts
    the questions that are left out of it, for their words fit several documents of a cartridge."""

    greedy: OwnText | None
    sampled: OwnText | None
    accuracy: float | None
    ci95: list[float] | None
    n: int
    ambiguous: int


class Formats(TypedDict):
    """Hold the share of prompts (`plugins.evaluate.own_text`) whose form a greedy response obeys,
    over the arm's prefix and without any: `{"obeyed": 0.75, "obeyed_without": 0.83, "n": 12}`."""

    obeyed: float
    obeyed_without: float
    n: int


class EvalRow(TypedDict):
    """Hold the measurements of one arm.

    `{"arm": "on_policy", "kind": "on_policy", "run": "20260726T101530Z-3fa9", "mesh": "longhealth",
    "step": 180, "budget": 28, "prefix_tokens": 28.0, "document_tokens": 231.0, "compression": 8.25,
    "trained_tokens": 107154, "n": 258, "accuracy": 0.853, "ci95": [0.804, 0.891], "exact": 0.85,
    "f1": 0.86, "parse_failures": 17, ...}`

    `run` is "" and `step` 0 for arms that no run trained. Token counts are means over documents.
    `budget` is the cartridge's P, null where nothing bounds the prefix. `compression` is null
    without any document. Accuracy, exact match and F1 are null where no answers are known. A value
    that was not measured is null.
    """

    arm: str
    kind: str
    run: str
    mesh: str
    step: int
    budget: int | None
    prefix_tokens: float
    document_tokens: float
    compression: float | None
    trained_tokens: int
    n: int
    accuracy: float | None
    ci95: list[float] | None
    exact: float | None
    f1: float | None
    parse_failures: int
    answers: Perplexity
    passages: Perplexity | None
    after_own: NotRequired[AfterOwn | None]
    teacher: Agreement
    forgetting: Forgetting | None
    free_running: NotRequired[FreeRunning | None]
    formats: NotRequired[Formats | None]


class PairedDifference(TypedDict):
    """Compare arm `b` with arm `a` question by question, by a paired bootstrap of b - a.

    `{"a": "offline", "b": "on_policy", "difference": 0.031, "ci95": [-0.01, 0.07], "share": 0.14}`:
    `share` is twice the share of resamples on the other side of zero, at most 1.
    """

    a: str
    b: str
    difference: float
    ci95: list[float]
    share: float


class Contamination(TypedDict):
    """Count training prompts that duplicate a question: `{"rule": "fail", "alike": 0.8, "prompts":
    10080, "questions": 258, "exact": 0, "near": 0, "file": ""}`; `file` lists them one by one."""

    rule: Literal["fail", "warn"]
    alike: float
    prompts: int
    questions: int
    exact: int
    near: int
    file: str


class Evaluation(TypedDict):
    """Hold eval.json. `metric` is what `pairs` compare: "accuracy", or "agreement" (the share of
    the teacher's tokens that are an arm's most likely) where no answers are known. `resampled` is
    what the bootstrap draws first, `clusters` how many of them there are."""

    schema: int
    model: str
    source: str
    runs: list[str]
    metric: Literal["accuracy", "agreement"]
    resampled: Literal["documents", "facts"]
    clusters: int
    rows: list[EvalRow]
    pairs: list[PairedDifference]
    contamination: Contamination
    notes: list[str]
    spec: dict[str, int | str | None]
