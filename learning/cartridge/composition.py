"""Build the prefix that the student reads in a training step: its document's cartridge, or several.

A sample over a composition is trained over the same ordered composition. Gradient flows only into
the cartridge of the sample's own document. The teacher reads that document alone: the cartridge
learns to be read beside others, not to read them.
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
    """Return the document that learns, then the composition in order: "a", or "a\\nb\\na" for
    [b, a]."""
    return SEPARATOR.join((sample.document, *sample.composed))


def prefix_lengths(samples: Iterable[Sample], alone: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens of every prefix that the samples name, and of each cartridge alone."""
    of_samples = {
        prefix_name(s): sum(alone[name] for name in s.composed) for s in samples if s.composed
    }
    return {**alone, **of_samples}


def student_kv(
    model: PreTrainedModel, bank: CartridgeBank, names: Sequence[str]
) -> tuple[Tensor, Tensor | None]:
    """Return KV [C, L, 2, H_kv, P, D] of the named prefixes and their lengths [C] where they
    differ. Gradient flows into the cartridges that learn."""
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
