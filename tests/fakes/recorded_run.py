"""A run directory as a run leaves it, by hand: two steps on policy, one validation, two answers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.records.answers import Answer, to_row
from cartridge_forge.protocols.records.run_files import MetricRow, RolloutRow
from cartridge_forge.services.run_directory import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[2]
START = datetime(2026, 7, 26, 10, 15, 0, tzinfo=UTC)
SETS = ("train.steps=4", "train.warmup_steps=1", "evaluate.probe_questions=8",
        "evaluate.arms=[on_policy, none]")  # fmt: skip
PROMPT = (4, 370, 290, 304, 951, 36, 2, 5)  # <|user|> what is the radiologist?<|end|><|assistant|>
SAID = (304, 334, 369, 951, 1381, 19, 2)  # the chart says radiologist lakeside.<|end|>
SECONDS = {"rollout": 1.0, "score": 0.5, "train": 2.0, "publish": 0.25, "orchestration": 0.5,
           "step": 4.0}  # fmt: skip


def at(seconds: float) -> datetime:
    """So many seconds after the run's start."""
    return START + timedelta(seconds=seconds)


def rollout(step: int, index: int, **changes: Any) -> RolloutRow:
    of: dict[str, Any] = {
        "arm": "on_policy", "step": step, "id": f"on_policy/{step}/{index}",
        "document": f"patient_0{index + 1}", "kind": "question", "prompt_ids": PROMPT,
        "response_ids": SAID, "sampler_logprobs": (-0.25,) * 7, "versions": (step - 1,) * 7,
        "sampling": {"temperature": 1.0}, "finish_reason": "stop",
        "text": "the chart says radiologist lakeside.", "cartridge": f"patient_0{index + 1}",
        "contexts": (f"patient_0{index + 1}",),
    }  # fmt: skip
    return RolloutRow(**{**of, **changes})


def answer(number: int, right: float) -> Answer:
    return Answer(
        id=f"patient_01/{number}", fact=f"what is the sodium of day {number}?",
        document="patient_01",
        document_hash="0f3a", question_hash=f"91b{number}", text="the answer is 41 mmol.",
        answer="41 mmol", expected="41 mmol" if right else "52 mmol", right=right, nll=0.5,
        tokens=5,
    )  # fmt: skip


def train(run: RunDirectory, step: int, *, accuracy: float | None = None) -> None:
    """Record a step of 4 s that ends at second 10 + 4 * step."""
    run.append_rollouts([rollout(step, 0), rollout(step, 1)])
    run.append_metric(
        MetricRow(
            arm="on_policy", step=step, version=step, kl=1.0 / step, grad_norm=0.5, lr=0.02,
            tokens=14, stale_tokens=0, accuracy=accuracy,
        )
    )  # fmt: skip
    run.append_event(
        "step", now=at(10 + 4 * step), arm="on_policy", step=step, seconds=SECONDS,
        tokens_per_second=3.5,
    )  # fmt: skip


def recorded_run(
    root: Path, mesh: str = "tiny", minute: int = 0, sets: tuple[str, ...] = ()
) -> RunDirectory:
    """A run that was killed after step 2 of 4; its validation after step 2 has 6 of 8 right."""
    spec = load_spec(str(REPOSITORY / "meshes/longhealth.yaml"), sets=[*SETS, *sets]).spec
    text = dump_yaml(spec.as_dict())
    run = RunDirectory.create(root, mesh, text, START + timedelta(minutes=minute))
    run.append_event("run_started", now=at(0), pid=1)
    run.append_event("role_ready", now=at(10), role="generator", replicas=2, pids=[2, 3], seconds=9)
    train(run, 1)
    train(run, 2, accuracy=0.75)
    return run


def finish(run: RunDirectory) -> None:
    """Record steps 3 and 4 and two evaluated arms of 2 questions, of 5 s each."""
    train(run, 3)
    train(run, 4, accuracy=1.0)
    run.append_event("usable", now=at(26), version=4, cartridges=["patient_01"])
    for end, arm, rights in ((31, "on_policy", (1.0, 1.0)), (36, "none", (1.0, 0.0))):
        rows = [to_row(answer(i, right), arm, 4, sampled=False) for i, right in enumerate(rights)]
        run.append_answers(rows)
        share = sum(rights) / 2
        run.append_event("evaluated", now=at(end), arm=arm, accuracy=share, ci95=[0.1, 1.0], n=2)
    run.append_event("finished", now=at(37), status="finished")


EPISODE: dict[str, Any] = {
    "schema": 1, "record": "episode", "arm": "on_policy", "step": 1, "group": "desk/1/0",
    "task": {"id": "desk/1/0", "document": "desk_01", "arguments": {"seed": 3}},
    "opening": {"messages": [{"role": "user", "content": "who is the surgeon?"}],
                "error_kind": "", "error": "", "expected": None},
    "reward": 1.0, "error_kind": "", "flags": [], "sampling": {},
    "branches": [[*PROMPT, *SAID]],
    "turns": [
        {"branch": 0, "start": 8, "stop": 15, "sampler_logprobs": [-0.5] * 7, "versions": [0] * 7,
         "text": "the chart says radiologist lakeside.", "finish_reason": "stop",
         "hint": "look at the handbook", "no_hint": "",
         "observation": {"messages": [{"role": "tool", "content": "done"}], "error_kind": "",
                         "error": "", "expected": "lakeside"}},
    ],
}  # fmt: skip
