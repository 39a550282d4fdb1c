"""Test the report of a run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from report_setup import (
    DOCUMENT,
    EVAL_ROW,
    HOSTILE,
    NONE,
    START,
    Page,
    eval_found,
    eval_row,
    make_run,
    results,
    rollout,
    svgs,
)

from cartridge_forge.plugins.chat.episodes import Episode, Observation, Task, Turn
from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    PanelVerdict,
    ReplayState,
    TeacherUsage,
    TeacherVote,
    ToolAction,
    VerdictReason,
)
from cartridge_forge.plugins.environments.episode_files import to_row as episode_row
from cartridge_forge.plugins.evaluate.strategies import ArmRow
from cartridge_forge.plugins.replay.budget import CallNow, SettledCall, SpendLimits, TeacherCall
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.vote_records import to_row
from cartridge_forge.plugins.watch.pages.export import script, write_report
from cartridge_forge.plugins.watch.report.evaluation import (
    cells,
    markdown,
    pair_section,
    plots,
    section,
    write_page,
)
from cartridge_forge.plugins.watch.report.frontier import best
from cartridge_forge.plugins.watch.report.page import phase_means
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.services.run_directory import EVALUATION, FRONTIER, RunDirectory

X, Y, Z = '{"choice":"X"}', '{"choice":"Y"}', '{"choice":"Z"}'

NO_LIMITS = SpendLimits(10**12, 10**12, 8, None, 5, 30.0)


def metric(step: int, **facts: object) -> MetricRow:
    return MetricRow(
        arm="on_policy", step=step, version=step, kl=0.5, grad_norm=1.0, lr=0.02, tokens=8,
        stale_tokens=0, **facts,  # type: ignore[arg-type]
    )  # fmt: skip


def turn(text: str, said: Observation) -> Turn:
    return Turn((4, 2), (7, 8), (-0.1, -0.7), (1, 1), text, said)


def episode(
    name: str, reward: float | None, *flags: str, turns: Sequence[Turn] = (), kind: str = ""
) -> Episode:
    opening = Observation((AgentMessage("user", f"what is the mri? {HOSTILE}"),))
    task = Task(f"on_policy/{name} {HOSTILE}", "desk_01", {})
    return Episode(task, "g", opening, tuple(turns), Sampling(), reward, kind, flags)


EPISODES = (
    episode(
        "0", 1.0, "answer_not_through_tools", "verifier_disagrees",
        turns=[
            turn(f"find {HOSTILE}", Observation((AgentMessage("tool", f"no {HOSTILE}"),),
                 error_kind=f"bad {HOSTILE}")),
            turn("answer edema.", Observation((AgentMessage("tool", "right."),), done=True,
                 reward=1.0,
                 expected=f"fibrosis {HOSTILE}")),
        ],
    ),
    episode("1", 0.0, "answer_not_through_tools"),
    episode("2", 0.0, f"later {HOSTILE}"),
    episode("3", None, kind=f"environment_died {HOSTILE}"),
)  # fmt: skip


def state(turn: int) -> ReplayState:
    seen = tuple(AgentMessage("tool", f"seen {i} {HOSTILE}") for i in range(6))
    return ReplayState(f"trace {HOSTILE}", turn, seen, (), ToolAction("find", {}))


def vote(at: ReplayState, teacher: str, action: str | None, error: str = "") -> TeacherVote:
    key = f"{teacher}/{at.turn}"
    usage = TeacherUsage(8, 4)
    return TeacherVote(state_hash(at), teacher, key, HOSTILE, action, usage, 0, 0.5, 1, error)


def verdict(
    turn: int, reason: VerdictReason, counts: tuple[tuple[str, int], ...], *votes: TeacherVote
) -> PanelVerdict:
    chosen = X if reason == "pair" else None
    at = state(turn)
    return PanelVerdict(
        state_hash(at), at.trace_id, turn, reason, chosen, Y, counts, votes, "error_turn"
    )


# a and b agree twice; c is alone once and twice says nothing that can be read.
VERDICTS = (
    verdict(0, "pair", ((X, 2),), vote(state(0), "a", X), vote(state(0), "b", X)),
    verdict(
        1, "disagreement", ((X, 1), (Z, 1)), vote(state(1), "a", X), vote(state(1), "b", Z),
        vote(state(1), "c", None, f"unparseable: {HOSTILE}"),
    ),
    verdict(
        2, "agrees_with_student", ((X, 2), (Z, 1)), vote(state(2), "a", X), vote(state(2), "b", X),
        vote(state(2), "c", Z),
    ),
    verdict(
        3, "too_few_votes", ((X, 1),), vote(state(3), "a", X), vote(state(3), "b", None, "timeout"),
        vote(state(3), "c", None, "unparseable: no JSON"),
    ),
)  # fmt: skip


def pay(ledger: SpendLedger, teacher: str, key: str, nanodollars: int, outcome: str) -> None:
    admission = ledger.admit(TeacherCall(key, teacher, "run", 10**9))
    assert isinstance(admission, CallNow)
    settled = SettledCall(
        admission.attempt, key, teacher, "run", outcome, nanodollars, None, HOSTILE, False, True,
        0.5, 1, 0.0, 1.0,
    )  # fmt: skip
    ledger.settle(settled)
    ledger.settle(replace(settled, nanodollars=10**9))  # of two settlements the first counts


DOCUMENTS = {
    "documents": [
        {"name": "salt", "source": HOSTILE, "sha256": "ab" * 32, "encoding": "utf-8",
         "tokens": 1234, "chars": [0, 5678]},
    ],
    "left_out": [f"{HOSTILE} is empty"],
    "notes": ["old.txt is not UTF-8: read as cp1252"],
}  # fmt: skip

ASKED = (("question", "model", ""), ("question", "plain", ""), ("creative", "plain", "double"))

AGREEMENT = {"kl": 0.25, "kl_ci95": [0.15, 0.35], "top1": 0.75, "tokens": 2000}

POPULATIONS = {"accuracy": [0.5, 0.8], "majority_vote": 0.7, "pass_at_n": 0.9}

ONE = ArmRow("one", "chain_of_thought", 0.5, (0.4, 0.6), 100, 3, 12.0, 30.0, 1.0, 0.2, 4.0)

OTHER = replace(
    ONE,
    name=HOSTILE,
    strategy=f"lost $x$ {HOSTILE}",
    accuracy=0.7,
    tokens=400,
    gain=0.2,
    gain_ci95=(0.1, 0.3),
)


def doc(value: float) -> dict[str, float]:
    return {"value": value, "count": 10, "weight": 0.2}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    whole_run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "desk", "seed: 0\n", now=START)
    grpo = {"value": -0.25, "count": 1234, "weight": 1.0, "ratio": 1.0}
    sdpo = {"value": 0.0325, "count": 40, "weight": 0.125, "gradient_removed": 0.0116}
    nothing = {"value": 0.0, "count": 0, "weight": 0.5}
    whole_run.append_metric(
        metric(
            1,
            channels={
                "doc_kl": {
                    **doc(0.5),
                    "grad_norm": 0.0119,
                    "mean_grad_norm": 0.02,
                    "coefficient": 4.75,
                    "share": 0.125,
                },
                "grpo": {
                    **grpo,
                    "grad_norm": 0.5,
                    "mean_grad_norm": 0.5,
                    "coefficient": 0.79,
                    "share": 0.875,
                },
                "replay_dpo": nothing,
            },
            cosines={"doc_kl/grpo": -0.25},
            episodes={
                "count": 4,
                "errored": 1,
                "turns": 8,
                "reward": 0.5,
                "error/bad_call": 2,
                "teachers/pair": 1,
                "rsa/accuracy_0": 0.25,
                "rsa/accuracy_1": 0.5,
                "teachers/trained": 2,
            },
        )
    )
    whole_run.append_metric(
        metric(
            2,
            channels={"doc_kl": doc(0.375), "grpo": grpo, "sdpo": sdpo, "replay_dpo": nothing},
            episodes={
                "count": 4,
                "errored": 0,
                "turns": 10,
                "reward": 0.75,
                f"error/lost $x$ {HOSTILE}": 3,
                "teachers/trained": 1,
                "teachers/too_late": 4,
            },
        )
    )
    whole_run.append_episodes(episode_row(e, "on_policy", 1) for e in EPISODES)
    for told in VERDICTS:
        rows = [to_row(state(told.turn)), to_row(told)]
        whole_run.append_votes({"arm": "on_policy", "step": 2, **row} for row in rows)
    ledger = SpendLedger(whole_run.ledger, {"a": NO_LIMITS, "b": NO_LIMITS})
    pay(ledger, "a", "1", 1_250_000, "answered")
    pay(ledger, "a", "2", 250_000, "http_500")
    pay(ledger, "b", "3", 0, "rate_limited")
    ledger.close()
    whole_run.append_rollouts([rollout("on_policy", 1, 0, f"answer {HOSTILE}")])
    whole_run.documents.write_text(json.dumps(DOCUMENTS))
    keys = ("kind", "asker", "refused")
    said = {"document": "notes.md", "question": f"q {HOSTILE}", "answer": "an answer"}
    study = [json.dumps(dict(zip(keys, asked, strict=True)) | said) for asked in ASKED]
    whole_run.selfstudy.write_text("\n".join(study) + "\n")
    whole_run.contamination.write_text('{"row": 1}\n{"row": 2}\n')
    (whole_run.path / FRONTIER).write_text(
        json.dumps({"version": 16, "arms": [arm.as_dict() for arm in (ONE, OTHER)]})
    )
    (whole_run.path / EVALUATION).write_text(
        json.dumps(eval_found(NONE, DOCUMENT, EVAL_ROW, eval_row(arm=HOSTILE)))
    )
    told = results()
    told["arms"]["on_policy"] |= {"f1": 0.5, "agreement": AGREEMENT, "populations": POPULATIONS}
    told["aggregation"] = {"last": 0.2, "first": 0.05, "aggregation": 0.15, "share": 0.75}
    whole_run.write_results(told)
    write_report(whole_run.path)
    return whole_run


@pytest.fixture(scope="module")
def whole_html(whole_run: RunDirectory) -> str:
    return whole_run.report.read_text(encoding="utf-8")


def test_the_whole_text_is_as_it_was(whole_html: str, whole_run: RunDirectory) -> None:
    """report.txt by hand, for instance the votes: a majority was in the states 0 and 2; b said X
    there, and Z and nothing elsewhere; of two settlements of a call the first is paid."""
    lines = [line.strip(" |") for line in Page(whole_html).lines]
    text = "\n".join(filter(None, lines)).replace(whole_run.id, "RUN").replace(HOSTILE, "HOSTILE")
    golden = Path(__file__).with_name("report.txt").read_text(encoding="utf-8")
    assert text.splitlines() == golden.splitlines()


def test_the_same_files_give_the_same_bytes(whole_run: RunDirectory) -> None:
    before = whole_run.report.read_bytes()
    assert write_report(whole_run.path).read_bytes() == before
    ids = re.findall(r'\bid="([^"]+)"', before.decode())
    assert len(ids) == len(set(ids))


def test_what_others_wrote_is_text_and_never_markup(whole_html: str) -> None:
    assert "img" not in {tag for tag, _ in Page(whole_html).tags}
    assert whole_html.count("<script") == len(Page(whole_html).scripts) == 2  # the page's own
    drawn = ["".join(ElementTree.fromstring(svg).itertext()) for svg in svgs(whole_html)]
    assert len(drawn) == 3
    assert f"lost $x$ {HOSTILE}" in drawn[0]


def test_cosines_and_populations_are_kept_for_the_page_run(whole_html: str) -> None:
    first, second = json.loads(Page(whole_html).scripts[0])["answers"]["curves"]["rows"]
    assert (first["cosines"], first["populations"]) == (
        {"doc_kl/grpo": -0.25}, {"0": 0.25, "1": 0.5},
    )  # fmt: skip
    assert (second["cosines"], second["populations"]) == (None, {})


def test_episodes_that_all_died_are_said_to_have(tmp_path: Path) -> None:
    whole_run = RunDirectory.create(tmp_path, "desk", "", now=START)
    died = [episode(str(i), None, kind="environment_died") for i in range(3)]
    whole_run.append_episodes(episode_row(e, "on_policy", 1) for e in died)
    row = metric(1, episodes={"count": 3, "errored": 3, "turns": 0})
    whole_run.append_metric(replace(row, kl=None))
    whole_run.write_results(results())
    page = Page(write_report(whole_run.path).read_text())
    text = page.text
    assert "None of 3 episodes could be judged." in text
    assert "A case that could not be judged is unparsed and counts as wrong." in text
    assert "Flags of 3 episodes." in text
    assert "desk_01 (0 turns, environment_died)" in text
    assert "Channels" not in text
    assert "Teachers" not in text
    assert "on_policy | 1 | - | - | - |" in "\n".join(page.lines)


def test_the_frontier_is_what_nothing_beats_for_less() -> None:
    arms = (("one", 0.5, 12), ("a", 0.6, 40), ("b", 0.6, 48), ("c", 0.55, 20), ("d", 0.4, 99))
    rows = [replace(ONE, name=name, accuracy=share, tokens=n) for name, share, n in arms]
    assert [r.name for r in best(rows)] == ["one", "c", "a"]


def test_a_run_on_questions_shows_its_sections_alone(html: str, run: RunDirectory) -> None:
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads == ["Arms", "Training", "Compression and policy", "Sample rollouts", "Spec"]
    text = " ".join(Page(html).text.split())
    for piece in (
        f"longhealth / {run.id}",
        "An answer that names no option is unparsed",
        "2026-07-26T10:15:30.000Z",
    ):
        assert piece in text, piece
    lines = Page(html).lines
    ends = "4 | 2.000 | 0.500 | 40.0% | 80.0% | 0.50 | 0.10 | 0.30 | 0.05"
    # 0.05 of 1.00 s and 0.25 of 1.20 s
    assert f"on_policy | {ends} | 1.00 | 5.0%" in [line.strip(" |") for line in lines]
    assert f"offline | {ends} | 1.20 | 20.8%" in [line.strip(" |") for line in lines]


def test_the_same_files_give_the_same_bytes_of_a_small_run(
    run: RunDirectory, tmp_path: Path
) -> None:
    before = run.report.read_bytes()
    assert write_report(run.path).read_bytes() == before
    # Another process, another place, another hash seed.
    copy = tmp_path / "longhealth" / run.id
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("report.html"))
    code = (
        "import sys; from pathlib import Path; "
        "from cartridge_forge.plugins.watch.pages.export import write_report; "
    )
    subprocess.run(
        [sys.executable, "-c", code + "write_report(Path(sys.argv[1]))", str(copy)],
        check=True,
        cwd=Path(__file__).parents[5],
    )
    assert (copy / "report.html").read_bytes() == before


def own_scripts_alone(html: str) -> bool:
    """Two scripts of its own: what is kept as JSON, in which a "<" is escaped, and the code."""
    kept, code = Page(html).scripts
    return html.count("<script") == 2 and "<" not in kept and code == script()


def test_the_plots_are_labelled_and_follow_the_page(whole_html: str) -> None:
    for svg in svgs(whole_html):
        root = ElementTree.fromstring(svg)  # well-formed on its own
        assert root.get("role") == "img"
        assert root.get("viewBox")
        assert root.get("width") is None
        assert re.findall(r"#dead|font-size: 0", svg) == []
        assert "var(--ink)" in svg
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000", "#ffffff"}
    assert 'aria-label="Accuracy against tokens. 100 questions over version 16;' in whole_html


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


def test_a_row_as_texts() -> None:
    assert cells(EVAL_ROW) == (
        "on_policy", "28", "8.2x", "107 k", "85.0%", "79.0-89.0%", "84.0%", "86.0%", "17",
        "1.23", "8.5", "6.25", "0.021", "97.0%", "0.040", "90.0% of 95.0%",
    )  # fmt: skip
    assert cells(NONE)[2:4] == ("-", "-")
    assert cells(NONE)[-2:] == ("-", "-")


def test_differences_are_those_of_trained_arms() -> None:
    told = pair_section(eval_found(NONE, DOCUMENT, EVAL_ROW))
    assert told.rows == (("on_policy", "document", "-10.0", "-20.0 to +0.0", "0.040"),)
    assert told.title == "differences in accuracy, paired bootstrap over 4 documents"


def test_markdown_keeps_its_columns_whatever_a_name_holds() -> None:
    text = markdown(eval_found(NONE, DOCUMENT, eval_row(arm="on|policy <b>"), notes=["a note"]))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in rows}
    assert widths == {17, 6}
    assert "on\\|policy &lt;b&gt;" in text
    assert "0 exact and 3 near doubles among 10,080 training prompts" in text
    assert "- a note" in text
    for name in ("eval-compression.svg", "eval-training.svg"):
        assert f"]({name})" in text


def test_plots_are_whole_svg_files_with_their_own_colours() -> None:
    told = eval_found(NONE, DOCUMENT, EVAL_ROW)
    first = plots(told)
    assert [plot.file for plot in first] == ["eval-compression.svg", "eval-training.svg"]
    for plot, again in zip(first, plots(told), strict=True):
        svg = plot.alone
        assert svg == again.alone
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        for name in set(part.split(")")[0] for part in svg.split("var(")[1:]):
            assert f"{name}:#" in svg
    # Without any training there is no plot against its tokens.
    assert [plot.file for plot in plots(eval_found(NONE, DOCUMENT))] == ["eval-compression.svg"]


def test_where_no_answers_are_known_agreement_is_shown(tmp_path: Path) -> None:
    unknown = eval_row(accuracy=None, ci95=None, exact=None, f1=None)
    told = eval_found(unknown, metric="agreement")
    assert cells(unknown)[4:8] == ("-", "-", "-", "-")
    assert "agreement against compression" in write_page(tmp_path, told).read_text()


def test_the_page_escapes_what_others_wrote(tmp_path: Path) -> None:
    told = eval_found(NONE, DOCUMENT, eval_row(arm=HOSTILE), runs=[HOSTILE], notes=[HOSTILE])
    page = Page(write_page(tmp_path, told).read_text())
    assert HOSTILE in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    assert section(told).title == "200 questions (held-out questions) over models/reader"
