"""The phases of a step of a real model, beside transformers in the same process:

    forge models add smollm2-135m
    python -m benchmarks.users.real_model TEXT.txt [--dtypes bfloat16] [--rounds 5]

rollout   prompts over one cartridge, as many tokens written for each. transformers: `generate`, the
          cartridge as its cache, a copy for each row
teacher   the document's distribution at those tokens, its 20 likeliest kept. Both have the
          document's keys and values already, transformers once for each row
train     the divergence from it, backward into the cartridge, clipping and Adam, in forwards of
          `objective.micro_tokens` of configs/documents.yaml. transformers: one batch

All prompts have one length and no token ends an answer, so transformers pads nothing. Both train
the same cartridge on the same tokens: a round is refused whose losses differ by more than a
hundredth. Sides take turns within a round, and both use all cores of the machine. A ratio is the
median over the rounds of transformers' seconds over ours: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.generation import filled_cache, through_transformers
from benchmarks.record import ROOT, benchmark, median_ratio

if TYPE_CHECKING:
    from torch import Tensor

PHASES, SIDES = ("rollout", "teacher", "train"), ("ours", "transformers")


class Sides:
    """Hold both sides' model, cartridge and optimizer over one document, with a method for each
    phase of each side."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from cartridge_forge.learning.cartridge import first_tokens
        from cartridge_forge.learning.model.loading import load_model, tokenizer_of
        from cartridge_forge.learning.teacher import document_kv
        from cartridge_forge.learning.trainer import CartridgeTrainer
        from cartridge_forge.plugins.spec_files.loading import load_spec
        from cartridge_forge.protocols.files import models_folder

        path = str(models_folder() / options.model)
        sets = [f"model.path={path}", "train.warm_start=null"]
        learn = load_spec(ROOT / "meshes" / "documents.yaml", sets=sets).spec.learn
        self.dtype = getattr(torch, dtype)
        self.asked, self._learn = options, learn
        text = options.document.read_text()
        ids = tokenizer_of(path)(text, add_special_tokens=False).input_ids[: options.tokens]
        self.document = tuple(ids)
        self.ours = load_model(path, dtype)
        self.ours.pack()
        self.plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).eval()
        self.plain.requires_grad_(False)
        self.kv = document_kv(self.ours, self.document)
        start = {"d": self.kv.float()}
        banks = [first_tokens(start, options.cartridge, learn.cartridge.frozen) for _ in SIDES]
        self.bank = banks[1]
        self.trainer = CartridgeTrainer(
            self.ours, banks[0], learn.train, objective=learn.objective, loss=learn.loss
        )
        self.trainer.begin("ours", options.rounds + 1)
        self.optimizer = torch.optim.Adam([self.bank.trainable["d"]], lr=learn.train.lr)

    def prompts(self, number: int) -> list[tuple[int, ...]]:
        """Return a round's prompts: pieces of the document."""
        draws = random.Random(f"real_model/{number}")
        size = self.asked.prompt
        begins = draws.sample(range(len(self.document) - size), self.asked.rows)
        return [self.document[b : b + size] for b in begins]

    # -- ours -----------------------------------------------------------------------------------

    def our_rollout(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        from cartridge_forge.learning.decode import generate
        from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

        kv = self.trainer.bank.kv()[0].detach().to(self.dtype)
        greedy = Sampling(temperature=0.0, max_tokens=self.asked.new)
        requests = [
            GenerateRequest(str(i), prompt, PrefixRef("d", 0), greedy, 0)
            for i, prompt in enumerate(prompts)
        ]
        completions = {
            c.request_id: c for c in generate(self.ours, requests, lambda _: kv, frozenset())
        }
        return [completions[request.id].token_ids for request in requests]

    def our_teacher(self, samples: Sequence[Any]) -> Any:
        from cartridge_forge.learning.teacher import TeacherDistribution, score_kept

        rows, top_k = self._learn.train.row_tokens, self._learn.teacher.top_k
        return TeacherDistribution(**score_kept(self.ours, samples, {"d": self.kv}, rows, top_k))

    def our_training(self, samples: Sequence[Any], teacher: Any) -> float:
        from cartridge_forge.learning.losses.doc_kl import doc_batch

        return float(self.trainer.step(doc_batch(samples, teacher), self.trainer.version).kl)

    # -- transformers ---------------------------------------------------------------------------

    def their_rollout(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        kv = self.bank.kv()[0].detach().to(self.dtype)
        return through_transformers(self.plain, kv, 0)("cartridge", prompts, self.asked.new)

    def _logits(self, samples: Sequence[Any], kv: Tensor) -> Tensor:
        """Return logits [N, V] in float32 that predict each response token, in sample order."""
        import torch

        ids = torch.tensor([s.prompt_ids + s.response_ids[:-1] for s in samples])
        cache = filled_cache(self.plain.config, kv, len(samples))
        out = self.plain(ids, past_key_values=cache, logits_to_keep=self.asked.new)
        logits: Tensor = out.logits.flatten(0, 1).float()
        return logits

    def their_teacher(self, samples: Sequence[Any]) -> Any:
        import torch

        from cartridge_forge.learning.teacher import TeacherDistribution, top_k

        with torch.no_grad():
            logits = self._logits(samples, self.kv)
            return TeacherDistribution(None, *top_k(logits, self._learn.teacher.top_k))

    def their_training(self, samples: Sequence[Any], teacher: Any) -> float:
        import torch

        from cartridge_forge.learning.losses.doc_kl import doc_kl

        parameter = self.bank.trainable["d"]
        self.optimizer.zero_grad(set_to_none=True)
        kv = self.bank.kv()[0].to(self.dtype)
        total, count = doc_kl(self._logits(samples, kv), teacher, self._learn.loss)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_([parameter], self._learn.train.clip)
        self.optimizer.step()
        return (total / count).item()


def one_round(sides: Sides, number: int, turns: random.Random) -> dict[str, dict[str, float]]:
    """Return by phase each side's seconds. Raises SystemExit where the losses differ."""
    import torch

    from cartridge_forge.protocols.step import Sample

    with torch.no_grad():  # both train the same cartridge
        sides.bank.trainable["d"].copy_(sides.trainer.bank.trainable["d"])
    version = sides.trainer.version
    seconds: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}

    def both_sides(
        phase: str, ours: Callable[[], Any], theirs: Callable[[], Any]
    ) -> tuple[Any, Any]:
        results: dict[str, Any] = {}
        order = [*zip(SIDES, (ours, theirs), strict=True)]
        for side, work in turns.sample(order, k=2):
            start = time.perf_counter()
            results[side] = work()
            seconds[phase][side] = round(time.perf_counter() - start, 3)
        return results[SIDES[0]], results[SIDES[1]]

    prompts = sides.prompts(number)
    answers, _ = both_sides(
        "rollout", lambda: sides.our_rollout(prompts), lambda: sides.their_rollout(prompts)
    )
    new = sides.asked.new
    samples = [
        Sample(f"s{i}", "d", p, a, (0.0,) * new, (version,) * new, contexts=("d",))
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    teacher, _ = both_sides(
        "teacher", lambda: sides.our_teacher(samples), lambda: sides.their_teacher(samples)
    )
    losses = both_sides(
        "train",
        lambda: sides.our_training(samples, teacher),
        lambda: sides.their_training(samples, teacher),
    )
    if abs(losses[0] - losses[1]) > 0.01 * abs(losses[1]):
        raise SystemExit(f"round {number}: the losses differ: {losses[0]:.5f}, {losses[1]:.5f}")
    return seconds


def measure(options: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    import torch

    from cartridge_forge.actors.base import keep_freed_memory
    from cartridge_forge.learning.model.loading import flush_denormals

    torch.set_num_threads(os.cpu_count() or 1)
    keep_freed_memory()
    flush_denormals()
    ratios: dict[str, float] = {}
    results: dict[str, Any] = {}
    for dtype in options.dtypes:
        sides, turns = Sides(options, dtype), random.Random("real_model/turns")
        rounds = []
        for number in range(options.rounds + 1):
            seconds = one_round(sides, number, turns)
            print(dtype, number, seconds, flush=True)
            if number:  # what is lazy is initialised in the first
                rounds.append(seconds)
        results[dtype] = {}
        for phase in PHASES:
            ours, theirs = ([one[phase][side] for one in rounds] for side in SIDES)
            ratio = round(median_ratio(theirs, ours), 2)
            results[dtype][phase] = {
                "ours": statistics.median(ours), "transformers": statistics.median(theirs),
                "times_as_fast": ratio, "rounds": [one[phase] for one in rounds],
            }  # fmt: skip
            ratios[f"{phase}, {dtype}"] = ratio
    print(ratios)
    return ratios, results


if __name__ == "__main__":
    from cartridge_forge.actors.base import bootstrap

    bootstrap(os.cpu_count() or 1)()  # before torch is imported
    benchmark(
        __doc__,
        measure,
        {
            "document": {"type": Path, "metavar": "TEXT.txt"},
            "--model": ("smollm2-135m", "a model that `forge models add` has kept"),
            "--dtypes": ["bfloat16", "float32"],
            "--rounds": (5, "measured rounds"),
            "--rows": (12, "prompts of a round"),
            "--prompt": (45, "tokens of a prompt"),
            "--new": (64, "tokens written for each"),
            "--tokens": (1800, "most tokens of the document"),
            "--cartridge": (128, "tokens of the cartridge"),
        },
        quick={"rounds": 2},
    )
