"""Make the tables of README.md, docs/ and studies/ from the archives of raw results.

    table_lines("channels over_reference shift")    its lines; study, kind, and run, sweep or record

The unit of a sweep is a document, a desk or an article; an arm's value of it is the mean over the
seeds. Means have Student's 95% intervals over the units, shares of one run Wilson's, and p-values
are adjusted by Holm's method over the comparisons of one table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from statistics import fmean, median
from typing import Any

import yaml

from cartridge_forge.plugins.clinic.text import said_answer
from cartridge_forge.plugins.evaluate.compare import AnswerSource, compare_groups, grouped
from cartridge_forge.plugins.statistics.formatting import seconds_text
from cartridge_forge.plugins.statistics.intervals import (
    ANY,
    AT_LEAST_ZERO,
    SHARE_DIFFERENCE,
    holm,
    mean_p,
    wilson_interval,
)
from cartridge_forge.plugins.watch.console import duration, interval, percent
from studies import archive
from studies.accuracy import composition_tables as composition
from studies.archive import KeptRun, document, rows
from studies.kinds.kind_tables import (
    TRAINED,
    loss_comparisons,
    outcomes_by_kind,
    refusal_comparison,
)
from studies.on_policy.arms import main_job_forms, pilot_arms
from studies.tables.cells import (
    Units,
    counted,
    decided,
    p_value,
    paired,
    points,
    shares,
    spread,
    table,
)
from studies.tables.curricula import curriculum_arms, curriculum_differences
from studies.tables.registered import AFTER_OWN, ANSWERS, COMPARISONS, OTHER_ARMS, REGISTERED
from studies.verified import tables as verified

Cells = list[str]
Table = tuple[Sequence[str], list[Cells]]  # heads and body

ARM_NAMES = {
    "none": "no document",
    "document": "whole document in context",
    "untrained": "first 28 tokens, untrained",
    "offline": "offline, equal tokens",
    "on_policy": "**on policy**",
}
# Of a run that starts in closed form and ends with verified text.
CURRICULUM_NAMES = {"untrained": "28 tokens in closed form", "on_policy": "**verified**"}
PREFIXES = {
    "none": "nothing",
    "untrained": "first 28 tokens, untrained",
    "trained": "**the trained cartridge**",
    "whole": "the whole chart",
}
ARMS_OF_EXACT = {"alone": "none: the document alone", "lookup": "prompt look-up in the document"}
GOLD_ARMS = ("none", "untrained", "on_policy", "document")
STRATEGIES = {
    "self_consistency": "vote over whole answers",
    "part_vote": "vote over each part",
    "best_of_n": "best of N by confidence",
    "rsa": "aggregation",
}
VOTE, AGGREGATION = "self_consistency", "rsa"
LAST_STEPS = 5  # whose mean reward ends a run
MB = 1e6
DOCUMENT_OUTCOMES = (("right, points", 100.0, "+.1f"), ("nats a token", 1.0, "+.2f"))


# -- one run --------------------------------------------------------------------------------------


def greedy_rows(study: str, run: str) -> list[dict[str, Any]]:
    """Return the rows of a run's greedy answers."""
    return [row for row in rows(study, f"{run}/answers.jsonl") if not row["sampled"]]


def answer_counts(answers: Iterable[Mapping[str, Any]], arm: str) -> tuple[int, int, int]:
    """Return how many of an arm's answers are right, how many there are, and how many unread."""
    of_arm = [row for row in answers if row["arm"] == arm]
    right = sum(row["right"] == 1.0 for row in of_arm)
    return right, len(of_arm), sum(row["answer"] is None for row in of_arm)


def arms(study: str, run: str) -> Table:
    """Return greedy accuracy with its interval, arm by arm."""
    answers, names = greedy_rows(study, run), arm_names(study, run)
    body = []
    for arm in _arms_of(answers):
        accuracy, bounds = counted(*answer_counts(answers, arm)[:2])
        bold = "**" in names[arm]
        body.append([names[arm], f"**{accuracy}**" if bold else accuracy, bounds])
    return ["", "greedy", "95% interval"], body


def arms_in_full(study: str, run: str) -> Table:
    """Return greedy accuracy, its interval, unread answers, and sampled accuracy, arm by arm."""
    answers, names = list(rows(study, f"{run}/answers.jsonl")), arm_names(study, run)
    greedy = [row for row in answers if not row["sampled"]]
    sampled = [row for row in answers if row["sampled"]]
    body = []
    for arm in _arms_of(greedy):
        k, n, unread = answer_counts(greedy, arm)
        draws = counted(*answer_counts(sampled, arm)[:2])[0]
        body.append([names[arm], *counted(k, n), str(unread), draws])
    return ["", "greedy", "95% interval", "names no option", "sampled"], body


