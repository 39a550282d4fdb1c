"""The report of a run that has every section: its text, and nothing in it that is markup."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
    results,
    rollout,
    svgs,
)

from cartridge_forge.plugins.episodes.environments.episode_files import to_row as episode_row
from cartridge_forge.plugins.evaluate.strategies import ArmRow
from cartridge_forge.plugins.replay.budget import CallNow, SettledCall, SpendLimits, TeacherCall
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.vote_records import to_row
from cartridge_forge.plugins.watch.pages.export import write_report
from cartridge_forge.plugins.watch.report.frontier import best
from cartridge_forge.protocols.episodes import Episode, Observation, Task, Turn
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import (
    AgentMessage,
    PanelVerdict,
    ReplayState,
    TeacherUsage,
    TeacherVote,
    ToolAction,
    VerdictReason,
)
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

OTHER = replace(ONE, name=HOSTILE, accuracy=0.7, tokens=400, gain=0.2, gain_ci95=(0.1, 0.3))


def doc(value: float) -> dict[str, float]:
    return {"value": value, "count": 10, "weight": 0.2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "desk", "seed: 0\n", now=START)
    grpo = {"value": -0.25, "count": 1234, "weight": 1.0, "ratio": 1.0}
    sdpo = {"value": 0.0325, "count": 40, "weight": 0.125, "gradient_removed": 0.0116}
    nothing = {"value": 0.0, "count": 0, "weight": 0.5}
    run.append_metric(
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
    ledger = SpendLedger(run.ledger, {"a": NO_LIMITS, "b": NO_LIMITS})
    pay(ledger, "a", "1", 1_250_000, "answered")
    pay(ledger, "a", "2", 250_000, "http_500")
    pay(ledger, "b", "3", 0, "rate_limited")
    ledger.close()
    run.append_rollouts([rollout("on_policy", 1, 0, f"answer {HOSTILE}")])
    run.documents.write_text(json.dumps(DOCUMENTS))
    keys = ("kind", "asker", "refused")
    said = {"document": "notes.md", "question": f"q {HOSTILE}", "answer": "an answer"}
    study = [json.dumps(dict(zip(keys, asked, strict=True)) | said) for asked in ASKED]
    run.selfstudy.write_text("\n".join(study) + "\n")
    run.contamination.write_text('{"row": 1}\n{"row": 2}\n')
    (run.path / FRONTIER).write_text(
        json.dumps({"version": 16, "arms": [arm.as_dict() for arm in (ONE, OTHER)]})
    )
    (run.path / EVALUATION).write_text(
        json.dumps(eval_found(NONE, DOCUMENT, EVAL_ROW, eval_row(arm=HOSTILE)))
    )
    told = results()
    told["arms"]["on_policy"] |= {"f1": 0.5, "agreement": AGREEMENT, "populations": POPULATIONS}
    told["aggregation"] = {"last": 0.2, "first": 0.05, "aggregation": 0.15, "share": 0.75}
    run.write_results(told)
    write_report(run.path)
    return run


@pytest.fixture(scope="module")
def html(run: RunDirectory) -> str:
    return run.report.read_text(encoding="utf-8")


def test_the_whole_text_is_as_it_was(html: str, run: RunDirectory) -> None:
    """report.txt by hand, for instance the votes: a majority was in the states 0 and 2; b said X
    there, and Z and nothing elsewhere; of two settlements of a call the first is paid."""
    lines = [line.strip(" |") for line in Page(html).lines]
    text = "\n".join(filter(None, lines)).replace(run.id, "RUN").replace(HOSTILE, "HOSTILE")
    golden = Path(__file__).with_name("report.txt").read_text(encoding="utf-8")
    assert text.splitlines() == golden.splitlines()


def test_the_same_files_give_the_same_bytes(run: RunDirectory) -> None:
    before = run.report.read_bytes()
    assert write_report(run.path).read_bytes() == before
    ids = re.findall(r'\bid="([^"]+)"', before.decode())
    assert len(ids) == len(set(ids))


def test_what_others_wrote_is_text_and_never_markup(html: str) -> None:
    assert "img" not in {tag for tag, _ in Page(html).tags}
    assert html.count("<script") == len(Page(html).scripts) == 2  # the page's own
    drawn = ["".join(ElementTree.fromstring(svg).itertext()) for svg in svgs(html)]
    assert len(drawn) == 9
    assert f"lost $x$ {HOSTILE}" in drawn[2]
    assert "population 1" in drawn[3]


def test_episodes_that_all_died_are_said_to_have(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "desk", "", now=START)
    died = [episode(str(i), None, kind="environment_died") for i in range(3)]
    run.append_episodes(episode_row(e, "on_policy", 1) for e in died)
    row = metric(1, episodes={"count": 3, "errored": 3, "turns": 0})
    run.append_metric(replace(row, kl=None))
    run.write_results(results())
    text = Page(write_report(run.path).read_text()).text
    assert "None of 3 episodes could be judged." in text
    assert "A case that could not be judged is unparsed and counts as wrong." in text
    assert "Flags of 3 episodes." in text
    assert "desk_01 (0 turns, environment_died)" in text
    assert "Channels" not in text
    assert "Teachers" not in text
    assert "KL to the document teacher" not in text


def test_the_frontier_is_what_nothing_beats_for_less() -> None:
    arms = (("one", 0.5, 12), ("a", 0.6, 40), ("b", 0.6, 48), ("c", 0.55, 20), ("d", 0.4, 99))
    rows = [replace(ONE, name=name, accuracy=share, tokens=n) for name, share, n in arms]
    assert [r.name for r in best(rows)] == ["one", "c", "a"]
