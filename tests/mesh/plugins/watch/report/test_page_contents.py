"""The report: right numbers, nothing from outside, nothing unescaped, the same bytes each time."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from report_setup import HOSTILE, START, Page, make_run, rollout, svgs

from cartridge_forge.plugins.watch.pages.export import script, write_report
from cartridge_forge.plugins.watch.report.page import phase_means
from cartridge_forge.services.run_directory import RunDirectory


def own_scripts_alone(html: str) -> bool:
    """Two scripts of its own: what is kept as JSON, in which a "<" is escaped, and the code."""
    kept, code = Page(html).scripts
    return html.count("<script") == 2 and "<" not in kept and code == script()


def test_the_plots_are_labelled_and_follow_the_page(html: str) -> None:
    drawn = svgs(html)
    assert len(drawn) == 3
    for svg in drawn:
        root = ElementTree.fromstring(svg)  # well-formed on its own
        assert root.get("role") == "img"
        assert root.get("viewBox")
        assert root.get("width") is None
        assert re.findall(r"#dead|font-size: 0", svg) == []
        assert "var(--ink)" in svg
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000", "#ffffff"}
    kl, accuracy, phases = (" ".join(ElementTree.fromstring(s).itertext()) for s in drawn)
    assert "on_policy" in kl
    assert "nats per token" in kl
    for level in ("none 21%", "document 98%", "offline 76%", "on_policy 88%"):
        assert level in accuracy
    assert "untrained" not in accuracy
    for phase in ("rollout", "score", "train", "publish", "orchestration", "10%"):
        assert phase in phases
    assert 'aria-label="KL to the document teacher, per token. on_policy:' in html


def test_the_routers_share_stands_under_the_arms(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_report(run.path)
    assert "the router finds" not in Page(run.report.read_text(encoding="utf-8")).text
    results = run.read_results() or {}
    routing = {"accuracy": 0.97, "ci95": [0.9361, 0.9862], "n": 200}
    arms = results["arms"]
    arms = {**arms, "on_policy": {**arms["on_policy"], "routing": routing}}
    run.results.write_text(json.dumps({**results, "arms": {**arms, "routed": arms["none"]}}))
    write_report(run.path)
    lines = Page(run.report.read_text(encoding="utf-8")).lines
    (said,) = [line for line in lines if "the router finds" in line]
    assert said.endswith("the cartridge of 97.0% of 200 questions (93.6-98.6%).")
    assert any(line.startswith("routed | 21.0%") for line in lines)


def test_the_start_is_shown_with_the_runs_behind_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_report(run.path)
    assert "Start" not in re.findall(r"<h2>(.*?)</h2>", run.report.read_text(encoding="utf-8"))
    before = {"from": "ward.pt", "sha256": "0" * 64, "tokens": 24, "frozen": 1, "source": {}}
    source = {"run": "r1", "checkpoint": "version-000180", "step": 180, "start": before}
    record = {
        "patient_01": {"from": "runs/r1/checkpoints/version-000180", "sha256": "1" * 64,
                       "tokens": 28, "frozen": 1, "source": source},
        "patient_02": {"init": "first_tokens"},
    }  # fmt: skip
    run.start.write_text(json.dumps(record))
    write_report(run.path)
    lines = Page(run.report.read_text(encoding="utf-8")).lines
    assert lines[lines.index("Start") + 1 :][:3] == [
        "from runs/r1/checkpoints/version-000180 (step 180, 28 tokens, 1 frozen): patient_01",
        "by first_tokens: patient_02",
        "patient_01 came from r1/version-000180 after ward.pt",
    ]


def test_ids_are_unique_and_every_reference_lands(html: str) -> None:
    page = Page(html)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = {(attrs.get("href") or "#")[1:] for _, attrs in page.tags if attrs.get("href")} | set(
        re.findall(r"url\(#([^)]+)\)", html)
    )
    assert used <= set(ids)


def test_nothing_is_asked_of_the_network(html: str) -> None:
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object"} == set()
    for tag, attrs in page.tags:
        assert "src" not in attrs
        for name in ("href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, attrs)
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html.partition("<script")[0]) == []
    (policy,) = [attrs["content"] for _, attrs in page.tags if "content" in attrs
                 and "default-src 'none'" in str(attrs["content"])]  # fmt: skip
    own = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert f"script-src 'sha256-{own}'" in str(policy)
    assert "unsafe" not in str(policy)
    assert not any("style" in attrs for _, attrs in page.tags)  # the policy forbids them


def test_what_a_model_wrote_is_text_and_never_markup(html: str) -> None:
    assert own_scripts_alone(html)
    assert "<img" not in html
    assert f"on_policy answer 1.0 {HOSTILE}" in Page(html).text
    assert f"name: {HOSTILE}" in Page(html).text


def test_samples_are_of_the_first_and_the_last_step(html: str) -> None:
    found = re.findall(r"(on_policy|offline) answer (\d\.\d)", Page(html).text)
    assert found == [
        (name, number)
        for name in ("on_policy", "offline")
        for number in ("1.0", "1.1", "4.0", "4.1")
    ]


def test_it_reads_on_a_phone_and_in_the_dark(html: str) -> None:
    assert 'content="width=device-width, initial-scale=1"' in html
    assert "prefers-color-scheme: dark" in html
    assert '<html lang="en">' in html


def test_a_run_that_wrote_nothing_yet_has_a_report(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "longhealth", "seed: 0\n", now=START)
    page = Page(write_report(run.path).read_text())
    for piece in (
        "unfinished",
        "There is no results.json",
        "No arm has its final evaluation.",
        "No step was recorded.",
        "No rollout was recorded.",
    ):
        assert piece in page.text, piece
    assert "svg" not in {tag for tag, _ in page.tags}


def test_an_empty_folder_has_a_report(tmp_path: Path) -> None:
    assert "There is no spec.yaml." in write_report(tmp_path).read_text()


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1, finished=False)
    run.append_event("failed", now=START, error=f"StaleTokenError: {HOSTILE}")
    with run.metrics.open("ab") as file:
        file.write(b'{"arm": "on_pol')  # killed while writing
    html = write_report(run.path).read_text()
    page = Page(html)
    assert f"error: StaleTokenError: {HOSTILE}" in page.text
    assert ("p", {"class": "status failed"}) in page.tags
    assert own_scripts_alone(html)
    assert len(svgs(html)) == 2  # no probe, so no accuracy plot


def test_probes_without_final_arms_are_named_in_a_legend(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2, finished=False)
    html = write_report(run.path).read_text()
    assert "offline" in " ".join(ElementTree.fromstring(svgs(html)[1]).itertext())
    assert "final accuracy" not in html


def test_a_long_rollout_is_cut(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "longhealth", "", now=START)
    run.append_rollouts([rollout("offline", 1, 0, "x" * 1500)])
    text = Page(write_report(run.path).read_text()).text
    assert f"{'x' * 1200} ... (300 more characters)" in text
    assert "x" * 1201 not in text


def test_phase_means_count_a_repeated_step_once() -> None:
    def step(number: int, rollout: float) -> dict[str, Any]:
        seconds = {"rollout": rollout, "orchestration": 0.5, "step": rollout + 0.5}
        return {"event": "step", "arm": "on_policy", "step": number, "seconds": seconds}

    events: list[dict[str, Any]] = [
        step(1, 1.0),
        step(2, 9.0),
        {"event": "run_started"},
        step(2, 2.0),
    ]
    means = {"rollout": 1.5, "score": 0.0, "train": 0.0, "publish": 0.0, "environment": 0.0}
    assert phase_means(events) == {"on_policy": means | {"orchestration": 0.5, "step": 2.0}}
