"""What the student of a step stands behind: its document's cartridge, alone or in company.

A sample in company was sampled over an ordered composition, and is trained over the same one. Only
its own document's cartridge learns from it; the others are there as they are. The teacher has that
document alone: what is learned is to be read beside others, and not to read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from learning.cartridge.bank import CartridgeBank
from learning.model.rope import composed
from learning.packing import stack_prefixes
from protocols.types import Sample

SEPARATOR = "\n"  # in no document's name


def prefix_name(sample: Sample) -> str:
    """The document that learns, then the composition in order: "a", or "a\\nb\\na" for [b, a]."""
    return SEPARATOR.join((sample.document, *sample.composed))


def prefix_lengths(samples: Iterable[Sample], alone: Mapping[str, int]) -> dict[str, int]:
    """Tokens of every prefix that the samples name, and of each cartridge alone."""
    of_samples = {
        prefix_name(s): sum(alone[name] for name in s.composed) for s in samples if s.composed
    }
    return {**alone, **of_samples}


def student_kv(
    model: PreTrainedModel, bank: CartridgeBank, names: Sequence[str]
) -> tuple[Tensor, Tensor | None]:
    """kv [C, L, 2, H_kv, P, D] of the named prefixes, with gradient into the cartridges that learn,
    and their lengths [C] where they differ."""
    if not any(SEPARATOR in name for name in names):
        return bank.kv(names), None
    own = {name: name.split(SEPARATOR)[0] for name in names}
    found = []
    for name in names:
        order = name.split(SEPARATOR)[1:] or [own[name]]
        parts = [bank.kv([one])[0] for one in order]
        learns = [
            part if one == own[name] else part.detach()
            for one, part in zip(order, parts, strict=True)
        ]
        found.append(composed(model, learns))
    return stack_prefixes(found)
