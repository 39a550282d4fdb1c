"""What the door needs of strategies."""

from __future__ import annotations

from typing import Protocol

from protocols.types import PrefixRef
from serving.asked import Asked, StrategyAsked
from strategies.result import Result


class Strategies(Protocol):
    """Test-time strategies by name."""

    def names(self) -> list[str]: ...

    def check(self, strategy: StrategyAsked) -> None:
        """Raise DataError for options that the strategy does not take, or an unknown form."""
        ...

    async def run(self, asked: Asked, prefix: PrefixRef) -> Result:
        """The answer to `asked.messages`. Raises DataError or RunError."""
        ...
