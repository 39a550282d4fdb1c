"""A step of training beside PEFT's cartridge and a packed row in HazyResearch's way.

    python -m benchmarks.users.training_peers [--rounds 9] [--threads 1 2]

A round is a step of meshes/longhealth.yaml: its prompts, answered over the cartridges as they are,
and the document teacher's likeliest tokens there. Each side trains on it, from the same cartridges:

ours     `CartridgeTrainer.step`
peft     PEFT's CARTRIDGE adapter, one for each document, which is a padded batch of its own
packed   the samples of a document end to end in one row, whose mask tells them apart, over a
         trained cache. HazyResearch's FlexAttention has no backward pass on a CPU, so the mask
         goes to transformers' scaled dot-product attention

Every side computes logits where a token is predicted (PEFT: from its batch's first such place on),
the same loss of each cartridge, its gradient, its clipped norm, and Adam. A round is refused whose
norms differ. All run with each number of `--threads`. A ratio is the
median over the rounds of our seconds over theirs: ours with the most threads over theirs with as
many as are the best for them, and both with one.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from benchmarks.generation import READER, filled_cache
from benchmarks.record import ROOT, benchmark, median_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from cartridge_forge.learning.teacher import TeacherDistribution
    from cartridge_forge.protocols.step import Sample

MESH = ROOT / "meshes" / "longhealth.yaml"
OURS = "ours"
DIFFERENCE = 1e-3  # of a norm, relative
Told = dict[str, float]  # by cartridge: the norm of its gradient


@dataclass(frozen=True)
class Group:
    """Hold the samples of one cartridge and the teacher's rows at their response tokens."""

    samples: Sequence[Sample]
    teacher: TeacherDistribution


class Scene:
    """Hold the job's prompts, model and documents, and the cartridges of every round."""

    def __init__(self) -> None:
        from cartridge_forge.learning.cartridge import first_tokens
        from cartridge_forge.learning.model.loading import load_model, load_tokenizer
        from cartridge_forge.learning.teacher import document_kv
        from cartridge_forge.plugins.documents.study.longhealth import open_prompts
        from cartridge_forge.plugins.spec_files.loading import load_spec

        self.learn = learn = load_spec(str(MESH), sets=["train.minibatches=1"]).spec.learn
        self.tasks = open_prompts(learn, load_tokenizer(str(READER)))
        self.model = load_model(str(READER))
        self.documents = {
            name: document_kv(self.model, ids) for name, ids in self.tasks.documents.items()
        }
        begins = {name: self.documents[name] for name in self.tasks.layout.cartridges}
        assert learn.cartridge.tokens is not None
        assert learn.cartridge.frozen is not None
        self.bank = first_tokens(begins, learn.cartridge.tokens, learn.cartridge.frozen)

    def batch(self, number: int) -> tuple[list[Sample], TeacherDistribution]:
        """Return the step's samples, those of a cartridge side by side, and the teacher's rows."""
        from cartridge_forge.learning.batch import context_of
        from cartridge_forge.learning.decode import generate
        from cartridge_forge.learning.teacher import TeacherDistribution, score_kept
        from cartridge_forge.training.records import as_sample

        kv = dict(zip(self.bank.names, self.bank.kv(), strict=True))
        prompts = self.tasks.rollout(number, number)
        completions = {
            completion.request_id: completion
            for completion in generate(
                self.model,
                [prompt.request for prompt in prompts],
                lambda ref: kv[ref.name.removeprefix("cartridge/")].detach(),
                self.tasks.end_ids,
            )
        }
        samples = [as_sample(prompt, completions[prompt.request.id]) for prompt in prompts]
        samples.sort(key=lambda sample: sample.cartridge)
        most, top_k = self.learn.train.row_tokens, self.learn.teacher.top_k
        assert top_k != "full"
        scores = score_kept(self.model, samples, self.documents, most, top_k, prefix=context_of)
        return samples, TeacherDistribution(**scores)


class Ours:
    """Train with the mesh's trainer."""

    def __init__(self, scene: Scene) -> None:
        from cartridge_forge.learning.cartridge import CartridgeBank
        from cartridge_forge.learning.trainer import CartridgeTrainer

        learn, names = scene.learn, list(scene.bank.names)
        assert learn.cartridge.frozen is not None
        kv = [part.detach() for part in scene.bank.kv()]
        self.trainer = CartridgeTrainer(
            scene.model, CartridgeBank(names, kv, learn.cartridge.frozen), learn.train,
            objective=learn.objective, loss=learn.loss,
        )  # fmt: skip
        self.trainer.begin(OURS, learn.train.steps)

    def take(self, trainable: Mapping[str, Tensor]) -> None:
        for name, part in trainable.items():
            self.trainer.bank.trainable[name].copy_(part)

    def step(self, samples: Sequence[Sample], teacher: TeacherDistribution) -> Told:
        from cartridge_forge.learning.losses.doc_kl import doc_batch

        out = self.trainer.step(doc_batch(samples, teacher), self.trainer.version)
        return {name: facts["grad_norm"] for name, facts in out.cartridges.items()}


