"""Make the tables of docs/studies/real.md and docs/studies/lengths.md from the records of
configs/sweep_real.yaml and configs/real/.

The unit is an article; its value of an arm is the mean over the seeds. An arm has three outcomes,
nats a token: of the right answers (kept by the run), of passages, and of what the document's
teacher writes after the arm's own words (both by `forge eval`, where the run's cartridges are
kept).

    python -m benchmarks.results.real_study    draw the plot of docs/studies/real.md
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.results import records
from benchmarks.results.study_tables import Cells, kept_trials, p_value
from forge_run.report.plots import Plot, hue, legend
from protocols.files import REPOSITORY, write_atomically
from protocols.records.intervals import holm, mean_interval, mean_p

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_MODEL = ("model.path=./none",)  # the sweep is read where its model is not kept
# By study, an arm and what it is compared with, as they were registered.
PRIMARY = {
    "sweep_real": (
        ("128: on policy", "128: offline"),
        ("128: recitation first", "128: offline"),
    ),
    "real/sweep_lengths": (("warm: long answers", "warm: short answers"),),
    "real/sweep_lengths_same_start": (("same start: long answers", "same start: short answers"),),
}
SECONDARY = {
    "sweep_real": (
        ("32: on policy", "32: offline"),
        ("32: recitation first", "32: offline"),
        ("512: on policy", "512: offline"),
        ("512: recitation first", "512: offline"),
        ("128: attention matching", "128: first tokens"),
        ("128: matching and recitation", "128: recitation first"),
        ("128: on policy, reverse KL", "128: on policy"),
        ("128: on policy, temperature 0.3", "128: on policy"),
    ),
    "real/sweep_lengths": (("cold: long answers", "cold: short answers"),),
    "real/sweep_starts": (
        ("32: attention matching", "32: first tokens"),
        ("512: attention matching", "512: first tokens"),
    ),
    "real/sweep_seconds": (
        ("32: on policy", "32: offline"),
        ("32: recitation first", "32: offline"),
        ("512: on policy", "512: offline"),
        ("512: recitation first", "512: offline"),
    ),
}
ANSWERS, AFTER_OWN = "answers", "after own words"
# The outcomes of a study that registered one of the two, and the study that has its other arms.
ASKED = {"real/sweep_starts": (ANSWERS,), "real/sweep_seconds": (AFTER_OWN,)}
OTHERS = {"real/sweep_starts": "sweep_real"}
PLOT = REPOSITORY / "docs" / "studies" / "real.svg"
LENGTHS = (32, 128, 512)
CURVES = ("first tokens", "attention matching", "on policy", "recitation first", "offline")
ENDS = {"none": "no document", "document": "whole document"}
Losses = dict[str, list[float]]  # by article, one value a seed


@dataclass
class ArmLosses:
    """Hold the outcomes of an arm: `answers` and `after_own` by article, `passages` and `tokens`,
    those it was trained on, by seed, and `seconds` of its steps, where they were kept."""

    answers: Losses = field(default_factory=lambda: defaultdict(list))
    after_own: Losses = field(default_factory=lambda: defaultdict(list))
    passages: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def outcomes(study: str) -> dict[str, ArmLosses]:
    """Return the outcomes of every arm of configs/STUDY.yaml, in its order, as far as runs are
    kept."""
    found: dict[str, ArmLosses] = defaultdict(ArmLosses)
    for record, trial in kept_trials(study, NO_MODEL):
        answers, evaluated = _answers(record), _evaluated(record)
        if trial.spec.learn.cartridge.init != "first_tokens":
            evaluated.pop("untrained", None)  # `forge eval` starts that arm from the first tokens
        tokens, steps = defaultdict[str, int](int), defaultdict[str, int](int)
        for row in records.rows(record, "metrics.jsonl", records.HOME):
            tokens[row["arm"]] += row["tokens"]
            steps[row["arm"]] += 1
        results = records.whole(record, "results.json", records.HOME)
        each = results.get("step_seconds", {"on_policy": results["phases"].get("step", 0.0)})
        for arm, shown in trial.arms:
            own = found[shown]
            for article, losses in answers[arm].items():
                own.answers[article].append(fmean(losses))
            own.tokens.append(tokens[arm])
            if arm in each:
                own.seconds.append(each[arm] * steps[arm])
            if arm in evaluated:
                passages, after_own = evaluated[arm]
                own.passages.append(passages)
                for article, losses in after_own.items():
                    own.after_own[article].append(fmean(losses))
    return found


def _answers(record: str) -> Mapping[str, Losses]:
    """Return the losses of the right answers by arm and article, without the held-out prompts."""
    found: dict[str, Losses] = defaultdict(lambda: defaultdict(list))
    for row in records.rows(record, "answers.jsonl", records.HOME):
        if not row["sampled"] and row["right"] is not None:
            found[row["arm"]][row["document"]].append(row["nll"])
    return found


def _evaluated(record: str) -> dict[str, tuple[float, Losses]]:
    """Return, by arm, the loss of passages and by article those after own words. The arm of a warm
    start is told as "hybrid" by `forge eval`."""
    if not (records.HOME / record / "eval.json").is_file():
        return {}
    found = {}
    for row in records.whole(record, "eval.json", records.HOME)["rows"]:
        by_article: Losses = defaultdict(list)
        for passage, loss in row["after_own"]["nll"].items():
            by_article[passage.split("/")[0]].append(loss)
        kind = "on_policy" if row["kind"] == "hybrid" else row["kind"]
        found[kind] = (math.log(row["passages"]["value"]), by_article)
    return found


def real_arms(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows: means of every arm over the articles, with Student's 95% intervals."""
    body = [
        [arm, str(len(own.tokens)), f"{fmean(own.tokens):,.0f}",
         f"{fmean(own.seconds):,.0f}" if own.seconds else "",
         *_shown(_means(own.answers).values(), ".2f"),
         f"{fmean(own.passages):.2f}" if own.passages else "",
         *_shown(_means(own.after_own).values(), ".2f")]
        for arm, own in outcomes(study).items()
    ]  # fmt: skip
    heads = ["arm", "seeds", "trained tokens", "seconds", "answers", "95% interval", "passages"]
    return [*heads, "after own words", "95% interval"], body


