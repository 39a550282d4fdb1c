"""Compare cartridges trained alone with cartridges trained beside others, eight charts at a time.

    python -m studies.accuracy.composition tune     # arms on charts for tuning
    python -m studies.accuracy.composition charts   # the registered comparison

README.md beside this file has the design as it was registered. A set is eight charts of which no
two have a fact about the same field, so that a question tells whose chart it is about. Each arm
trains the eight cartridges of a set on policy, with equally many steps and prompts. Then every
held-out question is asked over its chart's cartridge

    alone    [A]
    first    [A, B], with two others behind it, in turn, so that a chart is asked beside all
    last     [B, A], with the same before it
    four     among three drawn others, at a drawn place
    eight    among all others in a drawn order

and over the charts' own keys and values composed alike (`charts`), and read as one text (`text`),
which is what the reader can do where nothing was compressed. One row a question and arm is written
when a set's arm is done, so that an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.protocols.files import REPOSITORY, write_atomically
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, composed_ref
from cartridge_forge.training.records import context_ref
from studies.accuracy.composition_tables import COMPOSED, CONDITIONS, PLAIN
from studies.accuracy.study import StudyBench

CHARTS, FACTS, PARTNERS = 8, 6, 2
TUNING_SETS = (900,)
SETS = (700, 701, 702)
READER = {"charts": "document", "text": "text"}  # arms without training, and what they read

Arm = Mapping[str, Any] | None  # train.compose
TUNED: dict[str, Arm] = {
    "alone": None,
    "1 other, half": {"distractors": 1, "share": 0.5},
    "1 other, all": {"distractors": 1, "share": 1.0},
    "3 others, half": {"distractors": 3, "share": 0.5},
}
ARMS: dict[str, Arm] = {PLAIN: None, COMPOSED: {"distractors": 1, "share": 1.0}}


def spec_of(seed: int, compose: Arm, steps: int) -> DocumentsLearn:
    """Return the config of an arm over one set of charts."""
    return DocumentsLearn.model_validate(
        {
            "model": {"path": str(REPOSITORY / "models" / "clinic-reader")},
            "data": {
                "seed": seed, "patients": CHARTS, "facts": FACTS, "notes": 2, "own_fields": True,
                "questions_per_fact": 3, "held_out": 0.9,
            },
            "cartridge": {"tokens": 20, "init": "attention_matching"},
            "rollout": {"prompts": 32, "max_tokens": 40, "kinds": ("question", "choice")},
            "train": {
                "steps": steps, "lr": 0.4, "warmup_steps": 8, "row_tokens": 256, "seed": seed,
                "compose": compose,
            },
            "evaluate": {"questions": 300, "max_tokens": 32},
        }
    )  # fmt: skip


def orders(
    patient: str, names: Sequence[str], turn: int, seed: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each condition with the order of names before question `turn` about a patient."""
    rng = random.Random(seed)
    partners = [name for name in names if name != patient]
    yield "alone", (patient,)
    for i in range(PARTNERS):
        other = partners[(PARTNERS * turn + i) % len(partners)]
        yield "first", (patient, other)
        yield "last", (other, patient)
    for condition, count in (("four", 4), ("eight", len(names))):
        chosen = [patient, *rng.sample(partners, count - 1)]
        rng.shuffle(chosen)
        yield condition, tuple(chosen)


def answered(study: StudyBench, kind: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each held-out question over prefixes of the kind: by condition a sign for
    each order of `orders`, "1" for a right answer."""
    for patient in study.names:
        exams = [e for e in study.tasks.exams if e.question.patient == patient]
        plain = study.tasks.exam_requests(exams, "study", "cartridge", 0, False)
        of_all, requests = [], list[GenerateRequest]()
        for turn, (exam, request) in enumerate(zip(exams, plain, strict=True)):
            for condition, names in orders(patient, study.names, turn, exam.question.id):
                prefix = composed_ref([PrefixRef(f"{kind}/{name}", 0) for name in names])
                if kind == "text":
                    prefix = context_ref(names)
                of_all.append((exam, condition))
                requests.append(replace(request, id=f"{request.id}/{len(requests)}", prefix=prefix))
        right = study.right([exam for exam, _ in of_all], requests)
        signs: dict[str, dict[str, str]] = {e.question.id: {} for e in exams}
        for (exam, condition), is_right in zip(of_all, right, strict=True):
            of_one = signs[exam.question.id]
            of_one[condition] = of_one.get(condition, "") + str(int(is_right))
        yield from ({"chart": patient, "question": id, **by} for id, by in signs.items())


def arm_rows(seed: int, name: str, compose: Arm, steps: int) -> Iterator[dict[str, Any]]:
    """Train an arm on a set, and yield its rows: one about the training, then the questions."""
    study = StudyBench(spec_of(seed, compose, steps))
    kind, started = READER.get(name, "cartridge"), time.process_time()
    facts: dict[str, Any] = {}
    if name not in READER:
        outputs = study.train(steps)
        facts = {
            "steps": steps, "tokens": sum(o.tokens for o in outputs),
            "first_kl": round(outputs[0].kl, 4), "last_kl": round(outputs[-1].kl, 4),
        }  # fmt: skip
    trained = time.process_time() - started
    rows = list(answered(study, kind))
    yield {
        "set": seed, "arm": name, "compose": compose, **facts, "train_cpu_s": round(trained, 1),
        "ask_cpu_s": round(time.process_time() - started - trained, 1),
    }  # fmt: skip
    yield from ({"set": seed, "arm": name, **row} for row in rows)


def main() -> None:
    """Run a part of the study from where its record ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("tune", "charts"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--sets", type=int, nargs="+", help="these alone")
    parser.add_argument("--arms", nargs="+", help="these alone")
    options = parser.parse_args()
    sets, arms = (TUNING_SETS, TUNED) if options.part == "tune" else (SETS, ARMS)
    path = Path("runs") / f"composition-{options.part}.json"
    record: dict[str, Any] = {
        "study": f"composition {options.part}", "torch": torch.__version__,
        "processor": platform.machine(), "threads": 1, "rows": [],
    }  # fmt: skip
    if path.exists():
        record["rows"] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    path.parent.mkdir(exist_ok=True)
    finished = {(row["set"], row["arm"]) for row in record["rows"]}
    for seed in options.sets or sets:
        for name, compose in {**arms, **dict.fromkeys(READER)}.items():
            if (seed, name) in finished or (options.arms and name not in options.arms):
                continue
            rows = list(arm_rows(seed, name, compose, options.steps))
            record["rows"] += rows
            print(json.dumps(rows[0]), shares_text(rows[1:]), flush=True)
            write_atomically(path, json.dumps(record) + "\n")


def shares_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the share of right answers by condition, over all orders."""
    signs = {c: "".join(row[c] for row in rows) for c in CONDITIONS}
    return ", ".join(f"{c} {s.count('1') / len(s):.1%}" for c, s in signs.items())


if __name__ == "__main__":
    main()