def groups(samples: Sequence[Sample], teacher: TeacherDistribution) -> Iterator[tuple[str, Group]]:
    """Yield each cartridge's samples, which lie side by side."""
    begin = 0
    for name, members in groupby(samples, key=lambda sample: sample.cartridge):
        group = list(members)
        ended = begin + sum(len(sample.response_ids) for sample in group)
        yield name, Group(group, teacher.rows(slice(begin, ended)))
        begin = ended


class Peer:
    """Train with transformers. `logits` [N, V] of a group's response tokens over a cartridge, and
    `parameters` of each, are a peer's own."""

    parameters: Mapping[str, Tensor]

    def __init__(self, scene: Scene) -> None:
        from transformers import AutoModelForCausalLM

        self.learn = scene.learn
        self.plain: Any = AutoModelForCausalLM.from_pretrained(READER).eval()
        self.plain.requires_grad_(False)

    def logits(self, name: str, samples: Sequence[Sample]) -> Tensor:
        raise NotImplementedError

    def take(self, trainable: Mapping[str, Tensor]) -> None:
        """Take the trained positions [L, 2, H_kv, P - frozen, D] of each cartridge."""
        raise NotImplementedError

    def ready(self) -> None:
        import torch

        lr = self.learn.train.lr
        self.optimizers = {n: torch.optim.Adam([p], lr=lr) for n, p in self.parameters.items()}

    def step(self, samples: Sequence[Sample], teacher: TeacherDistribution) -> Told:
        import torch

        from cartridge_forge.learning.losses.doc_kl import doc_kl

        norms: Told = {}
        for name, group in groups(samples, teacher):
            self.optimizers[name].zero_grad(set_to_none=True)
            total, count = doc_kl(self.logits(name, group.samples), group.teacher, self.learn.loss)
            (total / count).backward()
            parameter = self.parameters[name]
            norm = torch.nn.utils.clip_grad_norm_([parameter], self.learn.train.clip)
            self.optimizers[name].step()
            norms[name] = norm.item()
        return norms


class PeftPeer(Peer):
    """Train PEFT's adapters, each batch padded at its right."""

    def __init__(self, scene: Scene) -> None:
        from peft import CartridgeConfig, get_peft_model

        super().__init__(scene)
        bank = scene.bank
        config = CartridgeConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=scene.learn.cartridge.tokens,
            num_frozen_tokens=scene.learn.cartridge.frozen,
        )
        first, *other_names = bank.names
        self.model: Any = get_peft_model(self.plain, config, adapter_name=first).eval()
        for name in other_names:
            self.model.add_adapter(name, config)
        encoders = {name: self.model.prompt_encoder[name] for name in bank.names}
        for name, kv in zip(bank.names, bank.kv(), strict=True):
            encoders[name].load_prompt_embeddings(_rows(kv.detach()))
        self.parameters = {
            name: next(p for p in encoder.parameters() if p.shape[0] == kv_tokens)
            for name, encoder in encoders.items()
            for kv_tokens in (config.num_virtual_tokens - config.num_frozen_tokens,)
        }
        self.ready()

    def take(self, trainable: Mapping[str, Tensor]) -> None:
        for name, part in trainable.items():
            self.parameters[name].copy_(_rows(part))

    def logits(self, name: str, samples: Sequence[Sample]) -> Tensor:
        import torch

        texts = [sample.prompt_ids + sample.response_ids[:-1] for sample in samples]
        longest = max(map(len, texts))
        first = min(len(sample.prompt_ids) for sample in samples) - 1
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        mask = torch.zeros(len(texts), longest, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        self.model.set_adapter(name)
        logits_kept = longest - first
        out = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=logits_kept).logits
        rows = [row for row, sample in enumerate(samples) for _ in sample.response_ids]
        places = [
            len(sample.prompt_ids) - 1 - first + i
            for sample in samples
            for i in range(len(sample.response_ids))
        ]
        logits: Tensor = out[rows, places]
        return logits


def _rows(kv: Tensor) -> Tensor:
    """Return keys and values [L, 2, H_kv, P, D] as PEFT's [P, L * 2 * H_kv * D]."""
    return kv.permute(3, 0, 1, 2, 4).reshape(kv.shape[3], -1).contiguous()


