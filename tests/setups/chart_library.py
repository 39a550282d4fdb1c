"""A library whose one cartridge knows its chart: the keys and values of the whole of it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from serving_setup import READER, model
from tutorial_pages import ROOT

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.documents.study.longhealth import open_prompts
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.loading import load_spec

NAME = "patient_01"


def add_chart(library: Path) -> int:
    """Add the first patient's chart of the main job, with its text and words, as `patient_01`.
    Return its tokens."""
    learn = RsaLearn.of(load_spec(str(ROOT / "meshes/longhealth.yaml")).spec.learn)
    prompts = open_prompts(learn, load_tokenizer(str(READER)))
    ids = tuple(prompts.documents[NAME])
    store = CartridgeStore(library, read_base(READER))
    with store.incoming() as file:
        save_file({"kv": document_kv(model(), ids)}, file)
        entry = store.add(NAME, file, {}, [count_terms(prompts.texts[NAME])])
    store.keep_document(entry, prompts.texts[NAME])
    return len(ids)
