"""What a strategy solves: the messages, how tokens are drawn, and one seed for all draws."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from protocols.teacher_replay import Message
from protocols.seeds import stream_seed
from protocols.types import Sampling, Until
from strategies.answers.extract import Form
from strategies.samplers.sampler import Ask, Begun

Judge = Callable[[Sequence[str]], Awaitable[Sequence[float]]]
"""A process reward model: of each text, the probability that its last step is a good one."""


@dataclass(frozen=True)
class Question:
    """`Question((Message("user", "what is 2 + 2?"),), "math", 7, Sampling(0.7, max_tokens=512))`.

    `sampling.max_tokens` bounds one whole response. Every draw hangs on `seed`, `name` and the name
    of the draw alone. `judge` is for strategies whose scorer is "process_reward".
    """

    messages: tuple[Message, ...]
    form: Form
    seed: int
    sampling: Sampling
    name: str = "question"
    judge: Judge | None = None

    def ask(
        self,
        name: str,
        *,
        begun: Begun | None = None,
        until: Until | None = None,
        top_logprobs: int = 0,
        most: int | None = None,
    ) -> Ask:
        """The ask "question/`name`", of at most `most` tokens (None: the whole response)."""
        sampling = self.sampling if most is None else replace(self.sampling, max_tokens=most)
        name = f"{self.name}/{name}"
        seed = stream_seed(f"{self.seed}/{name}")
        return Ask(
            name, self.messages, sampling, seed, begun or Begun(), until, top_logprobs
        )  # fmt: skip

    def stream(self, name: str) -> random.Random:
        """A generator for draws of the strategy's own."""
        return random.Random(f"{self.seed}/{self.name}/{name}")
