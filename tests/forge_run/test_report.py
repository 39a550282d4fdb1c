"""The report: right numbers, nothing from outside, nothing unescaped, the same bytes each time."""

import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forge_run.report import write_report
from protocols.records import ArmResult, Measured, MetricRow, RolloutRow
from services.rundir import RunDirectory

START = datetime(2026, 7, 26, 10, 15, 30, tzinfo=UTC)
HOSTILE = "<script>alert('x')</script><img src=//evil.example/a.png>&\"quoted\""
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Every tag with its attributes, and the text outside of them; fails on tags left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
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

    def handle_data(self, data: str) -> None:
        self.text += data


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
    )


def measured(accuracy: float) -> Measured:
    ci95 = [accuracy - 0.03, accuracy + 0.02]
    return {"accuracy": accuracy, "ci95": ci95, "n": 200, "parse_failures": 7}


def arm(accuracy: float, sampled: float | None = None) -> ArmResult:
    return {**measured(accuracy), "sampled": None if sampled is None else measured(sampled)}


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
        run.write_results(
            {
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
        )
        run.append_event("finished", now=START)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = make_run(tmp_path_factory.mktemp("runs"))
    assert write_report(run.path) == run.report
    return run


@pytest.fixture(scope="module")
def html(run: RunDirectory) -> str:
    return run.report.read_text(encoding="utf-8")


def svgs(html: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)


def test_the_numbers_are_there(html: str, run: RunDirectory) -> None:
    text = " ".join(Page(html).text.split())
    for piece in (
        f"longhealth / {run.id}",
        "finished in 6m12s, KL 2.000 to 0.500, 9.2x fewer KV tokens, orchestration 5.0%",
        "2026-07-26T10:15:30.000Z",
        "on_policy: 2.000 to 0.500 in 4 steps; offline: 2.000 to 0.500 in 4 steps.",
        # 0.05 of 1.00 s and 0.25 of 1.20 s
        "Orchestration: on_policy 5.0%, offline 20.8%; the goal is 10% of a step at most.",
        "KV tokens, document1,180",
        "KV tokens, cartridge128",
        "compression, times9.2",
        "tokens sampled24,601",
        "stale tokens0",
        "tokens trained, offline3,201",
    ):
        assert piece in text, piece


def test_the_table_of_arms_has_headers_and_intervals(html: str) -> None:
    table = re.findall(r"<table>.*?</table>", html, flags=re.DOTALL)[0]
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)
    ]
    assert rows == [
        ["arm", "accuracy", "95% CI", "n", "unparsed", "sampled", "95% CI", "n", "unparsed"],
        ["none", "21.0%", "18.0-23.0%", "200", "7", "-", "-", "-", "-"],
        ["document", "97.5%", "94.5-99.5%", "200", "7", "-", "-", "-", "-"],
        ["untrained", "-", "-", "-", "-", "-", "-", "-", "-"],
        ["offline", "76.0%", "73.0-78.0%", "200", "7", "72.5%", "69.5-74.5%", "200", "7"],
        ["on_policy", "88.5%", "85.5-90.5%", "200", "7", "86.0%", "83.0-88.0%", "200", "7"],
    ]
    assert table.count('scope="col"') == 9
    assert table.count('scope="row"') == 5


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
    assert '<svg role="img" aria-label="KL to the document teacher, per token. on_policy:' in html


def test_ids_are_unique_and_every_reference_lands(html: str) -> None:
    page = Page(html)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html))
    assert used <= set(ids)


def test_nothing_is_asked_of_the_network(html: str) -> None:
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object"} == set()
    for tag, attrs in page.tags:
        assert "src" not in attrs
        for name in ("href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, attrs)
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []
    assert "default-src 'none'" in html


def test_what_a_model_wrote_is_text_and_never_markup(html: str) -> None:
    assert "<script" not in html
    assert "<img" not in html
    assert f"on_policy answer 1.0 {HOSTILE}" in Page(html).text
    assert f"name: {HOSTILE}" in Page(html).text


def test_samples_are_of_the_first_and_the_last_step(html: str) -> None:
    found = re.findall(r"(on_policy|offline) answer (\d\.\d)", html)
    assert found == [
        (name, number)
        for name in ("on_policy", "offline")
        for number in ("1.0", "1.1", "4.0", "4.1")
    ]


def test_it_reads_on_a_phone_and_in_the_dark(html: str) -> None:
    assert 'content="width=device-width, initial-scale=1"' in html
    assert "prefers-color-scheme:dark" in html
    assert '<html lang="en">' in html


def test_the_same_files_give_the_same_bytes(run: RunDirectory, tmp_path: Path) -> None:
    before = run.report.read_bytes()
    assert write_report(run.path).read_bytes() == before
    # Another process, another place, another hash seed.
    copy = tmp_path / "longhealth" / run.id
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("report.html"))
    code = "import sys; from pathlib import Path; from forge_run.report import write_report; "
    subprocess.run(
        [sys.executable, "-c", code + "write_report(Path(sys.argv[1]))", str(copy)],
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert (copy / "report.html").read_bytes() == before


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
    assert "<script" not in html
    assert len(svgs(html)) == 2  # no probe, so no accuracy plot


def test_probes_without_final_arms_are_named_in_a_legend(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2, finished=False)
    html = write_report(run.path).read_text()
    assert "offline" in " ".join(ElementTree.fromstring(svgs(html)[1]).itertext())
    assert "final accuracy" not in html


def test_a_long_run_is_smoothed(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=60, finished=False)
    assert "on_policy, mean of 3" in write_report(run.path).read_text()


def test_a_long_rollout_is_cut(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "longhealth", "", now=START)
    run.append_rollouts([rollout("offline", 1, 0, "x" * 1500)])
    text = Page(write_report(run.path).read_text()).text
    assert f"{'x' * 1200} ... (300 more characters)" in text
    assert "x" * 1201 not in text