def arm_names(study: str, run: str) -> Mapping[str, str]:
    """Return the arms' names in tables, by what the run's spec makes of them."""
    learn = yaml.load(archive.text(study, f"{run}/spec.yaml"), yaml.CSafeLoader)["learn"]
    return ARM_NAMES | (CURRICULUM_NAMES if learn["rollout"].get("verify") else {})


def _arms_of(answers: Iterable[Mapping[str, Any]]) -> list[str]:
    present = {row["arm"] for row in answers}
    return [arm for arm in ARM_NAMES if arm in present]


def differences(study: str, run: str) -> Table:
    """Return paired differences of the trained arms over those before them, as `forge compare`."""
    answers: list[Any] = list(rows(study, f"{run}/answers.jsonl"))
    names = {arm: name.strip("*").partition(",")[0] for arm, name in arm_names(study, run).items()}
    body = []
    for one in compare_groups(
        grouped([AnswerSource(study, answers)], sampled=False),
        arms=("untrained", "offline", "on_policy"),
    ):
        scale, form = (100, "+.1f") if one.metric == "right" else (1, "+.3f")
        low, high = (format(scale * bound, form) for bound in one.ci95)
        unit = "right, points" if one.metric == "right" else "loss of the right answer, nats"
        body.append(
            [names[one.b], names[one.a], unit,
             format(scale * one.difference, form), f"{low} to {high}", f"{one.p_holm:.2g}"]
        )  # fmt: skip
    return ["", "over", "", "difference", "95% interval", "p, Holm"], body


def training(study: str, run: str) -> Table:
    """Return what a run trained: steps, tokens, doc_kl of the first and the last step."""
    steps, names = list(rows(study, f"{run}/metrics.jsonl")), arm_names(study, run)
    body = []
    for arm in ("on_policy", "offline"):
        of_arm = [row for row in steps if row["arm"] == arm]
        tokens, stale = (sum(row[key] for row in of_arm) for key in ("tokens", "stale_tokens"))
        body.append(
            [names[arm].strip("*").partition(",")[0], str(len(of_arm)), f"{tokens:,}", str(stale),
             f"{of_arm[0]['kl']:.3f}", f"{fmean(row['kl'] for row in of_arm[-10:]):.3f}"]
        )  # fmt: skip
    heads = ["", "steps", "trained tokens", "stale", "doc_kl, first step", "mean of the last ten"]
    return heads, body


def right_answers(study: str, run: str) -> Table:
    """Return each arm's loss of the right answers, nats a token, and the share of the gap that it
    closed."""
    gold = document(study, f"{run}/results.json")["gold"]
    body = [
        [arm, str(gold["n"]), f"{measured['nll']:.2f}", percent(measured["closed"]),
         interval(measured["ci95"])]
        for arm in GOLD_ARMS
        for measured in [gold["arms"][arm]]
    ]  # fmt: skip
    return ["arm", "questions", "loss of the right answers", "gap closed", "95%"], body


def articles(study: str, record: str) -> Table:
    """Return the losses of each article's right answers arm by arm, nats a token, and the share of
    the gap that its cartridge closed. The articles are no part of the repository."""
    measured = document(study, f"{record}.json")["articles"]
    body = []
    for name, one in measured.items():
        by_arm = one["gold"]["arms"]
        trained = by_arm["on_policy"]
        body.append(
            [name, f"{one['tokens']:,}", str(one["gold"]["n"]),
             *(f"{by_arm[arm]['nll']:.2f}" for arm in GOLD_ARMS),
             f"**{percent(trained['closed'])}** ({interval(trained['ci95'])})",
             percent(by_arm["untrained"]["closed"]), f"{one['tokens_trained']:,}",
             duration(one["wall_seconds"])]
        )  # fmt: skip
    closed, untrained = (
        percent(fmean(one["gold"]["arms"][arm]["closed"] for one in measured.values()))
        for arm in ("on_policy", "untrained")
    )
    heads = [
        "article", "tokens", "questions", "none", "untrained", "cartridge", "document",
        "gap closed (95%)", "untrained closes", "trained tokens", "whole run",
    ]  # fmt: skip
    return heads, [*body, ["mean", *[""] * 6, f"**{closed}**", untrained, "", ""]]


