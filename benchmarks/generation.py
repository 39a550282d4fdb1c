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
from itertools import product
from typing import TYPE_CHECKING, Any

from benchmarks.record import benchmark, median_ratio
from cartridge_forge.protocols.files import REPOSITORY

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache

    from cartridge_forge.plugins.decoding.engine_thread import Engine

READER = REPOSITORY / "models" / "clinic-reader"
COMPARED = (1, 8, 64)  # the batches of the baseline
PREFIXES = ("cartridge", "none")
BLOCK = 32
OURS, THEIRS, VLLM = "embedded", "transformers", "vllm"


Backend = Callable[[str, Sequence[tuple[int, ...]], int], list[tuple[int, ...]]]


def through_engine(engine: Engine) -> Backend:
    """Return a backend of the mesh's engine, stepped until all responses have ended."""
    from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling

    refs = {"cartridge": PrefixRef("cartridge/p", 0), "none": PrefixRef("document/none", 0)}

    def ask(prefix: str, prompts: Sequence[tuple[int, ...]], new: int) -> list[tuple[int, ...]]:
        greedy = Sampling(temperature=0.0, max_tokens=new)
        for i, prompt in enumerate(prompts):
            request = GenerateRequest(str(i), prompt, refs[prefix], greedy, 0)
            engine.add(str(i), request, request.prefix)
        answers: dict[str, tuple[int, ...]] = {}
        while len(answers) < len(prompts):
            for key, news in engine.step():
                assert isinstance(news, Completion), "nothing is streamed here"
                answers[key] = news.token_ids
        return [answers[str(i)] for i in range(len(prompts))]

    return ask


def filled_cache(config: Any, kv: Tensor, rows: int = 1) -> DynamicCache:
    """Return transformers' cache of `rows` rows, each with the prefix kv [L, 2, H_kv, P, D], whose
    gradient it carries. Generating copies it for every row."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for layer, parts in enumerate(kv):
        keys, values = (x.expand(rows, -1, -1, -1) for x in parts)
        cache.update(keys, values, layer)
    return cache


def through_transformers(plain: Any, cartridge: Tensor, bos: int) -> Backend:
    """Return `model.generate` with the cartridge [L, 2, H_kv, P, D] as an already filled cache."""
    import torch

    def ask(prefix: str, prompts: Sequence[tuple[int, ...]], new: int) -> list[tuple[int, ...]]:
        # Placeholder ids for the cached positions: generate does not read them.
        prefix_ids = (0,) * cartridge.shape[3] if prefix == "cartridge" else (bos,)
        ids = torch.tensor([prefix_ids + prompt for prompt in prompts])
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=(
                filled_cache(plain.config, cartridge, len(prompts))
                if prefix == "cartridge" else None
            ),
            do_sample=False, max_new_tokens=new, min_new_tokens=new, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]

    return ask


def backends(tokens: int) -> dict[str, Backend]:
    """Return the installed backends, over one model and a cartridge: a random document's start."""
    import os

    from cartridge_forge.actors.base import ModelSource, NoPlane
    from cartridge_forge.actors.engine_generator import environment

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

    from cartridge_forge.learning.model.loading import flush_denormals, load_model
    from cartridge_forge.learning.teacher import document_kv
    from cartridge_forge.plugins.decoding.engine import TorchEngine
    from cartridge_forge.plugins.decoding.grammar import Grammars
    from cartridge_forge.protocols.spec.sections import GeneratorSpec

    torch.set_num_threads(1)
    flush_denormals()
    model = load_model(path)
    kv = document_kv(model, (bos, *document))
    bare = document_kv(model, (bos,))
    ours = TorchEngine(model, lambda _: bare, frozenset(), lambda _: "")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    by_name = {OURS: through_engine(ours), THEIRS: through_transformers(plain, kv, bos)}
    engines: list[Engine] = [ours]
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed (`make install-vllm`): left out")
    else:
        from cartridge_forge.plugins.vllm.engine import VllmEngine

        none = Grammars(lambda: None, frozenset())
        spec = GeneratorSpec(backend="vllm", block_tokens=BLOCK, kv_gib=0.5)
        engine = VllmEngine(path, "float32", documents, frozenset(), spec, lambda _: "", none)
        engines.append(engine)
        by_name[VLLM] = through_engine(engine)
    for engine_held in engines:
        engine_held.hold({("p", 0): kv})
    return by_name


