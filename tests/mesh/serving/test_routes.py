"""The door as OpenAI's own client meets it, over TCP, before the tiny reader's real engine."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI
from serving_setup import (
    CHAT,
    MODEL,
    Served,
)


def test_many_at_once_say_what_each_says_alone(served: Served) -> None:
    async def all_at_once() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:

            async def one(i: int) -> str | None:
                answer = await client.chat.completions.create(
                    model=[MODEL, f"{MODEL}+p1@1", f"{MODEL}+p1"][i % 3], messages=CHAT, seed=i,
                    max_tokens=9,
                )  # fmt: skip
                return answer.choices[0].message.content

            together = await asyncio.gather(*(one(i) for i in range(12)))
            return [together, [await one(i) for i in range(12)]]

    together, alone = asyncio.run(all_at_once())
    assert together == alone
