"""Ranks of a trainer as processes: what they train, written down for a test to compare.

    python -m rank_jobs OUT JOB [JOB ...]
    python -m rank_jobs OUT JOB [JOB ...] --ranks 2 3 --meet 10.77.0.2:29500   # of several hosts

Everything slow is done once, before this process forks its ranks; each job has a world of its own,
of the first so many of them. A rank writes OUT/<job>.<rank>.json, and rank 0 the cartridges. Ranks
of several hosts meet at an address of rank 0's, a port further for each job.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from channel_setup import ALL, changed, in_chunks, scene, trained
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from twins import Twin, build

from cartridge_forge.learning.batch import LOGIT_BYTES
from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.ranks import ALONE, ProcessGroup, join, leave
from cartridge_forge.learning.teacher import (
    TeacherDistribution,
    document_kv,
    own_document_kv,
    response_logprobs,
)
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import GrpoSpec
from cartridge_forge.plugins.host.ranks import divide_base, shard_base
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.reference_rows import StudyPrompts
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import Sample, TrainBatch, completions

READER = Path(__file__).parents[2] / "models/clinic-reader"
TRAIN = TrainSpec(steps=6, lr=0.02, row_tokens=24)
OBJECTIVE = changed(ALL, grpo=GrpoSpec(kl=0.1), micro_tokens=24, compare_every=1)
STEPS = 6
SILENT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class House:
    out: Path
    twin: Twin
    lessons: list[TrainBatch]


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(model: LanguageModel) -> int:
    """The bytes of parameters that this rank holds between steps."""
    return sum(local(p).nbytes for p in model.parameters())


def lessons_of(twin: Twin) -> list[TrainBatch]:
    """Uneven batches, the same whoever trains them: all channels; one pair; two documents' samples
    of very different lengths; nothing; all channels again, twice."""
    bank = trainer_of(twin).bank
    whole = [scene(twin, bank, seed=v, version=v) for v in range(STEPS)]
    return [
        whole[0],
        TrainBatch(pairs=whole[1].pairs[:1]),
        TrainBatch(doc=whole[2].doc, scores={"doc_teacher": whole[2].scores["doc_teacher"]}),
        TrainBatch(),
        *whole[4:],
    ]


def trainer_of(
    twin: Twin, train: TrainSpec = TRAIN, ranks: ProcessGroup = ALONE, **more: Any
) -> CartridgeTrainer:
    bank = first_tokens({n: twin.kv[n] for n in ranks.cartridges("ab")}, 8, 1)
    return CartridgeTrainer(
        twin.model, bank, train, objective=OBJECTIVE, ranks=ranks, names="ab", **more
    )


def curve(trainer: CartridgeTrainer, house: House, start: int = 0, stop: int = STEPS) -> list[Any]:
    return [
        asdict(trainer.step(house.lessons[v], v)) | {"token_scores": dict(trainer.token_scores)}
        for v in range(start, stop)
    ]


def bits(trainer: CartridgeTrainer) -> str:
    """A hash of cartridges and moments."""
    state = trainer._state.checkpoint({})
    digest = hashlib.sha256()
    for name in trainer.bank.names:
        for tensor in state.cartridge(name).values():
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def told(job: str, house: House, trainer: CartridgeTrainer, results: list[Any]) -> dict[str, Any]:
    if trainer._ranks.apart:
        own = {name: part.detach() for name, part in trainer.bank.trainable.items()}
        save_file(own, house.out / f"{job}.{trainer._ranks.rank}.safetensors")
    elif trainer._ranks.leads:
        save_file({"trainable": trained(trainer.bank)}, house.out / f"{job}.safetensors")
    return {"results": results, "bits": bits(trainer)}


def train(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    trainer = trainer_of(house.twin, ranks=ranks, keep_token_scores=True)
    trainer.begin("all", STEPS)
    done = told(job, house, trainer, curve(trainer, house))
    batch = house.lessons[0]
    pairs = trainer.references([replace(pair, ref_version=99) for pair in batch.pairs])
    samples = completions(pairs)
    done["references"] = [(p.id, p.ref_chosen, p.ref_rejected, p.ref_version) for p in pairs]
    done["deficits"] = trainer.greedy_deficit(samples, STEPS)
    done["names"] = list(trainer.bank.names)
    return done


def sharded(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """The same over a sharded base, with logits in chunks and layers computed again; then one
    number of one rank's share is moved."""
    model = load_model(str(house.twin.path))
    shard_base(model, ranks)
    spec = in_chunks(TRAIN, 5 * 97 * LOGIT_BYTES).model_copy(update={"recompute_layers": True})
    trainer = trainer_of(replace(house.twin, model=model), spec, ranks)
    trainer.begin("all", STEPS)
    done = told(job, house, trainer, curve(trainer, house))
    done["base_hashes"] = [trainer._state.base_hash, trainer.base_hash()]
    if ranks.rank == 1:
        weight: Any = model.base_model.layers[1].gate_up
        weight.to_local()[-1, -1] += 1e-3
    done["base_hashes"].append(trainer.base_hash())
    return done