def real_primary(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows of the comparisons that decide the study."""
    return _compared(study, PRIMARY[study])


def real_secondary(study: str) -> tuple[Cells, list[Cells]]:
    """Return heads and rows of the comparisons beside them."""
    return _compared(study, SECONDARY[study])


def _compared(study: str, asked: Sequence[tuple[str, str]]) -> tuple[Cells, list[Cells]]:
    """Return paired differences over articles, with p-values adjusted for all of them together."""
    found = outcomes(study)
    if study in OTHERS:
        found = outcomes(OTHERS[study]) | found
    tests: list[tuple[Cells, list[float]]] = []
    for arm, other in asked:
        a, b = found[arm], found[other]
        for name, ours, theirs in (
            (ANSWERS, _means(a.answers), _means(b.answers)),
            (AFTER_OWN, _means(a.after_own), _means(b.after_own)),
        ):
            paired = [ours[article] - theirs[article] for article in ours if article in theirs]
            if paired and name in ASKED.get(study, (ANSWERS, AFTER_OWN)):
                tests.append(([arm, other, name, str(len(paired))], paired))
    adjusted = holm([mean_p(paired) for _, paired in tests])
    body = [
        [*shown, *_shown(paired, "+.2f"), p_value(p), decided(paired)]
        for (shown, paired), p in zip(tests, adjusted, strict=True)
    ]
    heads = ["arm", "over", "outcome", "articles", "difference", "95% interval", "p (Holm)"]
    return [*heads, "decided"], body


def decided(paired: Sequence[float]) -> str:
    """Return what the interval decides, by the rule of the study: 0.1 nats matter."""
    low, high = mean_interval(paired) or (-math.inf, math.inf)
    if low > 0:
        return "worse"
    if high < 0:
        return "better"
    return "no difference that matters" if low >= -0.1 and high <= 0.1 else "open"


def _means(losses: Losses) -> dict[str, float]:
    """Return the mean over the seeds of each article."""
    return {article: fmean(values) for article, values in losses.items()}


def _shown(values: Iterable[float], form: str) -> Cells:
    own = list(values)
    if not own:
        return ["", ""]
    low, high = mean_interval(own) or (math.nan, math.nan)
    return [format(fmean(own), form), f"{low:{form}} to {high:{form}}"]


def plot() -> str:
    """Return an SVG of the losses of the right answers by the length: means over articles
    and seeds of the kept runs of configs/sweep_real.yaml and configs/real/sweep_starts.yaml."""
    known = outcomes("sweep_real") | outcomes("real/sweep_starts")
    found = {arm: fmean(map(fmean, own.answers.values())) for arm, own in known.items()}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for end, shown in ENDS.items():
            axes.axhline(found[end], linestyle=":", color="gray", linewidth=1)
            axes.annotate(shown, (LENGTHS[-1], found[end]), ha="right", va="bottom", fontsize=8)
        for index, arm in enumerate(CURVES):
            losses = [found[f"{p}: {arm}"] for p in LENGTHS]
            axes.plot(LENGTHS, losses, "o-", color=hue(index), label=arm)
        axes.set(xscale="log", xlabel="tokens of the cartridge", ylabel="loss, nats a token")
        axes.set_xticks(LENGTHS, map(str, LENGTHS))
        axes.minorticks_off()
        legend(axes, ncols=2)

    return Plot("The loss of the right answers by the cartridge's length", "", draw).alone


if __name__ == "__main__":
    write_atomically(PLOT, plot())