class PackedPeer(Peer):
    """Train over one row of a cartridge's samples."""

    def __init__(self, scene: Scene) -> None:
        import torch

        super().__init__(scene)
        bank = scene.bank
        self.frozen = bank.frozen
        self.parameters = {
            name: torch.nn.Parameter(part.detach().clone()) for name, part in bank.trainable.items()
        }
        self.ready()

    def take(self, trainable: Mapping[str, Tensor]) -> None:
        for name, part in trainable.items():
            self.parameters[name].copy_(part)

    def logits(self, name: str, samples: Sequence[Sample]) -> Tensor:
        import torch

        texts = [sample.prompt_ids + sample.response_ids[:-1] for sample in samples]
        kv = torch.cat((self.frozen[name], self.parameters[name]), 3)
        tokens, length = kv.shape[3], sum(map(len, texts))
        text_of = torch.tensor([row for row, text in enumerate(texts) for _ in text])
        positions = torch.tensor([i for text in texts for i in range(len(text))])
        order = torch.arange(length)
        visible = (text_of[:, None] == text_of[None]) & (order[:, None] >= order[None])
        mask = torch.cat((torch.ones(length, tokens, dtype=torch.bool), visible), 1)
        places: list[int] = []
        offset = 0
        for sample, text in zip(samples, texts, strict=True):
            places += range(offset + len(sample.prompt_ids) - 1, offset + len(text))
            offset += len(text)
        out = self.plain(
            torch.tensor([[token for text in texts for token in text]]),
            attention_mask=mask[None, None],
            position_ids=(positions + tokens)[None],
            past_key_values=filled_cache(self.plain.config, kv),
            logits_to_keep=torch.tensor(places),
        )
        logits: Tensor = out.logits[0]
        return logits


def agree(first: Told, other: Told, side: str) -> None:
    """Raise SystemExit unless both found the same norm of every cartridge's gradient."""
    if first.keys() != other.keys():
        raise SystemExit(f"{side} trained {sorted(other)}, another {sorted(first)}")
    for name, norm in first.items():
        if not math.isclose(norm, other[name], rel_tol=DIFFERENCE):
            raise SystemExit(f"{side}: {name} has a gradient of {other[name]}, elsewhere {norm}")


def measure(options: argparse.Namespace) -> tuple[dict[str, float], Any]:
    import torch

    from cartridge_forge.actors.base import keep_freed_memory
    from cartridge_forge.learning.model.loading import flush_denormals

    keep_freed_memory()
    flush_denormals()
    scene, turns = Scene(), random.Random("training_peers/turns")
    peers = {"peft": PeftPeer(scene), "packed": PackedPeer(scene)}
    cells: dict[tuple[str, int], Ours | Peer] = {(OURS, n): Ours(scene) for n in options.threads}
    cells |= {(name, n): peer for name, peer in peers.items() for n in options.threads}
    most = max(options.threads)
    seconds: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for number in range(options.rounds + 1):
        torch.set_num_threads(most)
        samples, teacher = scene.batch(number)
        norms: dict[tuple[str, int], Told] = {}
        for cell in turns.sample([*cells], k=len(cells)):
            torch.set_num_threads(cell[1])
            side = cells[cell]
            with torch.no_grad():
                side.take(scene.bank.trainable)
            start = time.perf_counter()
            norms[cell] = side.step(samples, teacher)
            if number:  # what is lazy is initialised in the first
                seconds[cell].append(time.perf_counter() - start)
            agree(norms[next(iter(norms))], norms[cell], cell[0])
        ours = cells[OURS, most]
        assert isinstance(ours, Ours)
        for name, part in ours.trainer.bank.trainable.items():
            scene.bank.trainable[name].data.copy_(part.detach())
    ratios = {}
    for name in peers:
        ratio_of = {n: median_ratio(seconds[OURS, most], seconds[name, n]) for n in options.threads}
        ratios[f"ours over {name}: seconds"] = max(ratio_of.values())
        one = min(options.threads)
        single_ratio = median_ratio(seconds[OURS, one], seconds[name, one])
        ratios[f"ours over {name}, one thread each: seconds"] = single_ratio
    print(ratios)
    results = {f"{side}, {n} threads": _ms(laps) for (side, n), laps in seconds.items()}
    return ratios, {"milliseconds": results}


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 1) for one in seconds]


if __name__ == "__main__":
    from cartridge_forge.actors.base import bootstrap

    bootstrap(os.cpu_count() or 1)()  # before torch is imported
    benchmark(
        __doc__,
        measure,
        {
            "--rounds": (9, "measured rounds"),
            "--threads": ([1, 2], "numbers of torch's threads, from 1 on"),
        },
        quick={"rounds": 3},
    )