def answering(study: str, record: str) -> Table:
    """Return the loss of the right answers, F1 and contained answers of each article's arms."""
    arms = ("none", "document", "retrieved", "untrained", "trained")
    body = []
    for row in _results(study, record):
        title = f"{row['article']}, P = {row['tokens']}, {row['arms']['none']['n']} questions"
        measured = [row["arms"][arm] for arm in arms]
        body.append([title, "loss", *(f"{one['nll']:.2f}" for one in measured)])
        body.append(["", "F1", *(f"{one['f1']:.2f}" for one in measured)])
        body.append(["", "contained", *(percent(one["contained"]) for one in measured)])
    return ["article", "outcome", *arms], body


def closed_form(study: str, records: str) -> Table:
    """Return both outcomes of each start of the articles of records, joined by commas, with the
    ratios of KL and seconds to those of the start before."""
    articles: dict[str, Any] = {}
    for record in records.split(","):
        articles |= _results(study, record)
    names = list(dict.fromkeys(name for one in articles.values() for name in one["starts"]))
    reference = next(name for name in names if name.startswith("of "))
    titles = {name: "the start before" if name == reference else name for name in names}

    def cells(measures: Sequence[Mapping[str, Any]]) -> list[str]:
        gap, kl, agreement, ratio, seconds = (
            fmean(one[key] for one in measures) for key in ("gap", "kl", "same", "ratio", "cost")
        )
        return [percent(gap), f"{kl:.3f}", f"{ratio:.2f}", percent(agreement), f"{seconds:.2f}"]

    body: list[list[str]] = []
    by_start: dict[str, list[Mapping[str, Any]]] = {name: [] for name in names}
    for article, one in articles.items():
        base = one["starts"][reference]
        for name, measures in one["starts"].items():
            row = {**measures, "ratio": measures["kl"] / base["kl"],
                   "cost": measures["seconds"] / base["seconds"]}  # fmt: skip
            by_start[name].append(row)
            title = f"{article}, {one['tokens']:,} tokens, {one['questions']} questions"
            body.append([title, titles[name], *cells([row])])
    for name, rows_of_start in by_start.items():
        if len(rows_of_start) == len(articles):
            body.append(["**mean**", titles[name], *cells(rows_of_start)])
    heads = ["article", "start", "gap closed", "KL", "KL, over before", "same token"]
    heads.append("seconds, over before")
    return heads, body


# -- benchmarks -----------------------------------------------------------------------------------


def over_prompt(study: str, record: str) -> Table:
    """Return tokens/s with a cartridge and with as many cached prompt tokens, and their ratios."""
    body = []
    for requests, one in _results(study, record).items():
        ratios = [one[kind]["cartridge/prompt"] for kind in ("ratio", "by_processor_time")]
        body.append(
            [requests,
             *(f"{one['tokens_per_second'][arm]:.0f}" for arm in ("cartridge", "prompt", "none")),
             *(f"{r['median']:.2f} ({r['lower_quartile']:.2f} to {r['upper_quartile']:.2f})"
               for r in ratios)]
        )  # fmt: skip
    heads = [
        "requests in flight", "cartridge, tokens/s", "prompt tokens", "neither",
        "cartridge over prompt, by round", "by processor time",
    ]  # fmt: skip
    return heads, body


def beside_transformers(study: str, record: str) -> Table:
    """Return the seconds of each phase of a real model's step, and transformers'."""
    body = [
        [phase, dtype, f"{one['ours']:.1f}", f"{one['transformers']:.1f}",
         f"**{one['times_as_fast']:.2f}**"]
        for dtype, phases in _results(study, record).items()
        for phase, one in phases.items()
    ]  # fmt: skip
    return ["phase", "type", "ours, s", "transformers, s", "times as fast"], body


def extraction(study: str, record: str) -> Table:
    """Return what trained cartridges give back of their documents, with Wilson's intervals."""
    body = []
    for row in _results(study, record):
        cells: Cells = []
        for count in row["counts"]:
            low, high = wilson_interval(count["right"], count["n"])
            share = f"{100 * count['right'] / count['n']:.1f}%"
            bold = f"**{share}**" if row["prefix"] == "trained" and not cells else share
            cells.append(f"{bold} ({100 * low:.1f} to {100 * high:.1f})")
        body.append([PREFIXES[row["prefix"]], *cells])
    heads = ["before the prompt", "facts, asked by the field's name"]
    heads += ["facts, asked for whole notes", "the same, in 8 draws", "sentences word for word"]
    return heads, body


