"""Train cartridges on policy by three roles, each in processes of its own, in a loop of your own.

    python examples/mesh_loop.py [STEPS]

Generators write answers over the published cartridges, the document teacher scores their tokens,
and the trainer makes the next version. Requests and samples travel in messages. Scores and
cartridges travel over the tensor plane, here shared memory, and messages carry their keys.

The prompts are those of meshes/longhealth.yaml. `forge-run` adds what a long run needs: recovery
from a lost process or plane, checkpoints, validation, telemetry and control.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

from monarch.actor import this_host

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.actors.doc_teacher import DocTeacherActor
from cartridge_forge.actors.generator import GeneratorActor
from cartridge_forge.actors.trainer import TrainerActor
from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.longhealth import (
    LongHealthPrompts,
    measure,
    open_prompts,
)
from cartridge_forge.plugins.host.private_sockets import use_private_sockets
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.step import TeacherScores, TrainBatch
from cartridge_forge.services.clients import (
    DocTeacherClient,
    GeneratorClient,
    TrainerClient,
    load_cartridges,
)
from cartridge_forge.services.planes.open import open_plane
from cartridge_forge.services.pool.service import Service
from cartridge_forge.training.records import as_rollout

TOP = 20  # entries of the teacher's distribution at each token
QUESTIONS = 48  # held-out ones, asked of every version


async def train(learn: DocumentsLearn, prompts: LongHealthPrompts, folder: str) -> None:
    """Make `train.steps` steps; print each one's doc_kl, and every version's accuracy. `folder`
    is where the trainer keeps its last state."""
    plane, service = await open_plane("shared_memory"), await Service.of(this_host())
    source = ModelSource(
        path=learn.model.path, dtype=learn.model.dtype, threads=1, documents=prompts.documents,
        max_kv_bytes=2**28, plane=plane, cartridges=prompts.layout.cartridges,
    )  # fmt: skip
    states = (f"{folder}/last_state", f"{folder}/start.json")
    readers = service.spawn(GeneratorActor, n=2, args=(source, prompts.end_ids, 2))
    service.spawn(DocTeacherActor, args=(source, learn.train.row_tokens, TOP), role="doc_teacher")
    service.spawn(TrainerActor, args=(source, learn, *states))
    try:
        await service.ready()
        generator, teacher = GeneratorClient(service.pools), DocTeacherClient(service.pools)
        trainer = TrainerClient(service.pools)
        version, published = await trainer.begin("on_policy", learn.train.steps, {}), None
        for step in range(learn.train.steps + 1):
            # Trainer -> plane -> every generator: the cartridges that changed.
            published = await trainer.publish(version, published)
            await load_cartridges([readers], published, keep=2)

            questions = prompts.exams[:QUESTIONS]
            answers = await generator.generate(
                prompts.exam_requests(questions, "on_policy", "cartridge", version, sampled=False)
            )
            accuracy = measure(questions, [prompts.decode(a.token_ids) for a in answers])
            versions = {version for answer in answers for version in answer.versions}
            print(f"version {sorted(versions)}: {accuracy['accuracy']:.0%} right", flush=True)
            if step == learn.train.steps:
                break

            drawn = prompts.rollout(step, version)
            completions = await generator.generate([p.request for p in drawn])
            samples = as_rollout(step, drawn, completions, offline=False).samples

            # Teacher -> plane -> trainer: indices and logprobs [N, TOP] of N response tokens.
            scored = await teacher.score(f"scores/{step}", samples)
            scores = TeacherScores(tuple(range(len(samples))), scored.packet)
            batch = TrainBatch(doc=samples, scores={"doc_teacher": [scores]})
            output = await trainer.step(batch, version)
            await plane.delete(scored.packet.key)
            print(f"step {step + 1}: {output.tokens} tokens, KL {output.kl:.3f}", flush=True)
            version = output.version
    finally:
        await service.stop()
        await plane.stop()


def main(steps: int) -> None:
    use_private_sockets()  # before Monarch is used: closed to other users of the host
    sets = [f"train.steps={steps}", "train.warmup_steps=1"]
    learn = DocumentsLearn.of(load_spec("longhealth", sets=sets).spec.learn)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(learn, open_prompts(learn, load_tokenizer(learn.model.path)), folder))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