def same_words(by_name: dict[str, Backend], prompts: Sequence[tuple[int, ...]], new: int) -> float:
    """Return the share of responses on which every backend agrees on every token."""
    equal = 0
    for prefix in PREFIXES:
        answers = [backend(prefix, prompts, new) for backend in by_name.values()]
        equal += sum(len(set(rows)) == 1 for rows in zip(*answers, strict=True))
    return equal / (len(PREFIXES) * len(prompts))


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    import torch

    from benchmarks.meters import FigureTable

    by_name = backends(options.tokens)
    draws = random.Random("generation/prompts")

    def prompts(count: int) -> list[tuple[int, ...]]:
        return [tuple(draws.choices(range(3, 1000), k=options.prompt)) for _ in range(count)]

    agree = same_words(by_name, prompts(16), options.new)
    print(f"responses equal to the token in all of {', '.join(by_name)}: {agree:.0%}", flush=True)
    table, ratios = FigureTable(), {"responses that are equal": agree}
    with torch.no_grad():
        for prefix, batch in product(PREFIXES, options.batches):
            rounds = [prompts(batch) for _ in range(options.rounds + 1)]
            row = compared(by_name, prefix, rounds, options.new, draws)
            table.add(row)
            for name, ratio in row["speed"].items():
                if batch in COMPARED:
                    ratios[f"{OURS} over {name}, {prefix}, batch {batch}"] = ratio
    return ratios, {"equal_responses": agree, "rows": table.rows}


def compared(
    by_name: dict[str, Backend],
    prefix: str,
    rounds: Sequence[Sequence[tuple[int, ...]]],
    new: int,
    draws: random.Random,
) -> dict[str, Any]:
    """Return every backend's speed over rounds of prompts after the first, and the ratios of our
    speed to each other's."""
    batch = len(rounds[0])
    # By backend and round: seconds to the first token, tokens a second, processor seconds.
    laps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in by_name}
    for batch_prompts in rounds:
        for name in draws.sample(list(by_name), k=len(by_name)):
            start = time.perf_counter()
            by_name[name](prefix, batch_prompts, 1)
            first = time.perf_counter() - start
            start, used = time.perf_counter(), time.process_time()
            answers = by_name[name](prefix, batch_prompts, new)
            seconds, used = time.perf_counter() - start, time.process_time() - used
            assert sum(map(len, answers)) == batch * new, f"{name} ended early"
            laps[name].append((first, batch * new / seconds, used))
    columns = {name: list(zip(*lap_rows[1:], strict=True)) for name, lap_rows in laps.items()}
    ours = columns[OURS][2]
    return {
        "prefix": prefix,
        "batch": batch,
        "tokens_per_second": {n: round(statistics.median(c[1]), 1) for n, c in columns.items()},
        "first_token_ms": {n: round(1e3 * statistics.median(c[0]), 2) for n, c in columns.items()},
        "speed": {n: median_ratio(c[2], ours) for n, c in columns.items() if n != OURS},
    }


if __name__ == "__main__":
    from cartridge_forge.actors.base import bootstrap

    bootstrap(1)()  # before torch is imported
    benchmark(
        __doc__,
        measure,
        {
            "--rounds": (3, "measured rounds"),
            "--batches": [1, 2, 4, 8, 16, 32, 64],
            "--prompt": (24, "tokens of a prompt"),
            "--new": (48, "tokens of a response"),
            "--tokens": (64, "P of the cartridge"),
        },
        quick={"rounds": 2, "batches": list(COMPARED)},
        config={"threads": 1},
    )
