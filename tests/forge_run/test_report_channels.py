"""The report of a run of channels: its figures worked by hand, and nothing in it that is markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_house import HOSTILE, START, Page, make_run, results, svgs

from environments.monitors import FLAGS
from environments.traces import to_row as episode_row
from forge_run.report import write_report
from protocols.episodes import Episode, Observation, Task, Turn
from protocols.records import MetricRow
from protocols.replay import Message, ReplayState, ToolCall, Usage, Verdict, VerdictReason, Vote
from protocols.types import Sampling
from replay.books import Call, Go, Limits, Settled
from replay.ledger import Ledger
from replay.prompt import state_hash
from replay.records import to_row
from services.rundir import RunDirectory

X, Y, Z = '{"choice":"X"}', '{"choice":"Y"}', '{"choice":"Z"}'
NO_LIMITS = Limits(10**12, 10**12, 8, None, 5, 30.0)


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
    opening = Observation((Message("user", f"what is the mri? {HOSTILE}"),))
    task = Task(f"on_policy/{name} {HOSTILE}", "desk_01", {})
    return Episode(task, "g", opening, tuple(turns), Sampling(), reward, kind, flags)


EPISODES = (
    episode(
        "0", 1.0, "answer_not_through_tools", "verifier_disagrees",
        turns=[
            turn(f"find {HOSTILE}", Observation((Message("tool", f"no {HOSTILE}"),),
                 error_kind=f"bad {HOSTILE}")),
            turn("answer edema.", Observation((Message("tool", "right."),), done=True, reward=1.0,
                 expected=f"fibrosis {HOSTILE}")),
        ],
    ),
    episode("1", 0.0, "answer_not_through_tools"),
    episode("2", 0.0, f"later {HOSTILE}"),
    episode("3", None, kind=f"environment_died {HOSTILE}"),
)  # fmt: skip


def state(turn: int) -> ReplayState:
    seen = tuple(Message("tool", f"seen {i} {HOSTILE}") for i in range(6))
    return ReplayState(f"trace {HOSTILE}", turn, seen, (), ToolCall("find", {}))


def vote(at: ReplayState, teacher: str, action: str | None, error: str = "") -> Vote:
    key = f"{teacher}/{at.turn}"
    usage = Usage(8, 4)
    return Vote(state_hash(at), teacher, key, HOSTILE, action, usage, 0, 0.5, 1, error)


def verdict(
    turn: int, reason: VerdictReason, counts: tuple[tuple[str, int], ...], *votes: Vote
) -> Verdict:
    chosen = X if reason == "pair" else None
    at = state(turn)
    return Verdict(
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


def pay(ledger: Ledger, teacher: str, key: str, nanodollars: int, outcome: str) -> None:
    admission = ledger.admit(Call(key, teacher, "run", 10**9))
    assert isinstance(admission, Go)
    settled = Settled(
        admission.attempt, key, teacher, "run", outcome, nanodollars, None, HOSTILE, False, True,
        0.5, 1, 0.0, 1.0,
    )  # fmt: skip
    ledger.settle(settled)
    ledger.settle(replace(settled, nanodollars=10**9))  # of two settlements the first counts


def doc(value: float) -> dict[str, float]:
    return {"value": value, "count": 10, "weight": 0.2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "desk", "seed: 0\n", now=START)
    grpo = {"value": -0.25, "count": 1234, "weight": 1.0, "ratio": 1.0}
    sdpo = {"value": 0.0325, "count": 40, "weight": 0.125, "clipped": 0.0116, "negative": 0.0}
    nothing = {"value": 0.0, "count": 0, "weight": 0.5}
    run.append_metric(
        metric(
            1,
            channels={
                "doc_kl": {**doc(0.5), "grad_norm": 0.0119},
                "grpo": {**grpo, "grad_norm": 0.5},
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
                "teachers/trained": 2,
            },
        )
    )
    run.append_metric(
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
    run.append_episodes(episode_row(e, "on_policy", 1) for e in EPISODES)
    for told in VERDICTS:
        rows = [to_row(state(told.turn)), to_row(told)]
        run.append_votes({"arm": "on_policy", "step": 2, **row} for row in rows)
    ledger = Ledger(run.ledger, {"a": NO_LIMITS, "b": NO_LIMITS})
    pay(ledger, "a", "1", 1_250_000, "answered")
    pay(ledger, "a", "2", 250_000, "http_500")
    pay(ledger, "b", "3", 0, "rate_limited")
    ledger.close()
    run.write_results(results())
    write_report(run.path)
    return run


@pytest.fixture(scope="module")
def html(run: RunDirectory) -> str:
    return run.report.read_text(encoding="utf-8")


def table(html: str, name: str) -> list[list[str]]:
    """The cells of the table of that name, its heads first."""
    (found,) = re.findall(rf'aria-label="{name}"><table>(.*?)</table>', html, flags=re.DOTALL)
    rows = re.findall(r"<tr.*?</tr>", found, flags=re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_channels_are_shown_as_they_were_last(html: str) -> None:
    assert table(html, "Channels, on_policy, step 2") == [
        ["channel", "weight", "value", "denominator", "facts"],
        ["doc_kl", "0.2", "0.3750", "10", "-"],
        ["grpo", "1", "-0.2500", "1,234", "ratio 1"],
        ["replay_dpo", "0.5", "-", "0", "-"],
        ["sdpo", "0.125", "0.0325", "40", "clipped 0.0116, negative 0"],
    ]


def test_gradients_are_those_of_the_last_comparison(html: str) -> None:
    assert table(html, "Gradients of on_policy, step 1") == [
        ["channel", "norm", "cosine to doc_kl", "cosine to grpo"],
        ["doc_kl", "0.0119", "-", "-0.25"],
        ["grpo", "0.5", "-0.25", "-"],
    ]


def test_rewards_and_errors_have_their_sums(html: str) -> None:
    text = Page(html).text
    assert "on_policy: 0.500 to 0.750 in 2 steps, 8 episodes, of which 1 errored." in text
    assert f"lost $x$ {HOSTILE}: 3 of 18 turns; bad_call: 2 of 18 turns." in text
    legend = "".join(ElementTree.fromstring(svgs(html)[2]).itertext())
    assert f"lost $x$ {HOSTILE}" in legend
    assert "A case that could not be judged is unparsed and counts as wrong." in text
    assert len(svgs(html)) == 5  # KL, rewards, errors, values, cosines


def test_votes_are_counted_by_teacher(html: str) -> None:
    """A majority was in the states 0 and 2. b said X there, and Z and nothing elsewhere."""
    assert table(html, "Votes by teacher") == [
        ["teacher", "asked", "valid", "abstained", "with the majority", "dollars", "mean latency"],
        ["a", "4", "4", "0", "100.0%", "0.0015", "0.50 s"],
        ["b", "4", "3", "timeout 1", "100.0%", "0.0000", "0.50 s"],
        ["c", "3", "1", "unparseable 2", "0.0%", "-", "0.50 s"],
    ]
    assert "0.0015 dollars together." in html


def test_verdicts_are_counted_by_reason(html: str) -> None:
    assert table(html, "Verdicts by reason") == [
        ["verdict", "states", "share"],
        ["pair", "1", "25.0%"],
        ["disagreement", "1", "25.0%"],
        ["agrees_with_student", "1", "25.0%"],
        ["too_few_votes", "1", "25.0%"],
    ]
    text = Page(html).text
    assert "Asked because: error_turn 4." in text
    assert "pairs trained on 3; states whose verdict came too late 4." in text
    # The one pair, with its last four messages and every vote.
    assert text.count("2 of 2 votes, error_turn") == 1
    assert [f"seen {i} " in text for i in range(6)] == [False, False, True, True, True, True]


def test_flags_are_counted_with_what_they_mean(html: str) -> None:
    found = table(html, "Flags of 4 episodes")
    assert found[0] == ["flag", "episodes", "share", "meaning"]
    assert [row[1:3] for row in found[1:]] == [
        ["2", "50.0%"], ["1", "25.0%"], ["1", "25.0%"], ["0", "0.0%"], ["0", "0.0%"],
    ]  # fmt: skip
    names = [row[0] for row in found[1:]]
    assert names[:2] == ["answer_not_through_tools", "verifier_disagrees"]
    assert names[2].startswith("later &lt;script&gt;")
    assert names[3:] == ["degenerate", "copied"]
    assert found[1][3] == FLAGS["answer_not_through_tools"]
    shown = re.findall(r"<summary>(\w+)", html)
    assert shown == ["answer_not_through_tools", "verifier_disagrees", "later", "The"]


def test_what_models_teachers_and_environments_said_is_text(html: str) -> None:
    assert "<script" not in html
    assert "<img" not in html
    text = Page(html).text
    for piece in (
        f"on_policy/0 {HOSTILE}, desk_01 (2 turns, reward 1, answer_not_through_tools, verifier",
        f"what is the mri? {HOSTILE}",
        f"find {HOSTILE}",
        f"tool, bad {HOSTILE}",
        f"right answerfibrosis {HOSTILE}",
        f"(0 turns, reward 0, later {HOSTILE})",
        f"trace {HOSTILE}, turn 0",
        f"seen 5 {HOSTILE}",
    ):
        assert piece in text, piece


def test_the_same_files_give_the_same_bytes(run: RunDirectory) -> None:
    before = run.report.read_bytes()
    assert write_report(run.path).read_bytes() == before
    ids = re.findall(r'\bid="([^"]+)"', before.decode())
    assert len(ids) == len(set(ids))


def test_episodes_that_all_died_are_said_to_have(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "desk", "", now=START)
    died = [episode(str(i), None, kind="environment_died") for i in range(3)]
    run.append_episodes(episode_row(e, "on_policy", 1) for e in died)
    run.append_metric(metric(1, episodes={"count": 3, "errored": 3, "turns": 0}))
    text = Page(write_report(run.path).read_text()).text
    assert "None of 3 episodes could be judged." in text
    assert "Flags of 3 episodes." in text
    assert "desk_01 (0 turns, environment_died)" in text
    assert "Channels" not in text
    assert "Teachers" not in text


def test_a_run_without_document_distillation_has_no_curve_of_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "desk", "", now=START)
    row = metric(1, episodes={"count": 3, "errored": 0, "turns": 3, "reward": 0.5})
    run.append_metric(replace(row, kl=None))
    html = write_report(run.path).read_text()
    assert "KL to the document teacher" not in html


def test_a_run_without_channels_shows_none(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path, steps=2).path).read_text()
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads == ["Arms", "Training", "Compression and policy", "Sample rollouts", "Spec"]
    assert "--hue" not in html
    assert "An answer that names no option is unparsed" in html
