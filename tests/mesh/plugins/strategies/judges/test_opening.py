"""A judge over an API: its scores, its ledger, and what it is paid; and the keys of both judges."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from replay_setup import KEY, KEY_ENV, a_spec, a_teacher, ledger_rows, prices

from cartridge_forge.plugins.evaluate.spec import FrontierSpec
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.prompts import JUDGE_INSTRUCTIONS
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.strategies.judges.opening import opened_judge
from cartridge_forge.plugins.strategies.spec import ProcessRewardSpec, RewardJudgeSpec
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.protocols.spec.loading import load_file

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
