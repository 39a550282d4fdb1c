"""Read the documents of a run again, as the run read them."""

from __future__ import annotations

import json
from pathlib import Path

from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.loading import load_resolved
from cartridge_forge.services.run_directory import RunDirectory


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
