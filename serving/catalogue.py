"""No strategies yet."""

from __future__ import annotations

from typing import Any

from protocols.errors import DataError
from protocols.types import PrefixRef
from serving.asked import Asked, StrategyAsked
from strategies.result import Result


class CatalogueStrategies:
    def __init__(self, backend: Any, texts: Any) -> None: ...

    def names(self) -> list[str]:
        return []

    def check(self, strategy: StrategyAsked) -> None:
        raise DataError("there are none")

    async def run(self, asked: Asked, prefix: PrefixRef) -> Result:
        raise DataError("there are none")
