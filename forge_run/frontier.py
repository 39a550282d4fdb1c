"""`forge frontier RUN`: what test-time compute buys over the cartridges of a run.

RUN's newest checkpoint -> cartridges -> a pool of generators
configs/frontier.yaml   -> arms       -> accuracy, tokens, seconds (services.frontier)
RUN/frontier.json, a section of RUN/report.html, and the table
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from forge_run.display import interval, percent
from forge_run.plan import Section
from protocols.errors import DataError, SpecError
from protocols.frontier_spec import FrontierSpec
from protocols.spec import RunSpec
from protocols.spec_loading import load_file, load_resolved
from protocols.types import Completion, GenerateRequest, PrefixRef
from services.frontier import ArmRow, compare
from services.rundir import FRONTIER, RunDirectory, write_atomically

ARMS = Path(__file__).parents[1] / "configs" / "frontier.yaml"
HEADS = (
    "strategy",
    "accuracy",
    "95%",
    "over the first",
    "95%",
    "tokens",
    "read",
    "calls",
    "seconds",
)


def command(
    run: Path, *, arms: Path | None, questions: int | None, show: Callable[[str], None]
) -> tuple[Section, ...]:
    """Measure every arm; returns the table. Raises ForgeError."""
    directory = RunDirectory(run.resolve())
    if not directory.spec.is_file():
        raise SpecError(f"{run} is no run directory: name one, such as runs/longhealth/latest")
    spec = load_resolved(directory.spec)
    if spec.learn.data.source == "desk" or not spec.learn.evaluate.questions:
        raise SpecError(f"run {directory.id} has no option questions: strategies answer those")
    chosen = load_file(FrontierSpec, arms or ARMS)
    if questions is not None:
        chosen = chosen.model_copy(update={"questions": questions})
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    rows, version = asyncio.run(_measure(spec, directory, chosen, show))
    told = {
        "version": version,
        **chosen.model_dump(mode="json", exclude={"arms"}),
        "arms": [row.as_dict() for row in rows],
    }
    write_atomically(directory.path / FRONTIER, json.dumps(told, indent=1) + "\n")
    from forge_run.report import write_report

    write_report(directory.path)
    return (section(rows, version),)


def section(rows: Sequence[ArmRow], version: int) -> Section:
    title = f"{rows[0].n} held-out questions over version {version}; tokens and calls a question"
    return Section(title, HEADS, tuple(map(cells, rows)))


def cells(row: ArmRow) -> tuple[str, ...]:
    """A row of the table, as texts."""
    gain = "-" if row.gain is None else f"{100 * row.gain:+.1f}"
    return (
        row.name, percent(row.accuracy), interval(row.ci95), gain,
        "-" if row.gain_ci95 is None else interval(row.gain_ci95),
        f"{row.tokens:.0f}", f"{row.prompt_tokens:.0f}", f"{row.calls:.1f}", f"{row.seconds:.1f}",
    )  # fmt: skip


async def _measure(
    spec: RunSpec, directory: RunDirectory, chosen: FrontierSpec, show: Callable[[str], None]
) -> tuple[list[ArmRow], int]:
    import monarch.actor as monarch

    from actors.engine_generator import EngineGeneratorActor
    from actors.setup import BaseModel
    from learning.model import load_tokenizer
    from services.service import Service
    from services.shared_memory import SharedMemoryPlane
    from services.tasks import Tasks, read_patients
    from strategies.over_tokens import TokenSampler

    learn, role = spec.learn, spec.mesh.roles.generator
    tasks = Tasks(learn, read_patients(learn.data), load_tokenizer(learn.model.path))
    exams = tasks.exams[: chosen.questions]
    plane = await SharedMemoryPlane.start()
    service = await Service.of(
        monarch.this_host(),
        health=spec.mesh.health,
        call_timeout_s=spec.mesh.call_timeout_s,
        spawn_timeout_s=spec.mesh.spawn_timeout_s,
    )
    try:
        base = BaseModel(
            learn.model.path, learn.model.dtype, role.threads, tasks.documents,
            learn.teacher.max_kv_bytes, plane,
        )  # fmt: skip
        pool = service.spawn(
            EngineGeneratorActor,
            role="generator",
            spec=role.model_copy(update={"max_ongoing": 4096}),
            args=(base, tasks.end_ids, len(tasks.patients), learn.generator),
        )
        await service.ready()
        with tempfile.TemporaryDirectory(prefix="forge-frontier-") as made:
            version, files = write_cartridges(directory.checkpoints, Path(made))
            refs = {}
            for number, (name, path) in enumerate(sorted(files.items())):
                await pool.update(f"cartridge/{name}", 0, "load_file", number, name, str(path))
                refs[name] = PrefixRef(f"cartridge/{name}", number)

            async def generate(requests: Sequence[GenerateRequest]) -> list[Completion]:
                async def share(some: Sequence[GenerateRequest]) -> list[Completion]:
                    done = await pool.route("generate", tuple(some))
                    return list(done.completions)

                return await pool.split(requests, share)

            samplers = {
                name: TokenSampler(generate, tasks.conversation, name, ref)
                for name, ref in refs.items()
            }
            rows = await compare(
                chosen, exams, samplers.__getitem__, lambda row: show("  ".join(cells(row)))
            )
        return rows, version
    finally:
        await service.stop()
        await plane.stop()


def write_cartridges(checkpoints: Path, directory: Path) -> tuple[int, dict[str, Path]]:
    """The newest checkpoint's version, and each of its cartridges as a file of `directory`."""
    import torch
    from safetensors.torch import save_file

    from learning.checkpoint import list_checkpoints, read_checkpoint

    found = list_checkpoints(checkpoints)
    if not found:
        raise DataError(f"there is no checkpoint in {checkpoints}: let the run reach one")
    checkpoint = read_checkpoint(found[-1])
    kv = torch.cat([checkpoint.tensors["frozen"], checkpoint.tensors["trainable"]], dim=4)
    files = {}
    for name, one in zip(checkpoint.facts["names"], kv, strict=True):
        files[name] = directory / f"{name}.safetensors"
        save_file({"kv": one.contiguous()}, files[name])
    return int(checkpoint.facts["version"]), files
