"""Plan a run's contexts and cartridges: what the teacher reads, and what each learns from.

The section is printed where they are not one and the same: with `cartridge.per` other than
document, or `teacher.context_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.manifests.sizing import ModelSize
from forge_run.formatting import TableSection, bytes_text
from forge_run.plan.inputs import at_hand, tokenizer_at
from protocols.layout import CartridgeLayout
from protocols.spec.learn import LearnSpec

HEADS = ("cartridge", "learns from", "contexts", "their tokens", "their KV", "ratio")
MOST_NAMES = 6  # of a cartridge's documents


def layout_sections(learn: LearnSpec, size: ModelSize | None) -> list[TableSection]:
    """Return a row for each cartridge; nothing where every document has its own, uncut, or where
    the documents or the model's tokenizer are not at hand."""
    if learn.cartridge.per == "document" and learn.teacher.context_tokens is None:
        return []
    found = _contexts(learn)
    if found is None:
        return []
    layout, tokens = found
    rows = []
    for name, documents in layout.cartridges.items():
        contexts = [tokens[c] for c in layout.contexts[name]]
        named = ", ".join(documents[:MOST_NAMES])
        more = f" and {len(documents) - MOST_NAMES} more" if len(documents) > MOST_NAMES else ""
        kv = "unknown" if size is None else bytes_text(sum(contexts) * size.kv_token)
        sizes = f"{sum(contexts):,} ({min(contexts):,} to {max(contexts):,} each)"
        ratio = f"{sum(contexts) / learn.cartridge.tokens:.1f}x"
        rows.append((name, named + more, str(len(contexts)), sizes, kv, ratio))
    title = f"{len(tokens)} contexts of the teacher, {len(rows)} cartridges"
    return [TableSection(title, HEADS, tuple(rows))]


def _contexts(learn: LearnSpec) -> tuple[CartridgeLayout, Mapping[str, int]] | None:
    """Return the layout and the tokens of every context, as the teacher reads it."""
    data = learn.data
    if data.source == "longhealth" and not at_hand(learn):
        return None
    tokenizer = tokenizer_at(learn.model.path)
    if tokenizer is None or (data.source == "documents" and data.path is None):
        return None
    if learn.self_study is not None:
        from training.recipes.study_material import read_material

        parts, _ = read_material(learn, tokenizer)
        return parts.layout, {name: len(part.tokens) for name, part in parts.parts.items()}
    from training.recipes.longhealth_prompts import open_prompts

    prompts = open_prompts(learn, tokenizer)
    return prompts.layout, {name: len(prompts.documents[name]) for name in prompts.texts}
