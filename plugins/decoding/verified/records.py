"""Define the records of verified rollouts: the student's blocks, and what the teacher accepts.

VerifyCall (rows of one group, a block each)  ->  DocTeacherActor.verify  ->  VerifyReply
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cartridge_forge.protocols.step import Sampling, TensorRef, TimedReply

VerifyRule = Literal["threshold", "exact"]


@dataclass(frozen=True)
class VerifyRow:
    """Hold one response of a group, and the `block` to be verified; None once it has ended.

    `tokens` are the prompt and the response so far, of which `response_tokens` are the response's,
    and `contexts` what the teacher reads before them. `seed` is that of the response's request.
    `reads` are the passes in which the teacher read the row: of each the first token, and the one
    behind the last. `most` is the largest number of tokens that it may come to.

    `VerifyRow(("patient_01",), (4, 91, 2, 17), 1, (5, 9), 123, ((0, 7),), 67)`
    """

    contexts: tuple[str, ...]
    tokens: tuple[int, ...]
    response_tokens: int
    block: tuple[int, ...] | None
    seed: int
    reads: tuple[tuple[int, int], ...]
    most: int

    @property
    def next_read(self) -> tuple[int, int]:
        """Return the tokens of the next pass: from the first that was not read, at the latest the
        last of `tokens`, after which the block stands."""
        assert self.block is not None
        first = min(self.reads[-1][1], len(self.tokens) - 1) if self.reads else 0
        return first, len(self.tokens) + len(self.block)


@dataclass(frozen=True)
class VerifyCall:
    """Ask a document teacher to verify the blocks of a `group`, whose rows are the same in each
    call. `below` belongs to the rule `threshold`. With `exact`, `student` refers to the tensor
    "logits" [M, V] from which the tokens of the blocks were drawn, row by row."""

    group: str
    rule: VerifyRule
    below: float
    sampling: Sampling
    rows: tuple[VerifyRow, ...]
    student: TensorRef | None = None


@dataclass(frozen=True)
class VerifyReply(TimedReply):
    """Carry the verdicts (`Verdict`) on a call's blocks, in the order of
    its rows that have one: how many tokens stay, and the teacher's token after them.

    `ratio` is the cost of such a pass over that of decoding one token of each row without a
    context, by the bytes that are read. `repeated` counts the earlier passes that were made again,
    because this replica does not hold the rows' keys and values.
    """

    verdicts: tuple[tuple[int, int | None], ...] = ()
    ratio: float = 1.0
    repeated: int = 0


@dataclass(frozen=True)
class VerifiedCounts:
    """Count the tokens of verified rollouts.

    `proposed` were sampled by the student. `judged` are those that the teacher looked at, up to the
    first refused one of each block, and `accepted` those that stayed. `taught` is the number of
    tokens of the responses that the teacher drew.
    """

    proposed: int = 0
    judged: int = 0
    accepted: int = 0
    taught: int = 0

    def __add__(self, other: VerifiedCounts) -> VerifiedCounts:
        return VerifiedCounts(*(a + vars(other)[name] for name, a in vars(self).items()))

    @property
    def facts(self) -> dict[str, float]:
        """Return the counts and the share accepted of the tokens that were judged; empty where none
        was proposed."""
        if not self.proposed:
            return {}
        share = self.accepted / self.judged if self.judged else 0.0
        return {**vars(self), "share": share}
