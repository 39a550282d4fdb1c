"""Test strategies in processes: extracted answers, judges, reward models and RSA."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from math import comb
from pathlib import Path
from typing import Any

import pytest
from replay_setup import KEY, KEY_ENV, a_spec, a_teacher, ledger_rows, prices
from rooms.strategies.rsa_setup import accuracies, majority_copier
from scripted_sampler import Scripted, words
from strategy_setup import probability, reward_model

from benchmarks.rsa_batching import measure
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.evaluate.spec import FrontierSpec
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.prompts import JUDGE_INSTRUCTIONS
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.plugins.strategies.answers.extract import clusters, same_answer
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.judges.opening import opened_judge
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
from cartridge_forge.plugins.strategies.scorers import SEPARATOR
from cartridge_forge.plugins.strategies.spec import (
    ProcessRewardSpec,
    RewardJudgeSpec,
    RewardModelSpec,
)
from cartridge_forge.protocols.errors import RunError, SpecError

SAID = {0: "bad bad", 1: "good bad", 2: "good good", 3: "bad"}


def script(ask: SampleRequest) -> list:
    return words(SAID[int(ask.id.rpartition("/")[2]) % 4])


def spec(path: Path, **more: object) -> ProcessRewardSpec:
    return ProcessRewardSpec(model=RewardModelSpec(path=str(path), separator="\n", **more))


def test_strategies_keep_what_the_reward_model_likes(tmp_path: Path) -> None:
    async def solved() -> tuple[list[float], list[StrategyResult]]:
        async with opened_judge(spec(reward_model(tmp_path)), "frontier/x") as judge:
            assert judge is not None
            told = await judge(
                [f"what is it{SEPARATOR}{said}{SEPARATOR}" for said in SAID.values()]
            )
            results = []
            for name, options in (
                ("best_of_n", {"candidates": 4}),
                ("beam_search", {"candidates": 4, "beams": 2, "aggregate": "product"}),
            ):
                strategy = parse(name, {**options, "scorer": "process_reward"})
                result = await run(
                    strategy, Scripted(script), (AgentMessage("user", "what is it"),),
                    form="general", seed=0, max_tokens=20, judge=judge,
                )  # fmt: skip
                results.append(result)
            return list(told), results

    told, results = asyncio.run(solved())
    wanted = [probability(0, 2, 4, 2), probability(1, 1, 4, 2), probability(2, 0, 4, 2),
              probability(0, 1, 4, 2)]  # fmt: skip
    assert told == pytest.approx(wanted, abs=1e-6)
    for result in results:
        assert result.text == "good good"
        best = max(path["score"] for path in result.details["finished"])
        assert best == pytest.approx(probability(2, 0, 4, 2), abs=1e-6)


def test_what_cannot_be_read_is_told_before_anything_is_sampled(tmp_path: Path) -> None:
    async def opened() -> None:
        async with opened_judge(spec(tmp_path), "x"):
            pytest.fail("it opened")

    with pytest.raises(SpecError, match=r"process_reward\.model: .* cannot be read as a reward"):
        asyncio.run(opened())


def test_a_population_is_one_call_and_faster_than_its_responses_in_turn() -> None:
    measured = measure(repeats=3, M=1, N=16, K=4, T=4)
    assert (measured["batched_calls"], measured["sequential_calls"]) == (4, 64)
    assert measured["ratio"] > 1.5  # 4.0 to 4.8 on a quiet machine


def test_a_copier_of_the_majority_drifts_from_below_a_half_down_and_from_above_up() -> None:
    """One step by the hypergeometric formula; a leak of the right answers would lift the first."""
    n, right, questions = 16, 6, 60
    found = accuracies(majority_copier(right), questions, N=n, K=3, T=6)
    pairs = comb(right, 2) * (n - right) + comb(right, 3)
    low, high = wilson_interval(round(found[1] * questions * n), questions * n)
    assert low <= pairs / comb(n, 3) <= high
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2
    risen = accuracies(majority_copier(n - right), questions, N=n, K=3, T=6)
    assert risen == sorted(risen)
    assert risen[-1] > 1 - found[0] / 2


# These need math-verify: one process, about a second to start.
@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (r"\sqrt{8}", r"2\sqrt 2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x=3", "3", True),
        (r"50\%", r"\frac{\sqrt{1}}{2}", True),
        (r"\sqrt{2}", "1.414214", True),
        (r"\sqrt{2}", "1.41422", False),
        (r"\frac{\sqrt{2}}{10^{20}}", "1.41421e-20", True),
        (r"\frac{\sqrt{2}}{10^{20}}", r"\frac{\sqrt{3}}{10^{20}}", False),
        (r"\{0.5,\sqrt{2}\}", r"\{1.414214,\frac12\}", True),
        ("x=3", "y = 3.0", True),
        ("2^{10}", "1024", True),
        (r"3\text{ cm}", "3", True),
        ("(2,1)", "(3,2)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1]", "[0,1)", False),
        (r"\infty", r"-\infty", False),
        (r"\frac{1}{0}", "3", False),
        (r"\frac{", "3", False),
    ],
)
def test_same_by_math_verify(a: str, b: str, equal: bool) -> None:
    assert same_answer(a, b, "math") is same_answer(b, a, "math") is equal


def test_what_never_ends_ends_outside_the_main_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = "7^{9^{9^{9}}}"
    found: list[bool] = []

    def ask() -> None:
        found.append(same_answer(tower, "2", "math"))
        found.append(same_answer(tower, r"\sqrt{3}", "math"))  # known by now: no second wait
        found.append(same_answer(tower, tower, "math"))

    with monkeypatch.context() as patched:
        patched.setattr("cartridge_forge.plugins.strategies.answers.equivalence.SECONDS", 0.3)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(60)
    assert found == [False, False, True]
    # The judge that the tower ended has a successor.
    assert same_answer(r"\sqrt{12}", r"2\sqrt 3", "math")


def test_clusters_of_expressions_do_not_depend_on_the_order() -> None:
    answers = [r"\sqrt{2}", "1.414214", "1.4142136", "x=3", "3", "y=3", "(x+1)^2", "x^2+2x+1"]
    for order in (answers, answers[::-1], answers[4:] + answers[:4]):
        found = {frozenset(order[i] for i in members) for members in clusters(order, "math")}
        assert found == {frozenset(answers[:3]), frozenset(answers[3:6]), frozenset(answers[6:])}


MODELS = prices(a_spec(a_teacher("a", "http://127.0.0.1:1")))
TEXTS = ["what?\n\nsure\n\n", "what?\n\nwrong\n\n"]


def judging(asked: ProviderRequest) -> str:
    assert asked.system == JUDGE_INSTRUCTIONS
    answer = {"sure": "0.9", "wrong": "0.05"}.get(asked.user.split("\n\n")[-2], "perhaps")
    return json.dumps({"kind": "text", "tool": "", "arguments": "", "answer": answer})


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProvider]:
    monkeypatch.setenv(KEY_ENV, KEY)
    with FakeProvider(judging, MODELS, key=KEY) as running:
        yield running


def scores(provider: FakeProvider, ledger: Path, texts: Sequence[str], **more: Any) -> list[float]:
    cap = more.pop("cap", 1.0)
    kind = more.pop("kind", "openai")
    url = provider.openai_url if kind == "openai" else provider.url
    teacher = a_teacher("a", url, kind, attempts=1, **more)
    judge = RewardJudgeSpec(teacher=teacher, cap=cap, ledger=str(ledger))

    async def score() -> list[float]:
        async with opened_judge(ProcessRewardSpec(judge=judge), "serve/x") as asked:
            assert asked is not None
            return list(await asked(texts))

    return asyncio.run(score())


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_a_judge_is_asked_once_and_paid_by_the_ledger(
    provider: FakeProvider, tmp_path: Path, kind: str
) -> None:
    ledger = tmp_path / "calls.jsonl"
    assert scores(provider, ledger, TEXTS, kind=kind) == [0.9, 0.05]
    assert scores(provider, ledger, TEXTS[::-1], kind=kind) == [0.05, 0.9]
    assert len(provider.served) == 2, "a step is judged once"
    settled = [row for row in ledger_rows(ledger) if row["kind"] == "settled"]
    assert sum(row["nanodollars"] for row in settled) == provider.money()
    assert {(row["run"], row["usable"]) for row in settled} == {("serve/x", True)}


def test_a_judge_that_gives_no_score_is_an_error(provider: FakeProvider, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the judge a gives no score: unparseable"):
        scores(provider, tmp_path / "a.jsonl", [*TEXTS, "what?\n\nmaybe\n\n"])
    with pytest.raises(RunError, match=r"gives no score: budget_run"):
        scores(provider, tmp_path / "b.jsonl", TEXTS, cap=1e-6)


def test_a_missing_key_is_told_at_the_start(
    provider: FakeProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_ENV)
    with pytest.raises(SpecError, match=KEY_ENV):
        scores(provider, tmp_path / "a.jsonl", TEXTS)


def test_the_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "arms.yaml"
    arm = "arms:\n  - {strategy: best_of_n, options: {scorer: process_reward}}\n"
    file.write_text(f"process_reward: {{model: {{path: prm}}}}\n{arm}")
    reward = load_file(FrontierSpec, file).process_reward
    assert reward is not None
    assert reward.model is not None
    assert reward.model.path == str(tmp_path / "prm")
    teacher = "{name: a, provider: openai, model: a, prices: {input: 1.0, output: 1.0}}"
    for wrong in ("{}", f"{{model: {{path: a}}, judge: {{teacher: {teacher}, cap: 1.0}}}}"):
        file.write_text(f"process_reward: {wrong}\n{arm}")
        with pytest.raises(SpecError, match=r"a model or a judge, and not both"):
            load_file(FrontierSpec, file)
    served = load_serve("meshes/serve.yaml", sets=["process_reward.model.path=prm"])
    assert served.spec.process_reward is not None
    assert served.spec.process_reward.model is not None
    assert Path(served.spec.process_reward.model.path).is_absolute()
    assert load_serve("meshes/serve.yaml").spec.process_reward is None
