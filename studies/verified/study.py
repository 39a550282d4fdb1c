"""Compare verified text with plain on-policy and with the teacher's own, chart by chart.

    python -m studies.verified.study rates     # four rates of each arm, on charts for tuning
    python -m studies.verified.study charts    # the registered comparisons, at the rates chosen

README.md beside this file has the design as it was registered. A chart is one cartridge of the
tiny reader. It learns from the teacher's text first (the warm start), and from there each arm goes
on with text of its own, equally many steps:

    plain      the student alone
    verified   the student proposes, the document's teacher replaces what it gives less than 0.05
    offline    the teacher alone

with forward KL, and the last two with JSD too. Outcomes, on the chart's note: the share of its
sentences in sampled and in greedy recitations, and nats a token of the true note. The generator,
the teacher and the trainer are the learning modules themselves, in this process; the sampling is
that of a run. Each row is written as it is made, so that an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import (
    TeacherDistribution,
    document_kv,
    response_logprobs,
    score_kept,
)
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.clinic.text import recite_prompt, sentences, unique_cue
from cartridge_forge.plugins.decoding.verified.records import VerifyReply
from cartridge_forge.plugins.decoding.verified.rows import VerifiedRows
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.plugins.documents.study.verified import opened, trained_marks
from cartridge_forge.protocols.files import REPOSITORY, write_atomically
from cartridge_forge.protocols.spec.sections import LossSpec
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    TensorLayout,
    TensorRef,
    TrainBatch,
    stream_seed,
)
from cartridge_forge.training.records import Rollout, as_rollout
from studies.verified.tables import WARM

MODEL = str(REPOSITORY / "models" / "clinic-reader")
STEPS, WARM_STEPS, WARM_LR = 12, 24, 0.4  # the rate of the main job
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
VERIFY = {"verify": {"rule": "threshold", "below": 0.05, "block": 6}}
JSD = LossSpec(direction="jsd", beta=0.5)


@dataclass(frozen=True)
class Arm:
    """Describe an arm: the keys of `rollout` that make its text, None for the teacher's, the loss,
    and the rate that was chosen on TUNING_CHARTS."""

    rollout: dict[str, Any] | None
    loss: LossSpec
    rate: float


ARMS: dict[str, Arm] = {
    "plain, forward": Arm({}, LossSpec(), 0.4),
    "verified, forward": Arm(VERIFY, LossSpec(), 0.4),
    "offline, forward": Arm(None, LossSpec(), 0.4),
    "verified, JSD": Arm(VERIFY, JSD, 0.8),
    "offline, JSD": Arm(None, JSD, 0.8),
}
TUNING_CHARTS = tuple(range(940, 944))
# The charts of each arm: the first 8 for study A, 16 for C, all for B.
FIRST_CHART, CHARTS_OF_B = 600, 32
CHARTS: dict[str, int] = {"plain, forward": 8, "verified, forward": 8, "offline, forward": 16}
RECITATIONS = 32  # sampled ones of a chart
TOP, ROW_TOKENS = 20, 256


def spec_of(chart: int, steps: int, lr: float, rollout: dict[str, Any]) -> DocumentsLearn:
    """Return the config of `steps` over one chart."""
    return DocumentsLearn.model_validate(
        {
            "model": {"path": MODEL},
            "data": {"seed": chart, "patients": 1, "facts": 8, "notes": 1, "held_out": 0.5},
            "cartridge": {"tokens": 28},
            "rollout": {
                "prompts": 8, "max_tokens": 80, **rollout,
                "kinds": ("recite_note", "question", "choice"),
            },
            "train": {"steps": steps, "lr": lr, "row_tokens": ROW_TOKENS, "seed": chart},
        }
    )  # fmt: skip


class OneProcess:
    """Answer the calls of `VerifiedSampling` with one model: as generator, teacher and plane."""

    plane_life = 0

    def __init__(self, model: LanguageModel, document: Tensor, ends: frozenset[int]) -> None:
        self.model, self.document, self.ends = model, document, ends
        self.cartridge = document
        self.rows = VerifiedRows(model, 2**28)
        self.pools = {"generator": self, "doc_teacher": self}
        self.plane, self.stored = self, dict[str, Tensor]()

    async def split(
        self, items: Sequence[Any], work: Callable[[Sequence[Any]], Awaitable[list[Any]]],
        most: int | None = None,
    ) -> list[Any]:  # fmt: skip
        return await work(items)

    async def generate(
        self, requests: Sequence[GenerateRequest], replied: object = None, **options: object
    ) -> list[Completion]:
        def lookup(ref: PrefixRef) -> Tensor:
            return self.document if ref.name.startswith("document/") else self.cartridge

        logits: list[Tensor] = []
        completions = generate(self.model, requests, lookup, self.ends, drawn_from=logits)
        if not logits:
            return completions
        self.stored["logits"] = torch.cat(logits)
        ref = TensorRef("logits", TensorLayout(()))
        return [Completion(**{**vars(c), "logits": ref}) for c in completions]

    async def route(self, method: str, packed: Any, *, session: str) -> VerifyReply:
        call = packed.value
        student = None if call.student is None else self.stored[call.student.key]
        verdicts, repeated = self.rows.verify(call, lambda name: self.document, student)
        counted = tuple((v.accepted, v.token) for v in verdicts)
        return VerifyReply(0.0, counted, self.rows.ratio(call, lambda n: self.document), repeated)

    async def delete(self, key: str) -> None:
        del self.stored[key]


class NoteRecitations:
    """Hold one chart with its document's keys and values, and measure cartridges of it."""

    def __init__(self, model: LanguageModel, tokenizer: Any, seed: int) -> None:
        self.model, self.seed = model, seed
        spec = spec_of(seed, 1, WARM_LR, {})
        self.tokenizer = tokenizer
        self.tasks = LongHealthPrompts(spec, read_patients(spec.data), tokenizer)
        ((self.name, patient),) = self.tasks.patients.items()
        self.document = document_kv(model, self.tasks.documents[self.name])
        self.note = sentences(patient.texts[0])
        cue = unique_cue(patient.document, self.note[0])
        assert cue is not None
        message = AgentMessage("user", recite_prompt(cue))
        self.prompt = self.tasks.conversation.opening(self.name, (message,))
        self.truth = self.tasks.conversation.saying(patient.texts[0])

    def measure(self, cartridge: Tensor) -> dict[str, float]:
        """Return the outcomes of a cartridge [L, 2, H_kv, P, D]."""
        requests = [
            GenerateRequest(
                f"recite/{i}", self.prompt, PrefixRef(f"cartridge/{self.name}", 0),
                Sampling(1.0 if i else 0.0, max_tokens=80), stream_seed(f"recite/{self.seed}/{i}"),
            )
            for i in range(RECITATIONS + 1)
        ]  # fmt: skip
        ends = self.tasks.end_ids
        answers = generate(self.model, requests, lambda ref: cartridge, ends)
        shares = [self._recited(self.tasks.decode(a.token_ids)) for a in answers]
        sample = Sample("truth", self.name, self.prompt, self.truth, (), ())
        nats = -response_logprobs(self.model, [sample], {self.name: cartridge}, 1024).mean()
        return {"sampled": fmean(shares[1:]), "greedy": shares[0], "nats": float(nats)}

    def _recited(self, text: str) -> float:
        """Return the share of the note's sentences that a text has."""
        spoken = {" ".join(s.split()) for s in sentences(text)}
        return fmean(" ".join(s.split()) in spoken for s in self.note)


