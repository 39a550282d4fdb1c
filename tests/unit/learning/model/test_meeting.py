"""By which interface ranks of several hosts connect."""

from __future__ import annotations

import pytest

from learning.ranks import ALONE, ProcessGroup, interface_to
from protocols.errors import DataError


def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    with pytest.raises(DataError, match=r"does not reach no-such-host\.invalid, where the ranks"):
        interface_to("no-such-host.invalid")


def test_copies_and_their_ranks_by_hand() -> None:
    """Six ranks that divide three copies by two: 0 and 1, 2 and 3, 4 and 5."""
    six = [ProcessGroup(rank, 6, tensor=2) for rank in range(6)]
    assert [(one.data_rank, one.data_world) for one in six] == [
        (0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3),
    ]  # fmt: skip
    assert (ALONE.data_rank, ALONE.data_world) == (0, 1)
