"""Make a cartridge of a KV cache that another program compacted (`formats.kv_cache`).

positions   entries of a document of T tokens stand at 0..T-1 and a prompt at T, those of a
            cartridge at 0..P-1 and a prompt at P: keys are moved by P - T
biases      a cartridge has no field for them: they are folded into keys along the direction u with
            q.u nearest to 1 over a head's queries (`attention_matching.bias_direction`)

The queries are the model's own, of rows of text that it reads behind the entries with their biases.
Every second row is held out: there the attention over the folded keys is compared with that over
the biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.attention import AttentionOptions, layout_of
from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, tokenizer_of
from cartridge_forge.plugins.library.attention_matching import (
    HeadQueries,
    attended,
    bias_direction,
    far_squares,
    of_head,
    over_rows,
    scored,
    spans,
)
from cartridge_forge.plugins.library.formats import kv_cache
from cartridge_forge.plugins.library.formats.base_model import (
    made_for,
    misfits_of,
    partial_layer,
    read_base,
)
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.plugins.library.reference_rows import (
    MOST_ROWS,
    ROW,
    ReferenceRow,
    StudyPrompts,
    document_rows,
    study_rows,
)
from cartridge_forge.protocols.errors import DataError


@dataclass(frozen=True)
class LayerFolding:
    """Say how far a layer's folded keys are from its biases, over the held-out queries: the largest
    bias; the mean of (q.u - 1)^2; the root mean square of the attention's outputs with the biases,
    and the mean and largest difference of a number of them."""

    bias: float
    miss: float
    output: float
    mean_difference: float
    largest_difference: float

    @property
    def relative(self) -> float:
        """Return the mean difference as a part of the outputs' root mean square."""
        return self.mean_difference / self.output if self.output else 0.0


def read_compacted(
    path: Path, model: Path, document_tokens: int, text: str | None
) -> tuple[CartridgeFile, list[LayerFolding]]:
    """Return the cartridge of a cache at `path`, which `model` made of a document of so many tokens
    T, and how its biases were folded in each layer; [] where it has none. The queries are of
    `text`, or where that is None of what the model writes. Raises DataError."""
    base, cache = read_base(model), kv_cache.read(path)
    if reasons := misfits_of(tuple(cache.kv.shape), Provenance(), base):
        raise DataError(f"{path.name} is not for {model}: {'; '.join(reasons)}")
    tokens = cache.kv.shape[3]
    if document_tokens < tokens:
        raise DataError(
            f"{path.name} has {tokens} entries in each head, and a document of {document_tokens} "
            "tokens has no more than its tokens: give --document-tokens the position of the first "
            "token behind the document"
        )
    _check_sight(model)
    frequencies = frequencies_of(str(model))
    moved = shifted(cache.kv.double(), tokens - document_tokens, frequencies)
    kv = moved.to(cache.kv.dtype)
    folding: list[LayerFolding] = []
    if cache.biases is not None:
        kv, folding = _folded(str(model), moved, kv, cache.biases, text)
    source: dict[str, Any] = {"file": path.name, "document_tokens": document_tokens}
    if folding:
        source["folding"] = {
            str(number): {name: float(f"{value:.4g}") for name, value in asdict(layer).items()}
            for number, layer in enumerate(folding)
        }
    return made_for(CartridgeFile(kv).with_source(source), base), folding


