"""What `forge update` keeps of a trained cartridge when its chart is edited, and what it costs.

    python -m benchmarks.users.edits [--charts N] [--row EDITS]

Draws charts of twenty facts, trains a cartridge of each on policy in this process, and changes two
facts of twenty, 10%. Arms: the cartridge as it was, a closed form anew, the re-fit of
`forge update`, and the re-fit with few steps. Of each: the changed facts that are answered right,
the others that are still right of those that were, and its processor seconds as a share of a
training anew. With `--row` so many edits of a fact each follow one another, with a step after each
or none. The reader knows no English, so the re-fit reads rows of the chart alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.meters import one_thread
from benchmarks.record import benchmark
from cartridge_forge.forge_run.plan.edited_cartridge import EditedText, document_edit
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv, score_kept
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.patients import Chart, draw_chart, fact_text
from cartridge_forge.plugins.clinic.vocabulary import CATEGORY_OF
from cartridge_forge.plugins.documents.edits import text_changes
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.refit import refitted
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import (
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    TrainBatch,
    stream_seed,
)

MODEL = str(REPOSITORY / "models" / "clinic-reader")
FACTS, NOTES, CHANGED = 20, 3, 2  # of a chart, and of an edit
TOKENS, FROZEN = 24, 1  # of a cartridge
STEPS, FEW = 20, 2  # of a training anew, and after an edit
ROW_TOKENS, ANSWER_TOKENS = 64, 10
Facts = dict[str, str]  # value by field


@dataclass(frozen=True)
class ChartEdit:
    """Hold a chart's facts before and after an edit of these fields."""

    old: Facts
    new: Facts
    changed: frozenset[str]


def drawn_edit(facts: Facts, count: int, rng: random.Random) -> ChartEdit:
    """Return an edit of so many facts, each with another value of its kind."""
    fields = rng.sample(sorted(facts), count)
    values = {
        field: rng.choice([v for v in CATEGORY_OF[field].values if v != facts[field]])
        for field in fields
    }
    return ChartEdit(facts, {**facts, **values}, frozenset(fields))


class ChartBench:
    """Train, update and ask cartridges of one chart, whose facts may change."""

    def __init__(self, seed: int) -> None:
        self.model, self.tokenizer = load_model(MODEL), load_tokenizer(MODEL)
        self.chart: Chart = draw_chart(random.Random(seed), FACTS, NOTES, 0.5)
        self.facts: Facts = {f: v for note in self.chart.notes for f, v in note.facts}

    def text(self, facts: Facts) -> str:
        one = self.chart
        lines = [f"chart of {one.name}, born {one.birthday}, diagnosis {one.diagnosis}."]
        for i, note in enumerate(one.notes):
            sentences = [f"{fact_text((field, facts[field]))}." for field, _ in note.facts]
            remarks = (f"{remark}." for remark in note.remarks)
            lines.append(" ".join([f"note {i + 1}: {note.header}", *sentences, *remarks]))
        return "\n".join(lines)

    def renderer(self, facts: Facts) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, {"new": self.text(facts)})

    def document(self, facts: Facts) -> Tensor:
        """Return the chart's KV [L, 2, H_kv, T, D]."""
        return document_kv(self.model, self.renderer(facts).head("new"))

    def right(self, kv: Tensor, facts: Facts) -> set[str]:
        """Return the fields that are answered right over a prefix [L, 2, H_kv, P, D]."""
        answers = self._answers(kv, facts, 0.0, "")
        texts = {r.id: self.tokenizer.decode(list(a.token_ids)) for r, a in answers}
        return {field for field in facts if facts[field] in texts[field].split()}

    def _answers(self, kv: Tensor, facts: Facts, temperature: float, stream: str) -> list[Any]:
        renderer, sampling = self.renderer(facts), Sampling(temperature, max_tokens=ANSWER_TOKENS)
        requests = [
            GenerateRequest(
                field,
                renderer.opening("new", [AgentMessage("user", f"what is the {field}?")]),
                PrefixRef("cartridge/chart", 0), sampling, stream_seed(f"{stream}/{field}"),
            )
            for field in facts
        ]  # fmt: skip
        completions = generate(self.model, requests, lambda _: kv, renderer.end_ids)
        return list(zip(requests, completions, strict=True))

    def trained(self, facts: Facts, kv: Tensor, steps: int) -> Tensor:
        """Return a cartridge [L, 2, H_kv, P, D] trained on policy for so many steps."""
        document, bank = self.document(facts), CartridgeBank(["chart"], [kv], FROZEN)
        spec = TrainSpec(steps=steps, lr=0.4, warmup_steps=1, row_tokens=ROW_TOKENS)
        trainer = CartridgeTrainer(self.model, bank, spec)
        trainer.begin("on_policy", steps)
        for step in range(steps):
            answers = self._answers(bank.kv()[0].detach(), facts, 1.0, str(step))
            samples = [
                Sample(
                    r.id, "chart", r.prompt_ids, a.token_ids, a.logprobs,
                    (trainer.version,) * len(a.token_ids),
                )
                for r, a in answers
            ]  # fmt: skip
            scored = score_kept(self.model, samples, {"chart": document}, ROW_TOKENS, 20)
            scores = {"doc_teacher": TeacherDistribution(**scored)}
            trainer.step(TrainBatch(doc=samples, scores=scores), trainer.version)
        return bank.kv()[0].detach()

    def first(self, facts: Facts) -> Tensor:
        return self.document(facts)[:, :, :, :TOKENS]

    def matched(self, facts: Facts) -> Tensor:
        ids = self.renderer(facts).head("new")
        return attention_matched(self.model, ids, self.document(facts), TOKENS, FROZEN)

    def refit(self, kv: Tensor, edit: ChartEdit) -> Tensor:
        """Return a cartridge after an edit, as `forge update` makes it without prompts."""
        old, new = self.text(edit.old), self.text(edit.new)
        renderer = ChatRenderer(self.tokenizer, {"old": old, "new": new})
        one = document_edit(
            self.model, renderer, MODEL, kv, EditedText("chart@1", Path(), old, new),
            text_changes(old, new), prompts=0,
        )  # fmt: skip
        return refitted(self.model, kv, FROZEN, one)


