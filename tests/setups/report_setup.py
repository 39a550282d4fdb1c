"""What tests of the report share: a run by hand, texts that would be markup, and a page's parts."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.evaluate.records import EvalRow, Evaluation
from cartridge_forge.plugins.watch.pages.export import write_report
from cartridge_forge.protocols.records.run_files import (
    ArmResult,
    MeasuredAccuracy,
    MetricRow,
    RolloutRow,
    RunResults,
)
from cartridge_forge.services.run_directory import RunDirectory

START = datetime(2026, 7, 26, 10, 15, 30, tzinfo=UTC)
HOSTILE = "<script>alert('x')</script><img src=//evil.example/a.png>&\"quoted\""
LINES = ("p", "h1", "h2", "h3", "tr", "dd", "li", "figcaption", "summary", "article", "section")
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Every tag with its attributes, the text outside of them and of scripts, and that text line by
    line without the plots; fails on tags left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.lines = [""]
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "dt"):
            self.lines[-1] += " | "
        elif tag in LINES and "svg" not in self.open:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append(data)
            return
        self.text += data
        if not {"svg", "style", "title"} & set(self.open):
            self.lines[-1] += data.strip("\n")


def rollout(arm: str, step: int, index: int, text: str) -> RolloutRow:
    return RolloutRow(
        arm=arm,
        step=step,
        id=f"train/{step}/{index}",
        document="patient_01",
        kind="summarise",
        prompt_ids=(4,),
        response_ids=(17, 2),
        sampler_logprobs=(-0.3, -0.1),
        versions=(step - 1, step),
        sampling={"temperature": 1.0},
        finish_reason="stop",
        text=text,
        cartridge="patient_01",
        contexts=("patient_01",),
    )


def measured(accuracy: float) -> MeasuredAccuracy:
    ci95 = [accuracy - 0.03, accuracy + 0.02]
    return {"accuracy": accuracy, "ci95": ci95, "n": 200, "parse_failures": 7}


def arm(accuracy: float, sampled: float | None = None) -> ArmResult:
    return {**measured(accuracy), "sampled": None if sampled is None else measured(sampled)}


def results() -> RunResults:
    return {
        "arms": {
            "none": arm(0.21),
            "document": arm(0.975),
            "offline": arm(0.76, 0.725),
            "on_policy": arm(0.885, 0.86),
        },
        "kl": {"first": 2.0, "last": 0.5},
        "compression": {
            "document_tokens": 1180.0,
            "cartridge_tokens": 128,
            "ratio": 9.21875,
        },
        "policy": {"rollouts": 12, "tokens": 24601, "stale_tokens": 0},
        "phases": {"rollout": 0.5},
        "orchestration_share": 0.05,
        "wall_seconds": 372.0,
        "tokens_trained": {"on_policy": 3200, "offline": 3201},
        "status": "finished",
    }


def make_run(root: Path, steps: int = 4, finished: bool = True) -> RunDirectory:
    run = RunDirectory.create(root, "longhealth", f"seed: 0\nname: {HOSTILE}\n", now=START)
    run.append_event("run_started", now=START)
    for name, orchestration in (("on_policy", 0.05), ("offline", 0.25)):
        for step in range(1, steps + 1):
            texts = [f"{name} answer {step}.{i} {HOSTILE}" for i in range(3)]
            run.append_rollouts(rollout(name, step, i, text) for i, text in enumerate(texts))
            run.append_metric(
                MetricRow(
                    arm=name,
                    step=step,
                    version=step,
                    kl=2.0 / step,
                    grad_norm=1.0,
                    lr=0.02,
                    tokens=800,
                    stale_tokens=0,
                    accuracy=0.2 * step if step % 2 == 0 else None,
                )
            )
            run.append_event(
                "step",
                now=START,
                arm=name,
                step=step,
                seconds={"rollout": 0.5, "score": 0.1, "train": 0.3, "publish": 0.05}
                | {"orchestration": orchestration, "step": 0.95 + orchestration},
                tokens_per_second=900.0,
            )
    if finished:
        run.write_results(results())
        run.append_event("finished", now=START)
    return run


def svgs(html: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)


EVAL_ROW = EvalRow(
    arm="on_policy", kind="on_policy", run="r1", mesh="m", step=5, budget=28, prefix_tokens=28.0,
    document_tokens=231.0, compression=8.25, trained_tokens=107_154, n=200, accuracy=0.85,
    ci95=[0.79, 0.89], exact=0.84, f1=0.86, parse_failures=17,
    answers={"value": 1.234, "tokens": 900}, passages={"value": 8.5, "tokens": 300},
    after_own={"value": 6.25, "tokens": 90, "nll": {"p/passage/0": 1.8326}},
    teacher={"kl": 0.021, "kl_ci95": [0.01, 0.03], "top1": 0.97, "tokens": 2000},
    forgetting={"kl": 0.04, "perplexity_ratio": 1.041, "top1": 0.98, "tokens": 300,
                "accuracy": 0.9, "accuracy_without": 0.95, "n": 24},
)  # fmt: skip


def eval_row(**changes: Any) -> EvalRow:
    return EvalRow(**{**EVAL_ROW, **changes})


def eval_found(*rows: EvalRow, **changes: Any) -> Evaluation:
    told: dict[str, Any] = {
        "schema": 1, "model": "models/reader", "source": "held-out questions", "runs": ["r1"],
        "metric": "accuracy", "resampled": "documents", "clusters": 4, "rows": list(rows),
        "pairs": [
            {"a": "document", "b": "on_policy", "difference": -0.1, "ci95": [-0.2, 0.0],
             "share": 0.04},
            {"a": "none", "b": "document", "difference": 0.8, "ci95": [0.7, 0.9], "share": 0.0},
        ],
        "contamination": {"rule": "warn", "alike": 0.8, "prompts": 10_080, "questions": 200,
                          "exact": 0, "near": 3, "file": "eval_contamination.jsonl"},
        "notes": [], "spec": {},
    }  # fmt: skip
    arms = {one["arm"] for one in rows}
    told["pairs"] = [pair for pair in told["pairs"] if {pair["a"], pair["b"]} <= arms]
    return Evaluation(**{**told, **changes})


NONE = eval_row(
    arm="none", kind="none", compression=None, prefix_tokens=1.0, trained_tokens=0,
    forgetting=None, passages=None, after_own=None, accuracy=0.18, ci95=[0.13, 0.24],
)  # fmt: skip
DOCUMENT = eval_row(arm="document", kind="document", compression=1.0, trained_tokens=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a run with its report."""
    run = make_run(tmp_path_factory.mktemp("runs"))
    assert write_report(run.path) == run.report
    return run


@pytest.fixture(scope="module")
def html(run: RunDirectory) -> str:
    """Return the page of the report."""
    return run.report.read_text(encoding="utf-8")
