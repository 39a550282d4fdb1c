"""The tiny panel: its prompt, what its corpus shows, and what the shipped model makes of it."""

from __future__ import annotations

from rooms.environments.clinic_setup import Parts

from models.pretrain.measure import draw_asked, share_right


def test_the_shipped_panel_reads_and_else_follows_the_votes(panel: Parts) -> None:
    """Broad bounds: of 48 questions, the deviation of a share is up to 7 points."""
    model, tokenizer = panel

    def share(chart: bool, count: int = 0, right: int = 0) -> float:
        questions = draw_asked(1_000_003, 2, chart, count, right)
        return share_right(model, tokenizer, questions, seed=0)

    assert share(True) >= 0.7
    assert share(True, 4, 0) >= 0.5
    assert share(False) <= 0.4
    assert share(False, 4, 1) < share(False, 4, 2) < share(True, 4, 2)