def timed(make: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Return a cartridge, and the processor seconds of its making."""
    start = time.process_time()
    return make(), time.process_time() - start


def of_edit(bench: ChartBench, kv: Tensor, seed: int) -> dict[str, list[float]]:
    """Return of each arm: changed facts that are right, all changed, others that are right, those
    that were right before, and processor seconds."""
    edit = drawn_edit(bench.facts, CHANGED, random.Random(seed))
    right_before = bench.right(kv, edit.old) - edit.changed
    refit, seconds = timed(lambda: bench.refit(kv, edit))
    stepped, more = timed(lambda: bench.trained(edit.new, refit, FEW))
    arms = {
        "as it was": (kv, 0.0),
        "closed form anew": timed(lambda: bench.matched(edit.new)),
        "re-fit": (refit, seconds),
        f"re-fit and {FEW} steps": (stepped, seconds + more),
        f"{FEW} steps alone": timed(lambda: bench.trained(edit.new, kv, FEW)),
    }
    rows = {}
    for arm, (one, cost) in arms.items():
        right = bench.right(one, edit.new)
        rows[arm] = [
            len(right & edit.changed), len(edit.changed), len(right & right_before),
            len(right_before), cost,
        ]  # fmt: skip
    return rows


def of_row(bench: ChartBench, kv: Tensor, edits: int, steps: int) -> list[int]:
    """Return how many facts are right after each of so many edits of a fact that follow one
    another, with so many steps after each."""
    facts, counts, rng = bench.facts, [], random.Random("row")
    for _ in range(edits):
        edit = drawn_edit(facts, 1, rng)
        kv, facts = bench.refit(kv, edit), edit.new
        if steps:
            kv = bench.trained(facts, kv, steps)
        counts.append(len(bench.right(kv, facts)))
    return counts


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    one_thread()
    sums: dict[str, list[float]] = {}
    rows: dict[str, list[int]] = {}
    training = 0.0
    for seed in range(options.charts):
        bench = ChartBench(seed)
        start = time.process_time()
        kv = bench.trained(bench.facts, bench.first(bench.facts), STEPS)
        seconds = time.process_time() - start
        right = len(bench.right(kv, bench.facts))
        over_document = len(bench.right(bench.document(bench.facts), bench.facts))
        print(
            f"chart {seed}: right {right}, over the document {over_document}, of {FACTS}",
            flush=True,
        )
        for edit in range(options.edits):
            training += seconds
            for arm, row in of_edit(bench, kv, 10 * seed + edit).items():
                sums[arm] = [a + b for a, b in zip(sums.get(arm, [0.0] * 5), row, strict=True)]
            print(f"after {edit + 1} edits of it: {sums}", flush=True)
        for steps in (0, 1) if seed == 0 and options.row else ():
            rows[str(steps)] = counts = of_row(bench, kv, options.row, steps)
            print(f"edits in a row, {steps} steps after each: right {counts}", flush=True)
    print("| arm | changed facts right | others still right | cost of a training anew |")
    print("|---|---|---|---|")
    for arm, (new, changed, still, earlier, cost) in sums.items():
        print(f"| {arm} | {new:.0f}/{changed:.0f} | {still:.0f}/{earlier:.0f} | "
              f"{cost / training:.0%} |")  # fmt: skip
    shares = {arm: one[4] / training for arm, one in sums.items()}
    return {}, {"edits": sums, "row": rows, "cost_share": shares}


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--charts": (2, "each trained once"),
            "--edits": (3, "of a chart, each of the trained cartridge"),
            "--row": (20, "edits of the first chart in a row"),
        },
        quick={"charts": 1, "edits": 1, "row": 2},
    )
