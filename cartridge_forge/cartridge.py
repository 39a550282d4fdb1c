"""Ask and save one trained cartridge of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cartridge_forge.display import page
from cartridge_forge.processes import finished_output

if TYPE_CHECKING:
    from cartridge_forge.forge_run.commands.ask import AskedAnswer

CartridgeFormat = Literal["forge", "hazy", "peft", "tokasaurus"]


@dataclass(frozen=True)
class Cartridge:
    """Name a cartridge in a run's last on-policy checkpoint."""

    name: str
    run: Path

    def ask(
        self, question: str, *, max_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> AskedAnswer:
        """Return the answer over this cartridge, as `forge ask --run` does; its `answer` is the
        text. Each call loads the model in a process of its own: for many questions, add the
        cartridge to a library and serve it. Raises ForgeError."""
        from cartridge_forge.forge_run.commands.ask import AskedAnswer
        from cartridge_forge.plugins.documents.retrieval import Choice

        output = finished_output(
            ["ask", self.name, question, "--run", str(self.run), "--json", "--max-tokens",
             str(max_tokens), "--temperature", str(temperature), "--seed", str(seed)]
        )  # fmt: skip
        reply = json.loads(output)
        routed = reply.pop("routed")
        return AskedAnswer(**reply, routed=None if routed is None else Choice(**routed))

    def save(
        self,
        path: str | Path,
        format: CartridgeFormat = "forge",
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        replace: bool = False,
    ) -> list[str]:
        """Write the cartridge to `path` in a format, as `forge convert` does; return what is lost
        in it, a line each. Raises DataError, also for a path that is there unless `replace`."""
        from cartridge_forge.plugins.library.formats import convert

        read = convert.read(self.run, self.name)
        lost = list(convert.losses(read, format, dtype))
        convert.convert(read, Path(path), format, dtype=dtype, force=replace)
        return lost

    def _repr_html_(self) -> str:
        return page("cartridge", ("", ""), [("name", self.name), ("run", str(self.run))])
