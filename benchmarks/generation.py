"""The embedded backend against `transformers.generate` and vLLM: one thread each, in one run.

    python -m benchmarks.generation [--rounds 3] [--new 48] [--quick]

Tokens per second of a whole batch, and the time of the same batch with one new token, at batches
of 1 to 64, with a cartridge of P tokens before every prompt and with the beginning of a sequence
alone. The shipped reader in float32, greedy, prompts and responses of fixed lengths, no end token;
prompts are new in every round and the same for all. Backends take turns within a round, in any
order. Tokens per second are of the clock; ratios are of the processor time that two of them used in
one round, which others' work hardly touches. That they say the same is checked once.

transformers gets the cartridge as `past_key_values`, a copy for every row; the other two hold it
once. vLLM's engine is stepped in this process (eager, as the mesh runs it on CPUs).
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.record import arguments, median_ratio, provenance, write
from protocols.files import REPOSITORY

if TYPE_CHECKING:
    from torch import Tensor

    from actors.engine_thread import Engine

READER = REPOSITORY / "models" / "clinic-reader"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PREFIXES = ("cartridge", "none")
BLOCK = 32
OURS, THEIRS, VLLM = "embedded", "transformers", "vllm"


Backend = Callable[[str, Sequence[tuple[int, ...]], int], list[tuple[int, ...]]]


def through_engine(engine: Engine) -> Backend:
    """Return a backend of the mesh's engine, stepped until all responses have ended."""
    from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling

    refs = {"cartridge": PrefixRef("cartridge/p", 0), "none": PrefixRef("document/none", 0)}

    def ask(prefix: str, prompts: Sequence[tuple[int, ...]], new: int) -> list[tuple[int, ...]]:
        greedy = Sampling(temperature=0.0, max_tokens=new)
        for i, prompt in enumerate(prompts):
            engine.add(str(i), GenerateRequest(str(i), prompt, refs[prefix], greedy, 0))
        said: dict[str, tuple[int, ...]] = {}
        while len(said) < len(prompts):
            for key, news in engine.step():
                assert isinstance(news, Completion), "nothing is streamed here"
                said[key] = news.token_ids
        return [said[str(i)] for i in range(len(prompts))]

    return ask


def through_transformers(plain: Any, cartridge: Tensor, bos: int) -> Backend:
    """Return `model.generate` with the cartridge [L, 2, H_kv, P, D] as an already filled cache."""
    import torch
    from transformers import DynamicCache

    def filled(rows: int) -> DynamicCache:
        cache = DynamicCache(config=plain.config)
        for layer, (key, value) in enumerate(cartridge):
            cache.update(
                key.expand(rows, -1, -1, -1).clone(), value.expand(rows, -1, -1, -1).clone(), layer
            )
        return cache

    def ask(prefix: str, prompts: Sequence[tuple[int, ...]], new: int) -> list[tuple[int, ...]]:
        # Placeholder ids for the cached positions: generate does not read them.
        before = (0,) * cartridge.shape[3] if prefix == "cartridge" else (bos,)
        ids = torch.tensor([before + prompt for prompt in prompts])
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=filled(len(prompts)) if prefix == "cartridge" else None,
            do_sample=False, max_new_tokens=new, min_new_tokens=new, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]

    return ask


def backends(tokens: int) -> dict[str, Backend]:
    """Return the installed backends, over one model and a cartridge: a random document's start."""
    import os

    from actors.base import ModelSource, NoPlane
    from actors.engine_generator import environment

    path = str(READER)
    draws = random.Random("generation/document")
    document = tuple(draws.choices(range(3, 1000), k=tokens - 1))
    from transformers import AutoTokenizer

    bos = int(AutoTokenizer.from_pretrained(path).bos_token_id)
    documents = {"none": (bos,)}
    base = ModelSource(path, "float32", 1, documents, 1 << 30, NoPlane())
    os.environ.update(environment(base))

    import torch
    from transformers import AutoModelForCausalLM

    from learning.decoding.engine import TorchEngine
    from learning.model.document_kv import document_kv
    from learning.model.loading import flush_denormals, load_model
    from protocols.spec.sections import GeneratorSpec

    torch.set_num_threads(1)
    flush_denormals()
    model = load_model(path)
    kv = document_kv(model, (bos, *document))
    bare = document_kv(model, (bos,))
    ours = TorchEngine(model, lambda _: bare, frozenset(), lambda _: "")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = {OURS: through_engine(ours), THEIRS: through_transformers(plain, kv, bos)}
    engines: list[Engine] = [ours]
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed (`make install-vllm`): left out")
    else:
        from actors.vllm.engine import VllmEngine

        spec = GeneratorSpec(backend="vllm", block_tokens=BLOCK, kv_gib=0.5)
        engine = VllmEngine(path, "float32", documents, frozenset(), spec, lambda _: "")
        engines.append(engine)
        found[VLLM] = through_engine(engine)
    for held in engines:
        held.hold(0, ("p",), kv[None])
    return found


