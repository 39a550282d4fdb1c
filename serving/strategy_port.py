"""What the door needs of strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from protocols.types import PrefixRef
from serving.asked import Asked
from strategies.result import Result


class Strategies(Protocol):
    """Test-time strategies by name."""

    def names(self) -> list[str]: ...

    def check(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise DataError for options that the strategy does not take."""
        ...

    async def run(self, asked: Asked, prefix: PrefixRef) -> Result:
        """The answer to `asked.messages`. Raises DataError or RunError."""
        ...