def publishes(results: Mapping[str, Any]) -> Table:
    """Return seconds and bytes of each publish, beside the link's limit and the bare transfers."""
    body = []
    for row in sorted(results["rows"], key=lambda one: (one["gbit"], one["hosts"])):
        moved = (row[name] / MB for name in ("to_a_host", "from_a_host", "from_controller"))
        body.append(
            [f"{row['gbit']:g}", str(row["hosts"]), row["publish"], f"{row['seconds']:.2f} s",
             f"{row['limit_s']:.3f} s", f"{row['over_limit']:.1f}x", f"{row['bare_s']:.2f} s",
             f"{row['bare_at_once_s']:.2f} s", f"{row['over_bare_at_once']:.1f}x",
             *(f"{size:.0f} MB" for size in moved)]
        )  # fmt: skip
    heads = [
        "Gbit/s", "hosts", "", "publish", "limit", "over it", "bare", "bare, all at once",
        "over these", "most to a host", "most from one", "from the controller",
    ]  # fmt: skip
    return heads, body


def simulated(results: Mapping[str, Any]) -> Table:
    """Return a simulated step from 1 to 1,000 hosts."""

    def span(seconds: float) -> str:
        return seconds_text(seconds) if math.isfinite(seconds) else "never"

    heads = [
        "hosts", "step", "overhead", "publish", "requests", "store", "loop", "Monarch", "silence",
        "start", "one trainer",
    ]  # fmt: skip
    return heads, [
        [f"{row['hosts']:,}", span(row["step"]), f"{row['overhead']:.0%}", span(row["publish"]),
         span(row["dispatch"]), f"{row['store_share']:.0%}", f"{row['loop_share']:.1%}",
         f"{row['wire_share']:.0%}", span(row["silence"]), seconds_text(row["start"]),
         seconds_text(row["one_trainer"])]
        for row in results["rows"]
    ]  # fmt: skip


def limits(results: Mapping[str, Any]) -> Table:
    """Return the fewest hosts at which each limit of a simulated mesh breaks, by remedy."""
    breaks = results["breaks_at"]
    return ["breaks at hosts", *next(iter(breaks.values()))], [
        [remedy, *("holds" if hosts is None else f"{hosts:,}" for hosts in at.values())]
        for remedy, at in breaks.items()
    ]


def _results(study: str, record: str) -> Any:
    return document(study, f"{record}.json")["results"]


# -- sweeps: shares of right answers by desk or document ------------------------------------------


def right_by_arm(study: str, sweep: str) -> dict[str, Units]:
    """Return greedy accuracy by shown arm and seed."""
    by_arm: dict[str, Units] = defaultdict(dict)
    for run in archive.runs(study, sweep):
        for arm, right in _right(study, run).items():
            if arm in run.arms:
                by_arm[run.arms[arm]][run.seed] = right
    ordered = dict.fromkeys(arm for run in archive.runs(study, sweep) for arm in run.arms.values())
    return {arm: by_arm[arm] for arm in ordered}


def _right(study: str, run: KeptRun) -> dict[str, float]:
    right: dict[str, list[float]] = defaultdict(list)
    for row in greedy_rows(study, run.name):
        right[row["arm"]].append(row["right"])
    return {arm: fmean(values) for arm, values in right.items()}


def _reference(study: str, sweep: str) -> str | None:
    return next((run.reference for run in archive.runs(study, sweep)), None)


def over_reference(study: str, sweep: str) -> Table:
    """Return accuracy of every arm, and its paired difference from the sweep's reference."""
    reference, by_arm = _reference(study, sweep), right_by_arm(study, sweep)
    body = []
    for arm, units in by_arm.items():
        gain = ("", "") if arm == reference else points(paired(units, by_arm[str(reference)]))
        body.append([arm, str(len(units)), *shares(units.values()), *gain])
    heads = ["arm", "units", "right, %", "95% interval", f"over {reference}, points"]
    return [*heads, "95% interval"], body


def between(study: str, sweep: str) -> Table:
    """Return the paired difference of each two trained arms but the reference, the later in the
    sweep minus the earlier."""
    reference, by_arm = _reference(study, sweep), right_by_arm(study, sweep)
    trained = dict.fromkeys(run.arms["on_policy"] for run in archive.runs(study, sweep))
    body = [
        [f"{late} over {early}", *points(gaps)]
        for early, late in combinations([arm for arm in trained if arm != reference], 2)
        if (gaps := paired(by_arm[late], by_arm[early]))
    ]
    return ["arms", "difference, points", "95% interval"], body


