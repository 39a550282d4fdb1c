"""Ask the cartridge in this folder with llama.cpp: python ask.py MODEL.gguf "QUESTION"."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xllamacpp

FOLDER = Path(__file__).resolve().parent
LEAST_CONTEXT = 128  # tokens behind the cartridge


class CartridgeServer:
    """Serve one GGUF file in this process, with the cartridge of a folder in slot 0. `exact`:
    without flash attention, which rounds to half precision on a CPU."""

    def __init__(
        self, gguf: Path, folder: Path = FOLDER, exact: bool = True, context: int = 4096,
        threads: int | None = None,
    ) -> None:  # fmt: skip
        self.facts = json.loads((folder / "export.json").read_text())
        self.file = "session.exact.bin" if exact else "session.flash.bin"
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx, params.n_parallel = max(context, self.facts["tokens"] + LEAST_CONTEXT), 1
        params.n_gpu_layers = 0
        params.port, params.verbosity = 0, 0  # any free port; warnings alone
        params.slot_save_path = f"{folder}/"
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{self.facts['cache_type'].upper()}")
        params.cache_type_k = params.cache_type_v = kind
        flash = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = (
            flash.LLAMA_FLASH_ATTN_TYPE_DISABLED if exact else flash.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        if threads is not None:
            params.cpuparams.n_threads = threads
        self.server = xllamacpp.Server(params)

    def post(self, path: str, body: Any) -> Any:
        """Return the reply to a request, JSON for JSON."""
        request = urllib.request.Request(
            self.server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def complete(self, prompt_ids: Sequence[int], **options: Any) -> Any:
        """Return the server's completion of a prompt behind the cartridge; `options` are those of
        /completion. Raises RuntimeError where the cartridge was not read."""
        tokens = self.facts["tokens"]
        prompt = [self.facts["placeholder"]] * tokens + list(prompt_ids)
        # Restored each time: what the slot held since may have taken its place.
        self.post("/slots/0?action=restore", {"filename": self.file})
        reply = self.post("/completion", {"prompt": prompt, "temperature": 0, **options})
        if reply["timings"]["cache_n"] != tokens:
            raise RuntimeError(
                f"{reply['timings']['cache_n']} tokens were read from the slot, and the cartridge "
                f"has {tokens}: the answer is not over it"
            )
        return reply

    def answer(self, question: str, max_tokens: int = 64) -> str:
        """Return the greedy answer to a question."""
        request = {"content": question, "add_special": False, "parse_special": False}
        ids = self.post("/tokenize", request)["tokens"]
        prompt_ids = [*self.facts["before"], *ids, *self.facts["after"]]
        return str(self.complete(prompt_ids, n_predict=max_tokens)["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--flash", action="store_true", help="with flash attention")
    options = parser.parse_args()
    server = CartridgeServer(options.gguf, exact=not options.flash)
    print(server.answer(options.question, options.max_tokens))


if __name__ == "__main__":
    main()
