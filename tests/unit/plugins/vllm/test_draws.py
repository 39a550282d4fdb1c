"""Drawn rows: the embedded backend's own draw decides, and nothing else in the batch."""

from __future__ import annotations

import torch

from cartridge_forge.learning.decode import draw, uniforms
from cartridge_forge.plugins.vllm.draws import SeededRow, leave_drawn
from cartridge_forge.protocols.step import Sampling

PLAIN, CUT = Sampling(1.0), Sampling(0.7, 0.8, 5)


def test_greedy_choice_after_it_is_the_draw() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    streams = {i: uniforms(100 + i, 6) for i in (0, 2, 3)}
    rows = {
        0: SeededRow(PLAIN, streams[0], []),
        2: SeededRow(CUT, streams[2], [9, 9, 9]),
        3: SeededRow(PLAIN, streams[3], [7]),
    }
    expected = [
        draw(logits[:1], streams[0][:1], PLAIN).item(),
        logits[1].argmax().item(),  # not drawn: greedy
        draw(logits[2:3], streams[2][3:4], CUT).item(),
        draw(logits[3:], streams[3][1:2], PLAIN).item(),
    ]
    left = leave_drawn(logits.clone(), rows)
    assert left.argmax(-1).tolist() == expected
    assert torch.equal(left[1], logits[1])
    assert left.softmax(-1)[torch.tensor([0, 2, 3]), torch.tensor(expected)[[0, 2, 3]]].eq(1).all()


def test_the_tokens_so_far_say_which_draw_is_next() -> None:
    """The engine's own list is read anew each time, as it grows."""
    logits = torch.zeros(1, 10)  # uniform: the draw is the tenth that the number falls into
    numbers = torch.tensor([0.05, 0.95, 0.55], dtype=torch.float64)
    tokens: list[int] = []
    row = SeededRow(PLAIN, numbers, tokens)
    for expected in (0, 9, 5):
        # An unfinished chunk of a prompt is sampled too, and thrown away: twice is as once.
        for _ in range(2):
            assert leave_drawn(logits.clone(), {0: row}).argmax(-1).tolist() == [expected]
        tokens.append(expected)