def collapses(study: str, sweep: str) -> Table:
    """Return of every trained arm its mean accuracy over that of the untrained cartridge, and over
    its runs the least of the last steps' mean reward minus the first step's."""
    by_arm = right_by_arm(study, sweep)
    changes: dict[str, list[float]] = defaultdict(list)
    for run in archive.runs(study, sweep):
        steps = rows(study, f"{run.name}/metrics.jsonl")
        rewards = [row["episodes"]["reward"] for row in steps if row["arm"] == "on_policy"]
        changes[run.arms["on_policy"]].append(fmean(rewards[-LAST_STEPS:]) - rewards[0])
    untrained = fmean(by_arm["untrained"].values())
    body = [
        [arm, f"{100 * (fmean(by_arm[arm].values()) - untrained):+.1f}", f"{min(change):+.2f}"]
        for arm, change in changes.items()
    ]
    return ["arm", "over untrained, points", "least change of reward in a run"], body


def seeds(study: str, sweep: str) -> Table:
    """Return greedy accuracy of every arm seed by seed, with the mean."""
    by_arm = right_by_arm(study, sweep)
    every = sorted({seed for units in by_arm.values() for seed in units})
    body = []
    for arm, units in sorted(by_arm.items()):
        mean, bounds = shares(units.values())
        low, _, high = bounds.partition(" to ")
        cells = [f"{100 * units[seed]:.1f}%" if seed in units else "" for seed in every]
        body.append([arm, *cells, f"{mean}%", f"{low}% to {high}%" if bounds else ""])
    return ["", *map(str, every), "mean", "95% interval"], body


def shared_facts(studies: str, run: str) -> Table:
    """Return answers of the arm on_policy of the run of `studies`, joined by commas, by how many
    charts have an answer to the same words: right, and those that are another chart's."""
    names = studies.split(",")
    counts = {
        name: _by_charts([r for r in greedy_rows(name, run) if r["arm"] == "on_policy"])
        for name in names
    }
    body = []
    for charts, first in sorted(counts[names[0]].items()):
        cells = [str(charts), str(len(first)), f"{100 / charts:.1f}%"]
        for name in names:
            right = [r for r, _ in counts[name][charts]]
            low, high = wilson_interval(sum(right), len(right))
            share = f"{100 * fmean(right):.1f}% ({100 * low:.1f} to {100 * high:.1f})"
            cells += [share, f"{100 * fmean(o for _, o in counts[name][charts]):.1f}%"]
        body.append(cells)
    heads = ["charts with an answer", "questions", "one drawn by lot"]
    return [*heads, *(f"{n}: {what}" for n in names for what in ("right", "another chart's"))], body


def _by_charts(answers: list[dict[str, Any]]) -> dict[int, list[tuple[bool, bool]]]:
    """Return whether each answer is right, and is that of another chart, by number of charts."""
    expected: dict[str, dict[str, str]] = defaultdict(dict)
    for row in answers:
        expected[row["fact"]][row["document"]] = row["expected"]
    by_charts: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    for row in answers:
        answer = (said_answer(row["text"]) or "").strip(" .")
        right = row["right"] == 1.0
        alternatives = {a for d, a in expected[row["fact"]].items() if d != row["document"]}
        by_charts[len(expected[row["fact"]])].append((right, not right and answer in alternatives))
    return by_charts


# -- sweeps: strategies over a trained cartridge --------------------------------------------------