def trained(
    chart: NoteRecitations, arm: Arm, steps: int, start: Tensor, begin: int
) -> tuple[Tensor, dict[str, Any]]:
    """Return the cartridge after `steps` on an arm's text from `start`, with facts of the arm. The
    prompts are those of the steps from `begin` on."""
    spec = spec_of(chart.seed, steps, arm.rate, arm.rollout or {})
    tasks, room = chart.tasks, OneProcess(chart.model, chart.document, chart.tasks.end_ids)
    sampling = opened(spec, cast("Any", room), tasks.end_ids)
    bank = CartridgeBank([chart.name], [start], frozen=1)
    trainer = CartridgeTrainer(chart.model, bank, spec.train, loss=arm.loss)
    trainer.begin("on_policy", steps)
    shares, seconds, tokens = [], 0.0, 0
    for step in range(begin, begin + steps):
        room.cartridge = bank.kv()[0].detach()
        started = time.process_time()
        rollout = _rollout(tasks, room, sampling, arm, step, trainer.version)
        seconds += time.process_time() - started
        if rollout.verified:
            shares.append(rollout.verified["share"])
        samples = list(rollout.samples)
        scored = score_kept(chart.model, samples, {chart.name: chart.document}, ROW_TOKENS, TOP)
        teacher, marks = TeacherDistribution(**scored), trained_marks(samples)
        if marks is not None:
            teacher = teacher.rows(torch.tensor([m for of_one in marks for m in of_one]))
        batch = TrainBatch(doc=samples, doc_trained=marks, scores={"doc_teacher": teacher})
        tokens += trainer.step(batch, trainer.version).tokens
    facts: dict[str, Any] = {"tokens": tokens, "sampling_cpu_s": round(seconds, 2)}
    if shares:
        facts |= {"accepted_first": shares[0], "accepted_last": shares[-1]}
    return bank.kv()[0].detach().clone(), facts


