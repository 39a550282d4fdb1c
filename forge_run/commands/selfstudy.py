"""Write questions and answers about documents to a directory: `forge selfstudy MESH.yaml`.

    OUT/rows.jsonl      one row per item; an interrupted command continues after the last
                        (documents.synthesis_rows)
    OUT/rows.parquet    the same rows, where pyarrow is installed
    OUT/summary.json    counts of kept rows, and of rejected ones by reason

The model writes them in this process, or an external model does (`self_study.api`). A run reads
them with `--set self_study.rows=OUT/rows.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.commands.run import peaks_here
from cartridge_forge.forge_run.plan.documents import remarks, require_sources
from cartridge_forge.forge_run.plan.plan import plan
from cartridge_forge.plugins.documents.drafts import SynthesisPlan
from cartridge_forge.plugins.documents.synthesis import model_name, write_study
from cartridge_forge.plugins.documents.synthesis_rows import counts, write_parquet
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.spec.mesh import RunSpec


def selfstudy(
    *,
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    run_dir: Path | None,
    out: Path | None,
    dry_run: bool,
) -> int | tuple[TableSection, ...]:
    """Write the rows under `out`; with `dry_run` return the plan. Raises ForgeError."""
    loaded = load_spec(mesh, overlays=overlays, sets=sets)
    if dry_run:
        return plan(loaded.spec, loaded.place, host=peaks_here(loaded.spec))
    home = (run_dir or Path("runs")) / loaded.spec.mesh.name
    print(*command(loaded.spec, out or home / "selfstudy", note), sep="\n")
    return 0


def command(spec: RunSpec, out: Path, show: Callable[[str], None]) -> list[str]:
    """Write the rows and return the lines to print. Raises ForgeError."""
    learn = RsaLearn.of(spec.learn)
    if learn.self_study is None:
        raise SpecError(
            f"mesh {spec.mesh.name} has no self_study; use meshes/documents.yaml or "
            "meshes/longhealth_3b.yaml"
        )
    require_sources(learn)
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.documents.study.material import read_material

    parts, _ = read_material(learn, load_tokenizer(learn.model.path))
    for line in remarks(parts):
        show(line)
    out.mkdir(parents=True, exist_ok=True)
    api = learn.self_study.api
    model = model_name(learn.model.path) if api is None else f"{api.provider}:{api.model}"
    plan = SynthesisPlan(learn.self_study, model, learn.train.seed, answers=True)
    file = out / "rows.jsonl"

    async def write() -> list[str]:
        async with _sampler(spec) as sampler:
            rows = await write_study(
                file, list(parts.parts.values()), plan, sampler,
                lambda count, total: show(f"{count} of {total} rows"),
            )  # fmt: skip
        totals = counts(rows)
        summary = {"documents": parts.as_dict(), "model": model, "config": plan.config, **totals}
        write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
        lines = [f"{name:30} {count}" for name, count in totals.items()]
        try:
            write_parquet(rows, out / "rows.parquet")
            lines.append(f"parquet {out / 'rows.parquet'}")
        except DataError as error:
            show(str(error))
        return [*lines, f"rows    {file}"]

    return asyncio.run(write())


@asynccontextmanager
async def _sampler(spec: RunSpec) -> AsyncIterator[Sampler]:
    learn = RsaLearn.of(spec.learn)
    assert learn.self_study is not None
    if (api := learn.self_study.api) is not None:
        from cartridge_forge.plugins.strategies.samplers.api_sampler import ApiEndpoint, ApiSampler

        endpoint = ApiEndpoint(
            api.provider, api.model, api.base_url, api.key_env, api.logprobs, api.concurrency,
            api.timeout_s,
        )  # fmt: skip
        async with ApiSampler(endpoint) as sampler:
            yield sampler
        return
    from cartridge_forge.plugins.serve.engine.in_process import local_sampler

    with local_sampler(
        learn.model.path,
        backend=learn.generator.backend,
        dtype=learn.model.dtype,
        threads=spec.mesh.roles["generator"].threads,
        kv_gib=learn.generator.kv_gib,
    ) as local:
        yield local
