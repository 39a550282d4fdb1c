"""Prove a publish on generators that return neither fingerprints nor log-probabilities.

    publish(v) -> each generator continues a few tokens of each document greedily over version v
               -> the trainer scores these tokens over its own version v
               -> a token that the trainer finds unlikely beside its own best one ends the run

It is the weakest of the checks: a generator passes with numbers that give the same greedy text, and
between two publishes nothing is proven. It costs a short request of each document at each publish,
so backends that give better evidence are not asked (`services.roles.generator_evidence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
)
from cartridge_forge.services.clients import GeneratorClient, TrainerClient

PROMPT_TOKENS, TOKENS = 8, 16


class Canary:
    """Ask every generator about each version that is published. `most` is how far below the
    trainer's likeliest token one of the greedy text may be, nats."""

    def __init__(
        self,
        generator: GeneratorClient,
        trainer: TrainerClient,
        prompts: Mapping[str, Sequence[int]],
        most: float,
    ) -> None:
        """Take the start of each cartridge's text, by cartridge, as `prompts`."""
        self._generator, self._trainer, self._most = generator, trainer, most
        self._prompts = prompts

    async def check(self, snapshot: CartridgeSnapshot) -> None:
        """Raise StaleTokenError that names the replica whose greedy text is not this version's."""
        version = snapshot.version
        prompts = {n: tuple(self._prompts[n][:PROMPT_TOKENS]) for n in snapshot.names}
        requests = [
            GenerateRequest(
                f"canary/{version}/{name}",
                prompts[name],
                PrefixRef(f"cartridge/{name}", version),
                Sampling(temperature=0.0, max_tokens=TOKENS),
                seed=0,
            )
            for name in snapshot.names
        ]
        replies = await self._generator.ask_each(requests)
        probes = {
            (name, c.token_ids)
            for completions in replies.values()
            for name, c in zip(snapshot.names, completions, strict=True)
        }
        samples = [
            Sample(f"canary/{name}", name, prompts[name], ids, (), ())
            for name, ids in sorted(probes)
        ]
        deficits = dict(
            zip(sorted(probes), await self._trainer.greedy_deficit(samples, version), strict=True)
        )
        for replica, done in replies.items():
            for name, c in zip(snapshot.names, done, strict=True):
                if not (deficit := deficits[name, c.token_ids]) <= self._most:
                    raise StaleTokenError(
                        f"{replica} continued the start of {name} over cartridge version {version} "
                        f"by a token that the trainer finds {deficit:.3g} nats less likely than "
                        f"its own best one (bound {self._most:g}, train.sampler_gap.max): it "
                        "decodes over other numbers than were published; nothing was trained on "
                        "them; repair or replace this replica, then resume the run"
                    )