def _folded(
    path: str, moved: Tensor, kv: Tensor, biases: Tensor, text: str | None
) -> tuple[Tensor, list[LayerFolding]]:
    """Return the model's cartridge of `moved` keys and values [L, 2, H_kv, P, D] in float64, which
    are rounded in `kv`, and `biases` [L, H_kv, P]. Raises DataError."""
    from transformers.utils.logging import disable_progress_bar  # slow: see learning.model

    disable_progress_bar()
    tokenizer = tokenizer_of(path)
    if text is not None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) < 2 * ROW:
            raise DataError(
                f"the text has {len(ids)} tokens, and {2 * ROW} are needed, half of them to "
                "measure: give a longer one, or none"
            )
        rows = document_rows(ids, min(MOST_ROWS, len(ids) // ROW))  # of which no two overlap
    # The states of many models overflow float16.
    dtype = "bfloat16" if kv.dtype is torch.bfloat16 else "float32"
    model = load_model(path, dtype)
    if text is None:
        special = set(tokenizer.all_special_ids)
        words = sorted(set(tokenizer.get_vocab().values()) - special)
        prompts = tuple((words[len(words) * i // MOST_ROWS],) for i in range(MOST_ROWS))
        rows = study_rows(model, kv.to(model.dtype), StudyPrompts(prompts), ROW - 1)
    return FoldingAttention(model, moved, biases, kv.dtype, rows).run()


def _check_sight(model: Path) -> None:
    """Raise DataError for a model with a layer that does not see all positions: where the entries
    stood is not known, so neither is which of them a token saw."""
    if partial := partial_layer(model):
        number, kind = partial
        raise DataError(
            f"layer {number} of {model} keeps a {kind} and not all positions, and a compacted "
            "cache does not say where its entries stood: use a model whose layers all see the "
            "whole text, or train a cartridge"
        )


@dataclass
class FoldingAttention:
    """Attend in the pass over the rows, which stand at P behind `moved` entries
    [L, 2, H_kv, P, D] with `biases` [L, H_kv, P], and fold each layer's biases into keys of `dtype`
    when the pass is there."""

    model: LanguageModel
    moved: Tensor
    biases: Tensor
    dtype: torch.dtype
    rows: Sequence[ReferenceRow]
    keys: list[Tensor] = field(default_factory=list)  # of each layer [H_kv, P, D]
    folding: list[LayerFolding] = field(default_factory=list)

    def __post_init__(self) -> None:
        device, lengths = self.model.device, [len(row.ids) for row in self.rows]
        of_rows = torch.cat([torch.arange(n) for n in lengths])
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.held_out = (number % 2 == 1).to(device)  # [N]
        self.positions = of_rows.to(device) + self.moved.shape[3]
        self.layout = layout_of(lengths, [len(lengths)], self.positions)
        self.frequencies = self.model.frequencies()

    @torch.no_grad()
    def run(self) -> tuple[Tensor, list[LayerFolding]]:
        """Read the rows; return the cartridge [L, 2, H_kv, P, D], and how each layer was folded."""
        ids = torch.tensor([id for row in self.rows for id in row.ids], device=self.model.device)
        self.model(ids, self.positions, self)
        keys = torch.stack(self.keys)
        return torch.stack([keys, self.moved[:, 1].to(keys)], dim=1), self.folding

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention [N, H_q, D] over the entries with their biases."""
        kv_heads = self.moved.shape[2]
        shared = q.shape[1] // kv_heads
        own_out, own_sums = over_rows(q, k, v, self.layout, options)
        keys, outputs, folded_outputs, misses = [], [], [], []
        for h in range(kv_heads):
            row_outputs = of_head(own_out, kv_heads, h)
            head = HeadQueries(
                of_head(q, kv_heads, h) * options.scale, of_head(own_sums, kv_heads, h),
                row_outputs, row_outputs,
                self.positions.repeat(shared), self.positions.repeat(shared), options,
            )  # fmt: skip
            held_out = self.held_out.repeat(shared)
            direction = bias_direction(
                *far_squares(head.queries[~held_out], self.frequencies.of_layer(layer))
            )
            entry_keys, values = self.moved[layer, :, h].to(direction)
            biases = self.biases[layer, h].to(direction)
            keys.append((entry_keys + biases[:, None] * direction).to(self.dtype))
            outputs.append(_read(head, entry_keys, values, biases))
            folded = _read(head, keys[-1], values.to(self.dtype), torch.zeros_like(biases))
            folded_outputs.append(folded[held_out])
            misses.append((head.queries[held_out].double() @ direction - 1).square())
        self.keys.append(torch.stack(keys).cpu())
        expected = torch.stack([out[self.held_out.repeat(shared)] for out in outputs])
        differences = (torch.stack(folded_outputs) - expected).abs()
        self.folding.append(
            LayerFolding(
                float(self.biases[layer].abs().max()), float(torch.stack(misses).mean()),
                float(expected.square().mean().sqrt()), float(differences.mean()),
                float(differences.max()),
            )
        )  # fmt: skip
        read = torch.stack(outputs).unflatten(1, (shared, -1))  # [H_kv, S, N, D]
        return read.flatten(0, 1).transpose(0, 1).to(q.dtype)


def _read(head: HeadQueries, keys: Tensor, values: Tensor, biases: Tensor) -> Tensor:
    """Return what the queries read [n, D] of entries [P, D] with `biases` [P], and of their
    rows."""
    biases, values = biases.to(head.queries), values.to(head.queries)
    return torch.cat(
        [
            attended(head, span, scored(head, keys, span, head.positions) + biases, values)[1]
            for span in spans(head, len(keys))
        ]
    )