def divided(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """The same over a base whose layers are divided over two ranks, and sharded over the copies;
    then one number of one rank's part is moved."""
    model = load_model(str(house.twin.path))
    divide_base(model, ranks)
    shard_base(model, ranks)
    spec = in_chunks(TRAIN, 5 * 97 * LOGIT_BYTES).model_copy(update={"recompute_layers": True})
    trainer = trainer_of(replace(house.twin, model=model), spec, ranks, keep_token_scores=True)
    trainer.begin("all", STEPS)
    done = told(job, house, trainer, curve(trainer, house))
    done["base_hashes"] = [trainer._state.base_hash, trainer.base_hash()]
    if ranks.rank == 1:
        local(model.base_model.layers[1].down).view(-1)[:1] += 1e-3
    done["base_hashes"].append(trainer.base_hash())
    done["held"] = held_bytes(model)
    return done


def divided_reader(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """The shipped reader, whose vocabulary two ranks divide: a document, what attention matching
    makes of it, scores, one step."""
    samples = [Sample(f"s{i}", "p", (7, 8, 9 + i), (11, 12, 13), (), (0,) * 3) for i in range(3)]
    logits = torch.randn(9, 1458, generator=torch.Generator().manual_seed(0))
    whole = OBJECTIVE.model_copy(update={"micro_tokens": None})
    done = {}
    for name in ("whole", "divided"):
        model = load_model(str(READER))
        if name == "divided":
            divide_base(model, ranks)
        at = tuple(range(5, 45))
        kv, own = document_kv(model, at), own_document_kv(model, at)
        study = StudyPrompts(((7, 8, 9), (20, 21)), frozenset({2}))
        matched = attention_matched(model, at, kv, 12, 1, study)
        scores = response_logprobs(model, samples, {"p": own}, 24)
        bank = first_tokens({"p": kv}, 8, 1)
        alone = ranks if name == "divided" else ALONE
        trainer = CartridgeTrainer(model, bank, TRAIN, objective=whole, ranks=alone)
        trainer.begin("doc", 3)
        result = trainer.step(doc_batch(samples, TeacherDistribution(logits=logits)), 0)
        grad = trainer.bank.trainable["p"].grad
        assert grad is not None
        done[name] = {
            "kv": kv.flatten()[::97].tolist(), "own": list(own.shape),
            "matched": matched.flatten()[::29].tolist(), "scores": scores.tolist(),
            "base_hash": trainer.base_hash(), "kl": result.kl, "grad_norm": result.grad_norm,
            "grad": grad.flatten()[::31].tolist(), "held": held_bytes(model),
        }  # fmt: skip
    return done


def several(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """Two passes over two minibatches of every batch, of several ranks over a sharded base."""
    spec = TRAIN.model_copy(update={"updates_per_rollout": 2, "minibatches": 2})
    model = load_model(str(house.twin.path))
    if ranks.world > 1 and not ranks.apart:
        shard_base(model, ranks)
    trainer = trainer_of(replace(house.twin, model=model), spec, ranks)
    trainer.begin("all", STEPS)
    return told(job, house, trainer, curve(trainer, house))


def tied(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """One step of the shipped reader, whose embedding is its projection: whole, and sharded."""
    samples = [Sample(f"s{i}", "p", (7, 8, 9 + i), (11, 12, 13), (), (0,) * 3) for i in range(3)]
    logits = torch.randn(9, 1458, generator=torch.Generator().manual_seed(0))
    spec = in_chunks(TRAIN, 2 * 1458 * LOGIT_BYTES)
    whole = OBJECTIVE.model_copy(update={"micro_tokens": None})
    done = {}
    for name in ("whole", "sharded"):
        model = load_model(str(READER))
        if name == "sharded":
            shard_base(model, ranks)
        kv = document_kv(model, tuple(range(5, 45)))
        bank = first_tokens({"p": kv}, 8, 1)
        trainer = CartridgeTrainer(model, bank, spec, objective=whole, ranks=ranks)
        trainer.begin("doc", 3)
        result = trainer.step(doc_batch(samples, TeacherDistribution(logits=logits)), 0)
        done[name] = {
            "kv": hashlib.sha256(kv.numpy().tobytes()).hexdigest(),
            "base_hash": trainer.base_hash(),
            "kl": result.kl,
            "grad_norm": result.grad_norm,
            "held": held_bytes(model),
        }
    return done


def resumed(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """Two steps from the checkpoint that the job before made."""
    start, stop, before = RESUMED[job]
    trainer = trainer_of(house.twin, ranks=ranks, last_state=house.out / f"{job}.state")
    trainer.begin("all", STEPS)
    if start:
        trainer.restore(read_checkpoint(house.out / before / f"version-{start:06d}"))
    results = curve(trainer, house, start, stop)
    (house.out / job).mkdir(exist_ok=True)
    trainer.save(house.out / job, {"by": ranks.rank}, stop)
    return told(job, house, trainer, results)


def torn(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """Rank 1 fails by itself, in the middle of a step; or its cartridges are other than rank 0's;
    or it is silent for longer than the timeout; or dies."""
    trainer = trainer_of(house.twin, ranks=ranks)
    trainer.begin("all", STEPS)
    if ranks.rank == 1:
        if job == "differ":
            with torch.no_grad():
                trainer.bank.trainable["a"].view(-1)[5] += 1e-6
        else:
            kv = {"fails": fail, "silent": silent, "dies": die}[job]
            trainer.bank.kv = kv  # type: ignore[method-assign]
    try:
        trainer.step(house.lessons[0], 0)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "version": trainer.version,
        }
    return {}


def fail(names: object = None) -> torch.Tensor:
    raise MemoryError("rank 1 is out of memory")


def silent(names: object = None) -> torch.Tensor:
    time.sleep(1.5 * SILENT_TIMEOUT_S)
    raise MemoryError("rank 1 took too long")


def die(names: object = None) -> torch.Tensor:
    os._exit(3)


def nan(job: str, house: House, ranks: ProcessGroup) -> dict[str, Any]:
    """A loss that is no number, met by one rank alone: all refuse, and can go on."""
    trainer = trainer_of(house.twin, ranks=ranks)
    trainer.begin("all", STEPS)
    batch = house.lessons[0]
    pairs = [replace(batch.pairs[0], ref_chosen=float("nan")), *batch.pairs[1:]]
    try:
        trainer.step(replace(batch, pairs=pairs), 0)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return {"error": message, "results": curve(trainer, house, 0, 1), "bits": bits(trainer)}


RESUMED = {
    "half": (0, 2, ""), "more": (2, 4, "half"), "rest": (4, STEPS, "more"),
    "apart_half": (0, 2, ""), "apart_more": (2, 4, "apart_half"),
    "apart_rest": (4, STEPS, "apart_more"),
}  # fmt: skip
JOBS: dict[str, tuple[int, Callable[[str, House, ProcessGroup], dict[str, Any]]]] = {
    "one": (1, train),
    "two": (2, train),
    "three": (3, train),
    "sharded": (2, sharded),
    "several": (1, several),
    "several_two": (2, several),
    "tied": (2, tied),
    "divided": (2, divided),
    "grid": (4, divided),
    "divided_reader": (2, divided_reader),
    "half": (2, resumed),
    "more": (1, resumed),
    "rest": (3, resumed),
    "apart": (2, train),
    "apart_several": (2, several),
    "apart_half": (2, resumed),
    "apart_more": (1, resumed),
    "apart_rest": (2, resumed),
    "nan": (3, nan),
    "differ": (3, torn),
    "fails": (3, torn),
    "silent": (3, torn),
    "dies": (3, torn),
}


TENSOR = {"divided": 2, "grid": 2, "divided_reader": 2}  # ranks that divide one base


def run_rank(house: House, rank: int, jobs: list[str], meet: str) -> None:
    for number, job in enumerate(jobs):
        world, work = JOBS[job]
        if rank < world:
            timeout_s = SILENT_TIMEOUT_S if job == "silent" else 600.0
            at = f"file://{house.out}/{job}.meet"
            if meet:
                host, _, port = meet.partition(":")
                at = f"tcp://{host}:{int(port) + number}"
            apart = world > 1 and job.startswith("apart")
            tensor = TENSOR.get(job, 1)
            ranks = join(rank, world, at, timeout_s=timeout_s, tensor=tensor, apart=apart)
            done = work(job, house, ranks)
            leave(ranks)
            (house.out / f"{job}.{rank}.json").write_text(json.dumps(done))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("jobs", nargs="+", choices=JOBS)
    parser.add_argument("--ranks", nargs="+", type=int, help="of this host; all by default")
    parser.add_argument("--meet", default="", help="HOST:PORT of rank 0, of ranks of several hosts")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if not asked.meet:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    first = min(asked.ranks or [0])
    twin = build("llama", asked.out / f"llama{first or ''}")
    house = House(asked.out, twin, lessons_of(twin))
    children = []
    most = max(JOBS[job][0] for job in asked.jobs)
    for rank in range(most) if asked.ranks is None else asked.ranks:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(house, rank, asked.jobs, asked.meet)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (asked.out / f"codes{first or ''}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
