"""What tests of `forge eval` share: a small clinic, its reader in this process, a run on disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import checkpoint_of
from torch import Tensor

from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import context_ids, document_kv
from cartridge_forge.plugins.evaluate.arms import ArmAnswers, EvalArm, sit
from cartridge_forge.plugins.evaluate.questions import EvalSuite, first_tokens_of, set_paper
from cartridge_forge.plugins.evaluate.spec import EvalSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import NO_DOCUMENT, Completion, GenerateRequest, PrefixRef
from cartridge_forge.services.run_directory import RunDirectory

MESH = Path(__file__).parents[2] / "meshes" / "longhealth.yaml"
SETS = ("data.patients=2", "data.facts=6", "data.notes=2", "data.held_out=0.7",
        "cartridge.tokens=16", "evaluate.max_tokens=20")  # fmt: skip
EVAL = EvalSpec(questions=4, passages=1, passage_tokens=8, probes=2, resamples=200, free_tokens=0)


def spec(*sets: str) -> RunSpec:
    return load_spec(str(MESH), sets=[*SETS, *sets]).spec


@cache
def reader() -> Any:
    return load_model(spec().learn.model.path, "float32")


@cache
def tokenizer() -> Any:
    return load_tokenizer(spec().learn.model.path)


def paper(learn: LearnSpec | None = None, chosen: EvalSpec = EVAL) -> EvalSuite:
    return set_paper(
        chosen, learn or spec().learn, RunDirectory(Path("nowhere")), tokenizer(), None
    )


class Reader:
    """Generates in this process, over documents' ids and cartridges by version."""

    def __init__(
        self, documents: Mapping[str, tuple[int, ...]], cartridges: Mapping[int, tuple[str, Tensor]]
    ) -> None:
        self._cartridges = cartridges
        self._documents = documents
        self._kv: dict[str, Tensor] = {}

    async def __call__(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return generate(reader(), requests, self._look, frozenset({tokenizer().eos_token_id}), None)

    def _look(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "cartridge":
            held, kv = self._cartridges[ref.version]
            assert held == name
            return kv
        if name not in self._kv:
            self._kv[name] = document_kv(reader(), context_ids(self._documents, name))
        return self._kv[name]


def kv_of(ids: tuple[int, ...]) -> Tensor:
    return document_kv(reader(), ids)


def finished_run(
    path: Path, arms: Mapping[str, Mapping[str, Tensor]], *sets: str, base_hash: str = "b" * 64,
    status: str = "finished", rollouts: Sequence[Mapping[str, Any]] = (), **results: Any,
) -> Path:  # fmt: skip
    """A run directory with the cartridges of each arm, as `forge-run` leaves it."""
    path.mkdir(parents=True)
    (path / "spec.yaml").write_text(dump_yaml(spec(*sets).as_dict()))
    told = {"status": status, "arms": {}, "tokens_trained": dict.fromkeys(arms, 100), **results}
    (path / "results.json").write_text(json.dumps(told))
    lines = (json.dumps(row) + "\n" for row in rollouts)
    (path / "rollouts.jsonl").write_text("".join(lines))
    for version, (arm, cartridges) in enumerate(arms.items(), start=1):
        names = sorted(cartridges)
        kv = torch.stack([cartridges[name] for name in names])
        facts = {
            "names": names, "version": version, "arm": arm, "step": 5, "last": None,
            "base_hash": base_hash, "position": {},
        }  # fmt: skip
        tensors = {"frozen": kv[:, :, :, :, :1], "trainable": kv[:, :, :, :, 1:]}
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_checkpoint(
            path / "checkpoints", f"version-{version:06d}", checkpoint_of(facts, tensors), 9
        )
    return path


CUT_TOKENS = 16


@pytest.fixture(scope="module")
def exam() -> EvalSuite:
    """Return the questions of the small clinic."""
    return paper()


@pytest.fixture(scope="module")
def sat(exam: EvalSuite) -> dict[str, ArmAnswers]:
    """Return the answers of each arm."""
    names = [name for name in exam.heads if name != NO_DOCUMENT]
    cut = first_tokens_of(exam, CUT_TOKENS, tokenizer())
    documents = {
        **exam.heads,
        **{f"cut/{n}": ids for n, ids in cut.items()},
        **{f"first/{n}": exam.heads[n][:CUT_TOKENS] for n in names},
    }
    cartridges = {i: (n, kv_of(exam.heads[n][:CUT_TOKENS])) for i, n in enumerate(names)}
    kinds = {"document": "", "truncated": "cut/", "untrained": "first/"}
    arms = [EvalArm("none", "none", None, 1.0)]
    for kind, folder in kinds.items():
        prefixes = {n: PrefixRef(f"document/{folder}{n}", 0) for n in names}
        arms.append(EvalArm(kind, kind, prefixes, 16.0, CUT_TOKENS))
    trained = {n: PrefixRef(f"cartridge/{n}", v) for v, (n, _) in cartridges.items()}
    arms.append(EvalArm("on_policy", "on_policy", trained, 16.0, CUT_TOKENS, "r", "m", 5, 100))
    told = asyncio.run(sit(exam, arms, EVAL, 20, Reader(documents, cartridges)))
    return {arm.name: one for arm, one in zip(arms, told, strict=True)}