def same_words(found: dict[str, Backend], prompts: Sequence[tuple[int, ...]], new: int) -> float:
    """Return the share of responses on which every backend agrees on every token."""
    equal = 0
    for prefix in PREFIXES:
        answers = [backend(prefix, prompts, new) for backend in found.values()]
        equal += sum(len(set(rows)) == 1 for rows in zip(*answers, strict=True))
    return equal / (len(PREFIXES) * len(prompts))


def run(options: argparse.Namespace, batches: Sequence[int], rounds: int) -> dict[str, Any]:
    import torch

    found = backends(options.tokens)
    draws = random.Random("generation/prompts")

    def prompts(count: int) -> list[tuple[int, ...]]:
        return [tuple(draws.choices(range(3, 1000), k=options.prompt)) for _ in range(count)]

    agree = same_words(found, prompts(16), options.new)
    print(f"responses equal to the token in all of {', '.join(found)}: {agree:.0%}", flush=True)
    rows = []
    with torch.no_grad():
        for prefix in PREFIXES:
            for batch in batches:
                rows.append(compared(found, prefix, batch, options, rounds, prompts, draws))
                print(line(rows[-1]), flush=True)
    return {"equal_responses": agree, "rows": rows}


def compared(
    found: dict[str, Backend],
    prefix: str,
    batch: int,
    options: argparse.Namespace,
    rounds: int,
    prompts: Callable[[int], list[tuple[int, ...]]],
    draws: random.Random,
) -> dict[str, Any]:
    """Return every backend's speed per round, and the ratios of our speed to each other's."""
    # By backend and round: seconds to the first token, tokens a second, processor seconds.
    laps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        asked = prompts(batch)
        for name in draws.sample(list(found), k=len(found)):
            begun = time.perf_counter()
            found[name](prefix, asked, 1)
            first = time.perf_counter() - begun
            begun, used = time.perf_counter(), time.process_time()
            said = found[name](prefix, asked, options.new)
            seconds, used = time.perf_counter() - begun, time.process_time() - used
            assert sum(map(len, said)) == batch * options.new, f"{name} ended early"
            if turn:
                laps[name].append((first, batch * options.new / seconds, used))
    columns = {name: list(zip(*of, strict=True)) for name, of in laps.items()}
    ours = columns[OURS][2]
    return {
        "prefix": prefix,
        "batch": batch,
        "tokens_per_second": {n: round(statistics.median(c[1]), 1) for n, c in columns.items()},
        "first_token_ms": {n: round(1e3 * statistics.median(c[0]), 2) for n, c in columns.items()},
        "speed": {n: median_ratio(c[2], ours) for n, c in columns.items() if n != OURS},
    }


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['prefix']:<10}{row['batch']:>4}"]
    for name, speed in row["tokens_per_second"].items():
        cells.append(f"{name} {speed:>7,.0f} tok/s, first {row['first_token_ms'][name]:>5.0f} ms")
    cells += [f"{ratio:.2f}x {name}" for name, ratio in row["speed"].items()]
    return "  ".join(cells)


def main() -> None:
    from actors.base import bootstrap

    bootstrap(1)()  # before torch is imported
    parser = arguments(__doc__, "generation")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument("--prompt", type=int, default=24, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens of a response")
    parser.add_argument("--tokens", type=int, default=64, help="P of the cartridge")
    options = parser.parse_args()
    batches, rounds = ((1, 8, 64), 2) if options.quick else (BATCHES, options.rounds)
    told = provenance("generation", vars(options) | {"batches": batches, "threads": 1})
    results = run(options, batches, rounds)
    ratios = {"responses that are equal": results["equal_responses"]}
    for row in results["rows"]:
        if row["batch"] in (1, 8, 64):
            for name, ratio in row["speed"].items():
                ratios[f"{OURS} over {name}, {row['prefix']}, batch {row['batch']}"] = ratio
    write(options.out, told, ratios, results)


if __name__ == "__main__":
    main()
