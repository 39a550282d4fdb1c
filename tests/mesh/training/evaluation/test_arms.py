"""Arms over the shipped reader in this process: what must be equal is, and perplexity is that of
the model alone."""

from __future__ import annotations

import asyncio

import pytest
from evaluation_setup import EVAL, Reader, kv_of, paper, tokenizer

from environments.renderer import NO_DOCUMENT
from protocols.types import PrefixRef
from training.evaluation.arms import ArmAnswers, EvalArm, sit
from training.evaluation.questions import EvalSuite, first_tokens_of

P = 16


@pytest.fixture(scope="module")
def exam() -> EvalSuite:
    return paper()


@pytest.fixture(scope="module")
def sat(exam: EvalSuite) -> dict[str, ArmAnswers]:
    names = [name for name in exam.heads if name != NO_DOCUMENT]
    cut = first_tokens_of(exam, P, tokenizer())
    documents = {
        **exam.heads,
        **{f"cut/{n}": ids for n, ids in cut.items()},
        **{f"first/{n}": exam.heads[n][:P] for n in names},
    }
    cartridges = {i: (n, kv_of(exam.heads[n][:P])) for i, n in enumerate(names)}
    kinds = {"document": "", "truncated": "cut/", "untrained": "first/"}
    arms = [EvalArm("none", "none", None, 1.0)]
    for kind, folder in kinds.items():
        prefixes = {n: PrefixRef(f"document/{folder}{n}", 0) for n in names}
        arms.append(EvalArm(kind, kind, prefixes, 16.0, P))
    trained = {n: PrefixRef(f"cartridge/{n}", v) for v, (n, _) in cartridges.items()}
    arms.append(EvalArm("on_policy", "on_policy", trained, 16.0, P, "r", "m", 5, 100))
    told = asyncio.run(sit(exam, arms, EVAL, 20, Reader(documents, cartridges)))
    return {arm.name: one for arm, one in zip(arms, told, strict=True)}


def test_the_teacher_agrees_with_itself_and_no_prefix_forgets_nothing(
    sat: dict[str, ArmAnswers],
) -> None:
    teacher = sat["document"].row["teacher"]
    assert (teacher["kl"], teacher["top1"]) == (pytest.approx(0.0, abs=1e-5), 1.0)
    bare = sat["none"].row["forgetting"]
    assert bare is not None
    assert (bare["kl"], bare["top1"]) == (pytest.approx(0.0, abs=1e-5), 1.0)
    assert bare["perplexity_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert bare["accuracy"] == bare["accuracy_without"]
    assert sat["none"].row["compression"] is None
    assert sat["on_policy"].row["teacher"]["kl"] > 0.01