def _rollout(
    tasks: LongHealthPrompts, room: OneProcess, sampling: Any, arm: Arm, step: int, version: int
) -> Rollout:
    if arm.rollout is None:
        prompts = tasks.offline(step)
        return as_rollout(
            step, prompts, asyncio.run(room.generate([p.request for p in prompts])), True
        )
    prompts = tasks.rollout(step, version)
    if sampling is not None:
        return cast("Rollout", asyncio.run(sampling.rollout(step, prompts, room.generate)))
    return as_rollout(
        step, prompts, asyncio.run(room.generate([p.request for p in prompts])), False
    )


def cells(part: str, charts: int) -> Iterator[tuple[int, list[tuple[str, Arm]]]]:
    """Yield the charts of a part of the study, each with its arms."""
    if part == "rates":
        tried = [(name, replace(arm, rate=r)) for name, arm in ARMS.items() for r in RATES]
        yield from ((chart, tried) for chart in TUNING_CHARTS)
    else:
        for i in range(charts):
            yield FIRST_CHART + i, [x for x in ARMS.items() if i < CHARTS.get(x[0], charts)]


def main() -> None:
    """Run a part of the study from where its record ends, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("rates", "charts"))
    parser.add_argument(
        "--charts", type=int, default=CHARTS_OF_B, help="charts of study B; see README.md"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    path = Path("runs") / f"verified-{options.part}.json"
    record: dict[str, Any] = {
        "study": f"verified {options.part}", "steps": STEPS, "warm_steps": WARM_STEPS,
        "warm_lr": WARM_LR, "recitations": RECITATIONS, "torch": torch.__version__,
        "processor": platform.machine(), "threads": 1, "rows": [],
    }  # fmt: skip
    if path.exists():
        record["rows"] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    rows = record["rows"]
    path.parent.mkdir(exist_ok=True)

    def keep(seed: int, name: str, rate: float, facts: dict[str, Any]) -> None:
        rows.append({"chart": seed, "arm": name, "rate": rate, **facts})
        print(json.dumps(rows[-1]), flush=True)
        write_atomically(path, json.dumps(record, indent=1) + "\n")

    for seed, arms in cells(options.part, options.charts):
        finished = {(row["arm"], row["rate"]) for row in rows if row["chart"] == seed}
        wanted = [(name, arm) for name, arm in arms if (name, arm.rate) not in finished]
        if not wanted:
            continue
        chart = NoteRecitations(model, tokenizer, seed)
        first = Arm(None, LossSpec(), WARM_LR)
        warm, _ = trained(chart, first, WARM_STEPS, chart.document[:, :, :, :28], 0)
        if (WARM, 0.0) not in finished:
            keep(seed, WARM, 0.0, chart.measure(warm))
        for name, arm in wanted:
            cartridge, facts = trained(chart, arm, STEPS, warm, WARM_STEPS)
            keep(seed, name, arm.rate, {**chart.measure(cartridge), **facts})


if __name__ == "__main__":
    main()
