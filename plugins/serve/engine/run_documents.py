"""Read the documents of a run again, as the run read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.library.store import noted_run
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.services.run_directory import RunDirectory

RUNS = Path("runs")


def document_of_source(source: Mapping[str, Any], label: str, library: Path | None) -> str:
    """Return the text that the stored cartridge `label` replaces, by what its manifest keeps of its
    run: {"run": "20260726T101542-7f3a", "name": "patient_01"}, or the run's path. Raises DataError
    where the run is neither under `runs` nor where `library`, the cartridge's store, noted it, and
    as `document_of` does."""
    run, name = Path(str(source.get("run", ""))), str(source.get("name", ""))
    runs = [run] if run.is_absolute() else sorted(RUNS.glob(f"*/{run}"))
    noted = None if library is None else noted_run(library, run.name)
    runs += [noted] if noted is not None else []
    runs = [one for one in runs if (one / "spec.yaml").is_file()]
    if not run.name or not name or not runs:
        at = "" if noted is None else f", nor at {noted}"
        raise DataError(f"the run of {label} is not under {RUNS}{at}")
    return document_of(runs[0], name)


def document_of(path: Path, cartridge: str) -> str:
    """Return the text that a cartridge of a run replaces. Raises DataError for a run without
    documents, and where they are not there any more, or are others."""
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.documents.study.longhealth import open_prompts
    from cartridge_forge.plugins.documents.study.material import read_material

    run = RunDirectory(path)
    learn = RsaLearn.of(load_resolved(run.spec).learn)
    if learn.self_study is None:
        if learn.data.source != "clinic" or learn.rsa is not None:
            raise DataError(f"run {run.id} has no self-study of documents, which could be read")
        # Its charts are drawn from the seed, so that they cannot have changed.
        prompts = open_prompts(learn, load_tokenizer(learn.model.path))
        layout, texts = prompts.layout, prompts.texts
    else:
        parts, _ = read_material(learn, load_tokenizer(learn.model.path))
        read = json.loads(run.documents.read_bytes())["documents"]
        if json.loads(json.dumps(parts.as_dict()["documents"])) != read:
            raise DataError(f"the documents of run {run.id} have changed since; bring them back")
        layout, texts = parts.layout, parts.texts
    if cartridge not in layout.contexts:
        raise DataError(f"run {run.id} has no cartridge {cartridge[:60]!r}; see its list")
    return "\n\n".join(texts[context] for context in layout.contexts[cartridge])