def by_strategy(study: str, sweep: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of the frontiers by strategy and seed."""
    strategies: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in archive.runs(study, sweep):
        for row in document(study, f"{run.name}/frontier.json")["arms"]:
            strategies[row["strategy"]][run.seed] = row
    return strategies


def _accuracy(frontier: Mapping[int, Mapping[str, Any]]) -> Units:
    return {seed: row["accuracy"] for seed, row in sorted(frontier.items())}


def merging_arms(study: str, sweep: str) -> Table:
    """Return of every arm the questions with all parts right, F1, and compute."""
    body = []
    for strategy, frontier in by_strategy(study, sweep).items():
        f1, tokens, read = (
            fmean(row[key] for row in frontier.values())
            for key in ("f1", "tokens", "prompt_tokens")
        )
        body.append(
            [STRATEGIES[strategy], str(len(frontier)), *shares(_accuracy(frontier).values()),
             f"{f1:.3f}", f"{tokens:.0f}", f"{read:.0f}"]
        )  # fmt: skip
    heads = ["arm", "pairs of charts", "all parts right, %", "95% interval", "F1", "tokens sampled"]
    return [*heads, "tokens read"], body


def merging_differences(study: str, sweep: str) -> Table:
    """Return aggregation minus every other arm, pair by pair; the first decides the claim, and only
    it has a p-value."""
    strategies = by_strategy(study, sweep)
    ours = _accuracy(strategies.get(AGGREGATION, {}))
    body = []
    for strategy in sorted(STRATEGIES, key=lambda name: name != VOTE):
        if strategy == AGGREGATION or strategy not in strategies:
            continue
        gaps = paired(ours, _accuracy(strategies[strategy]))
        p = p_value(mean_p(gaps)) if strategy == VOTE else ""
        body.append([STRATEGIES[strategy], str(len(gaps)), *points(gaps), p])
    return ["aggregation over", "pairs of charts", "difference, points", "95% interval", "p"], body


def trained_to_aggregate(study: str, sweep: str) -> Table:
    """Return of every way to train what aggregation adds to one sample over the trained cartridge,
    and the paired difference from the sweep's reference."""
    single: dict[str, list[float]] = defaultdict(list)
    added: dict[str, Units] = defaultdict(dict)
    for run in archive.runs(study, sweep):
        frontier = document(study, f"{run.name}/frontier.json")["arms"]
        right = {row["strategy"]: row["accuracy"] for row in frontier}
        arm = run.arms["on_policy"]
        single[arm].append(right[VOTE])
        added[arm][run.seed] = right[AGGREGATION] - right[VOTE]
    reference = str(_reference(study, sweep))
    gaps = {a: paired(g, added.get(reference, {})) for a, g in added.items() if a != reference}
    adjusted = dict(zip(gaps, holm([mean_p(values) for values in gaps.values()]), strict=True))
    body = []
    for arm, gains in added.items():
        gap = (*points(gaps[arm]), p_value(adjusted[arm])) if arm in gaps else ("", "", "")
        mean = f"{100 * fmean(single[arm]):.1f}"
        body.append([arm, str(len(gains)), mean, *points(gains.values()), *gap])
    heads = ["trained on", "charts", "one sample right, %", "aggregation adds, points"]
    return [*heads, "95% interval", f"over {reference}, points", "95% interval", "p, Holm"], body


# -- sweeps: answers and losses by document or article --------------------------------------------


@dataclass
class ArmOutcomes:
    """Hold an arm's outcomes by unit, one value a seed, and what its runs were trained on:
    `passages` (nats) and `tokens` by seed, and `seconds` of its steps, where they were kept."""

    by_unit: dict[str, dict[Any, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    passages: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def units(self, outcome: str) -> Units:
        """Return the mean over the seeds of each unit."""
        return {unit: fmean(values) for unit, values in self.by_unit[outcome].items()}


def learn_spec(study: str, run: KeptRun) -> Mapping[str, Any]:
    """Return the section `learn` of a run's spec."""
    spec = yaml.load(archive.text(study, f"{run.name}/spec.yaml"), yaml.CSafeLoader)
    section: Mapping[str, Any] = spec["learn"]
    return section


def _evaluated(study: str, run: KeptRun) -> dict[str, Mapping[str, Any]]:
    """Return the rows of `forge eval` by arm; it calls the arm of a warm start "hybrid"."""
    if not archive.has_member(study, f"{run.name}/eval.json"):
        return {}
    measured = document(study, f"{run.name}/eval.json")["rows"]
    return {"on_policy" if row["kind"] == "hybrid" else row["kind"]: row for row in measured}


@cache
def document_outcomes(study: str, sweep: str) -> dict[str, ArmOutcomes]:
    """Return the outcomes of a sweep over documents by "arm, direction of the KL": the share of
    questions answered right, and nats a token over one passage."""
    outcomes: dict[str, ArmOutcomes] = defaultdict(ArmOutcomes)
    for run in archive.runs(study, sweep):
        direction = learn_spec(study, run)["loss"]["direction"]
        right, measured = _right(study, run), _evaluated(study, run)
        for arm, name in run.arms.items():
            by_unit = outcomes[f"{name}, {direction}"].by_unit
            by_unit["right, points"][run.seed].append(right[arm])
            if arm in measured:
                nats = math.log(measured[arm]["passages"]["value"])
                by_unit["nats a token"][run.seed].append(nats)
    return outcomes


@cache
def article_outcomes(study: str, sweep: str) -> dict[str, ArmOutcomes]:
    """Return the outcomes of a sweep over articles by arm, nats a token: of the right answers, and
    of what the document's teacher writes after the arm's own words."""
    outcomes: dict[str, ArmOutcomes] = defaultdict(ArmOutcomes)
    for run in archive.runs(study, sweep):
        measured = _evaluated(study, run)
        if learn_spec(study, run)["cartridge"]["init"] != "first_tokens":
            measured.pop("untrained", None)  # `forge eval` starts that arm from the first tokens
        losses: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in greedy_rows(study, run.name):
            if row["right"] is not None:  # a held-out prompt of training's kind has none
                losses[row["arm"]][row["document"]].append(row["nll"])
        tokens, steps = defaultdict[str, int](int), defaultdict[str, int](int)
        for row in rows(study, f"{run.name}/metrics.jsonl"):
            tokens[row["arm"]] += row["tokens"]
            steps[row["arm"]] += 1
        results = document(study, f"{run.name}/results.json")
        step = results.get("step_seconds", {"on_policy": results["phases"].get("step", 0.0)})
        for arm, name in run.arms.items():
            outcome = outcomes[name]
            for article, values in losses[arm].items():
                outcome.by_unit[ANSWERS][article].append(fmean(values))
            outcome.tokens.append(tokens[arm])
            if arm in step:
                outcome.seconds.append(step[arm] * steps[arm])
            if arm in measured:
                outcome.passages.append(math.log(measured[arm]["passages"]["value"]))
                by_article: dict[str, list[float]] = defaultdict(list)
                for passage, loss in measured[arm]["after_own"]["nll"].items():
                    by_article[passage.split("/")[0]].append(loss)
                for article, values in by_article.items():
                    outcome.by_unit[AFTER_OWN][article].append(fmean(values))
    return outcomes


def document_arms(study: str, sweep: str) -> Table:
    """Return the mean outcomes of every arm."""
    body = []
    for name, outcome in document_outcomes(study, sweep).items():
        arm, _, direction = name.rpartition(", ")
        right, nats = outcome.units("right, points"), outcome.units("nats a token")
        body.append(
            [arm, direction, str(len(right)), *shares(right.values()),
             *spread(nats.values(), ".2f", bounds=AT_LEAST_ZERO)]
        )  # fmt: skip
    heads = ["arm", "KL", "documents", "right, %", "95% interval", "nats a token", "95% interval"]
    return heads, body


def document_comparisons(study: str, sweep: str, kind: str) -> Table:
    """Return the study's comparisons over documents."""
    outcomes, tests = document_outcomes(study, sweep), []
    for arm, other in COMPARISONS[study, sweep, kind]:
        for outcome, form, scale, bounds in (
            ("right, points", "+.1f", 100.0, SHARE_DIFFERENCE),
            ("nats a token", "+.2f", 1.0, ANY),
        ):
            gaps = paired(outcomes[arm].units(outcome), outcomes[other].units(outcome))
            ours, _, direction = arm.rpartition(", ")
            theirs = other.rpartition(", ")[0]
            cells = [f"{ours} over {theirs}", direction, outcome, str(len(gaps))]
            tests.append(([*cells, *spread(gaps, form, scale, bounds)], gaps))
    adjusted = holm([mean_p(gaps) for _, gaps in tests])
    body = [[*cells, p_value(p)] for (cells, _), p in zip(tests, adjusted, strict=True)]
    return ["arms", "KL", "outcome", "documents", "difference", "95% interval", "p (Holm)"], body


def article_arms(study: str, sweep: str) -> Table:
    """Return means of every arm over the articles."""
    body = [
        [arm, str(len(outcome.tokens)), f"{fmean(outcome.tokens):,.0f}",
         f"{fmean(outcome.seconds):,.0f}" if outcome.seconds else "",
         *spread(outcome.units(ANSWERS).values(), ".2f", bounds=AT_LEAST_ZERO),
         f"{fmean(outcome.passages):.2f}" if outcome.passages else "",
         *spread(outcome.units(AFTER_OWN).values(), ".2f", bounds=AT_LEAST_ZERO)]
        for arm, outcome in article_outcomes(study, sweep).items()
    ]  # fmt: skip
    heads = ["arm", "seeds", "trained tokens", "seconds", "answers", "95% interval", "passages"]
    return [*heads, "after own words", "95% interval"], body


def article_comparisons(study: str, sweep: str, kind: str) -> Table:
    """Return the study's comparisons over articles, and what each decides."""
    outcomes = article_outcomes(study, sweep)
    if (study, sweep) in OTHER_ARMS:
        outcomes = article_outcomes(study, OTHER_ARMS[study, sweep]) | outcomes
    tests: list[tuple[Cells, list[float]]] = []
    for arm, other in COMPARISONS[study, sweep, kind]:
        for outcome in REGISTERED.get((study, sweep), (ANSWERS, AFTER_OWN)):
            if arm not in outcomes or other not in outcomes:
                continue
            gaps = paired(outcomes[arm].units(outcome), outcomes[other].units(outcome))
            if gaps:
                tests.append(([arm, other, outcome, str(len(gaps))], gaps))
    adjusted = holm([mean_p(gaps) for _, gaps in tests])
    body = [
        [*cells, *spread(gaps, "+.2f"), p_value(p), decided(gaps)]
        for (cells, gaps), p in zip(tests, adjusted, strict=True)
    ]
    heads = ["arm", "over", "outcome", "articles", "difference", "95% interval", "p (Holm)"]
    return [*heads, "decided"], body


def exact_answers(study: str, record: str) -> Table:
    """Return drafted answers beside those of the document alone."""
    body = []
    for row in _results(study, record):
        drafted = row["arm"] != "alone"
        body.append([
            ARMS_OF_EXACT.get(row["arm"], row["arm"].replace("cartridge", "a cartridge of")),
            f"{row['cpu_s']:.1f}", f"{row['times']:.2f}" if drafted else "1",
            f"{100 * row['accepted'] / row['proposed']:.1f}%" if drafted else "",
            f"{row['tokens'] / row['verifications']:.2f}" if drafted else "1",
            f"{row['equal']} of {row['answers']}" if drafted else "",
        ])  # fmt: skip
    heads = ["drafts", "processor s", "times as fast", "accepted", "tokens a verification"]
    return [*heads, "equal answers"], body


def document_words(study: str, record: str) -> Table:
    """Return the seconds of the document's word on an answer, and of the answer."""
    body = [
        [f"{row['document']:,}", f"{median(row['answer_s']):.2f}", f"{median(row['word_s']):.2f}",
         f"{row['share']:.3f}", f"{row['reading_s']:.1f}"]
        for row in _results(study, record)
    ]  # fmt: skip
    heads = ["document", "answer, s", "the document's word, s", "share of the answer's"]
    return [*heads, "reading the document once, s"], body


TABLES: Mapping[str, Callable[[str, str], Table]] = {
    "arms": arms,
    "arms_in_full": arms_in_full,
    "differences": differences,
    "training": training,
    "right_answers": right_answers,
    "articles": articles,
    "answering": answering,
    "closed_form": closed_form,
    "over_prompt": over_prompt,
    "beside_transformers": beside_transformers,
    "extraction": extraction,
    "publishes": lambda study, record: publishes(_results(study, record)),
    "simulated": lambda study, record: simulated(_results(study, record)),
    "limits": lambda study, record: limits(_results(study, record)),
    "exact_answers": exact_answers,
    "document_words": document_words,
    "over_reference": over_reference,
    "between": between,
    "collapses": collapses,
    "seeds": seeds,
    "shared_facts": shared_facts,
    "merging_arms": merging_arms,
    "merging_differences": merging_differences,
    "trained_to_aggregate": trained_to_aggregate,
    "document_arms": document_arms,
    "main_job_forms": main_job_forms,
    "curriculum_arms": curriculum_arms,
    "curriculum_differences": curriculum_differences,
    "pilot_arms": pilot_arms,
    "composition_arms": composition.arms,
    "composition_decision": composition.decision,
    "verified_rates": verified.rates,
    "verified_arms": verified.arm_means,
    "verified_primary": verified.primary,
    "verified_equal": verified.equal,
    "verified_secondary": verified.secondary,
    "document_primary": lambda study, sweep: document_comparisons(study, sweep, "primary"),
    "document_secondary": lambda study, sweep: document_comparisons(study, sweep, "secondary"),
    "outcomes_by_kind": outcomes_by_kind,
    "kind_closed_form": loss_comparisons,
    "kind_trained": lambda study, record: loss_comparisons(study, record, TRAINED),
    "kind_refusals": refusal_comparison,
    "article_arms": article_arms,
    "article_primary": lambda study, sweep: article_comparisons(study, sweep, "primary"),
    "article_secondary": lambda study, sweep: article_comparisons(study, sweep, "secondary"),
}


def table_lines(argument: str) -> list[str]:
    """Return the lines of a mark's table: `table_lines("channels over_reference shift")`."""
    study, kind, name = argument.split(" ")
    return table(*TABLES[kind](study, name))
