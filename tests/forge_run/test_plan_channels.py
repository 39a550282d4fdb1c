"""The plan of a run of channels: its numbers by hand, and what would keep it from running."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_run.figures import Section
from forge_run.plan import plan
from forge_run.runnable import require_runnable
from protocols.errors import SpecError
from protocols.spec_loading import load_spec

REPOSITORY = Path(__file__).parents[2]
MESH = str(REPOSITORY / "meshes/three_channels.yaml")
WITHOUT_TEACHERS = ("replay=null", "objective.beta=0")


def planned(*sets: str) -> tuple[Section, ...]:
    loaded = load_spec(MESH, sets=sets)
    return plan(loaded.spec, loaded.place)


def rows(sections: tuple[Section, ...], title: str) -> dict[str, tuple[str, ...]]:
    (section,) = [s for s in sections if s.title == title]
    assert all(len(row) == len(section.columns) for row in section.rows)
    return {row[0]: row[1:] for row in section.rows}


def test_the_budget_is_that_of_episodes() -> None:
    """3 x 4 = 12 episodes a step; 12 x 5 turns x 16 tokens = 960; 2 arms x 30 cases x 2."""
    sections = planned(
        "episodes.tasks=3", "episodes.group=4", "train.steps=100", "train.warmup_steps=0",
        "evaluate.arms=[none, on_policy]", "evaluate.questions=30", "evaluate.probe_every=30",
        "objective.compare_every=0", "data.patients=2",
    )  # fmt: skip
    budget = {what: text for what, (text,) in rows(sections, "budget").items()}
    assert budget["episodes"] == "3 tasks x 4 = 12 a step, 1,200 in all"
    assert budget["an episode"] == "at most 5 turns of 16 tokens, 128 with what it reads"
    assert budget["response tokens"] == "at most 960 a step, 96,000 in all"
    assert budget["environment"] == "clinic desks, served here; 30 s a move"
    assert budget["gradients"] == "never compared"
    assert budget["probes"] == "3 of 48 cases"
    assert budget["evaluation"] == "at most 120 episodes: none, on_policy"
    assert "prompts" not in budget
    assert rows(sections, "plan of three_channels")["data"] == (
        "2 clinic desks, seed 0: handbooks of 24 fields",
    )
    assert "longhealth" not in str(sections)


def test_channels_have_their_weights_and_sources() -> None:
    channels = rows(planned("objective.alpha_warmup_steps=4", "objective.w_doc=0.2"), "channels")
    assert {name: row[0] for name, row in channels.items()} == {
        "doc_kl": "0.2", "grpo": "1", "sdpo": "0 to 0.5 over 4 steps", "replay_dpo": "0.5",
    }  # fmt: skip
    assert channels["grpo"][1] == "rewards, compared in groups of 8 episodes"
    without = rows(planned("objective.alpha=0", *WITHOUT_TEACHERS), "channels")
    assert without["sdpo"] == without["replay_dpo"] == ("0", "left out")


def test_teachers_have_prices_limits_and_a_cap() -> None:
    sections = planned(
        "replay.teachers=[{name: one, provider: openai, model: m, cap: 0.5, concurrency: 3, "
        "requests_per_minute: 60, prices: {input: 1.25, cached: 0.125, output: 10}}, "
        "{name: two, provider: anthropic, model: n, prices: {input: 5, output: 25}}]",
        "replay.cap=2", "replay.local={right: 0.8, server_error: 0.1}", "train.steps=10",
        "objective.dpo.states=12",
    )  # fmt: skip
    assert rows(sections, "teachers") == {
        "one": (
            "m (openai)", "1.25 read, 0.125 cached, 10 written", "0.5 dollars", "3, 60 a minute",
        ),
        "two": ("n (anthropic)", "5 read, 25 written", "the run's", "8"),
    }  # fmt: skip
    assert {what: text for what, (text,) in rows(sections, "votes").items()} == {
        "answered by": "a provider of our own on loopback: no key, no network, no real money",
        "its answers": "80% right; 0% of calls refused, 10% failed",
        "quorum": "2 equal votes of 2, the cheapest asked first",
        "asked": "where the turn met an error, or where the student was less sure than 0.3",
        "states": "at most 12 a step, 120 in all",
        "cap": "2 dollars together, set aside before each call",
        "deadline": "20 s for a state; no step waits for it",
    }
    titles = {section.title for section in planned(*WITHOUT_TEACHERS)}
    assert {"teachers", "votes", "cannot run here yet"} & titles == set()


@pytest.mark.parametrize(
    ("gate", "asked"),
    [
        ("{everywhere: true}", "in every state"),
        ("{error_turns: false}", "where the student was less sure than 0.5"),
        ("{error_turns: false, confidence_below: 0}", "never"),
    ],
)
def test_when_teachers_are_asked(gate: str, asked: str) -> None:
    assert rows(planned(f"replay.gate={gate}"), "votes")["asked"] == (asked,)


def test_real_teachers_need_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a-secret-that-is-not-shown")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    sections = planned("replay.local=")
    votes = rows(sections, "votes")
    assert votes["key of opus"] == ("ANTHROPIC_API_KEY, set; for https://api.anthropic.com",)
    assert votes["key of gpt"] == ("OPENAI_API_KEY, not set; for https://api.openai.com/v1",)
    assert "a-secret-that-is-not-shown" not in str(sections)
    (why,) = rows(sections, "cannot run here yet")
    assert why.startswith("replay.teachers: OPENAI_API_KEY is not in the environment")
    loaded = load_spec(MESH, sets=("replay.local=",))
    with pytest.raises(SpecError, match=r"OPENAI_API_KEY .*three_channels\.yaml:\d+; export it"):
        require_runnable(loaded.spec, loaded.place)
    require_runnable(load_spec(MESH).spec)  # its own provider needs none


def test_runs_without_episodes_have_none_of_it() -> None:
    loaded = load_spec(str(REPOSITORY / "meshes/longhealth.yaml"))
    titles = [section.title for section in plan(loaded.spec, loaded.place)]
    assert {"channels", "teachers", "votes"} & set(titles) == set()
