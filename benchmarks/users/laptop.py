"""Answers behind a cartridge on a CPU: the engines beside llama.cpp itself, on one GGUF file.

    forge models add smollm2-135m
    python -m benchmarks.users.laptop TEXT.txt [--sides torch llama.cpp bare] [--rounds 5]

torch       the embedded engine, over the weights as float32
llama.cpp   `generator.backend: llama.cpp`, over the file's blocks
vllm        `generator.backend: vllm`, over the weights as float32
bare        llama.cpp's own server in its process (xllamacpp.Server) with its own settings, its own
            sampler and its own cache of the same number of tokens; one stream alone

Each side is a process of its own with one thread; they take turns in every round, in any order. A
turn is `streams` requests at a time, each a prompt of `--prompt` tokens behind the text's first
`--cartridge` and `--new` greedy tokens. Figures are tokens a second of the processor's time, which
others on the machine change less than seconds. Ratios are medians over the rounds.

The tokens of `torch` and `llama.cpp` are compared: where they first differ, and by how many nats
the embedded engine, over the whole weights, prefers its own token there.

The record has of each side the memory of its process, and of a GGUF file mapped into it what is
resident; and the bytes of the model's folder, without the weights that `torch` and `vllm` have
written into it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.record import benchmark

SIDES = ("torch", "llama.cpp", "vllm", "bare")
WRITTEN = "model.safetensors"
Ids = tuple[int, ...]
Turn = Callable[[Sequence[Ids], int], list[Ids]]  # (prompts, new tokens) -> the tokens of each


def engine_turn(backend: str, model: str, ids: Ids, cartridge: int, kv: Any) -> Turn:
    """Return a turn of one of our engines over a cartridge of the first tokens of `ids`."""
    from cartridge_forge.actors.base import ModelSource, NoPlane, keep_freed_memory
    from cartridge_forge.actors.engine_generator import build_engine, environment
    from cartridge_forge.protocols.spec.sections import GeneratorSpec
    from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling

    keep_freed_memory()
    base = ModelSource(model, "float32", 1, {"none": (), "d": ids[:cartridge]}, 2**30, NoPlane())
    if backend == "vllm":
        os.environ.update(environment(base))
    spec = GeneratorSpec(backend=backend, kv_gib=0.5)  # type: ignore[arg-type]  # one of SIDES
    engine = build_engine(base, frozenset(), spec)
    engine.hold({("d", 1): kv})
    prefix = PrefixRef("cartridge/d", 1)

    def turn(prompts: Sequence[Ids], new: int) -> list[Ids]:
        sampling = Sampling(temperature=0.0, max_tokens=new)
        for at, prompt in enumerate(prompts):
            request = GenerateRequest(str(at), prompt, prefix, sampling, 0, logprobs=False)
            engine.add(str(at), request, prefix)
        answers: dict[int, Ids] = {}
        while len(answers) < len(prompts):
            for key, news in engine.step():
                if isinstance(news, Completion):
                    answers[int(key)] = news.token_ids
        return [answers[at] for at in range(len(prompts))]

    return turn


def bare_turn(model: str, ids: Ids, cartridge: int) -> Turn:
    """Return a turn of llama.cpp's own server behind the same tokens, which it keeps in its
    cache."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(Path(model) / "model.gguf")
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)

    def turn(prompts: Sequence[Ids], new: int) -> list[Ids]:
        (prompt,) = prompts
        replies: list[Any] = []
        body = {
            "prompt": [*ids[:cartridge], *prompt], "n_predict": new, "temperature": 0,
            "ignore_eos": True, "cache_prompt": True,
        }  # fmt: skip
        server.handle_completions(body, replies.append)
        return [(-1,) * replies[-1]["timings"]["predicted_n"]]  # their ids are not told

    return turn


def side_process(pipe: Any, side: str, model: str, ids: Ids, cartridge: int, kv: Any) -> None:
    """Answer turns over a pipe with (answers, seconds of the processor) until None comes, and then
    tell the memory of this process."""
    import torch

    torch.set_num_threads(1)
    turn = (
        bare_turn(model, ids, cartridge)
        if side == "bare"
        else engine_turn(side, model, ids, cartridge, torch.from_numpy(kv))
    )
    pipe.send("ready")
    while (arguments := pipe.recv()) is not None:
        start = time.process_time()
        answers = turn(*arguments)
        pipe.send((answers, time.process_time() - start))
    pipe.send(memory())


def memory() -> dict[str, int]:
    """Return bytes of this process: resident in all, and of the mapped GGUF file."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    mapped, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            within = line.endswith("model.gguf")
        elif within and first == "Rss:":
            mapped += int(line.split()[1]) * 1024
    return {"resident": int(resident.split()[1]) * 1024, "mapped_gguf": mapped}


def first_difference(
    network: Any, kv: Any, prompt: Ids, ours: Ids, theirs: Ids
) -> dict[str, float] | None:
    """Return the first token at which two answers differ, and by how many nats the model prefers
    the first answer's; None where they are the same."""
    from cartridge_forge.learning.decode import generate
    from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return None
    one = Sampling(temperature=0.0, max_tokens=1)
    request = GenerateRequest(
        "d", (*prompt, *ours[:at]), PrefixRef("d", 0), one, 0, top_logprobs=1000
    )
    (completion,) = generate(network, [request], lambda _: kv, frozenset())
    nats = dict(completion.top_logprobs[0])
    return {"token": at, "of": len(ours), "nats": nats[ours[at]] - nats[theirs[at]]}


def measure(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    import torch

    from cartridge_forge.learning.model.loading import load_model, tokenizer_of
    from cartridge_forge.learning.teacher import document_kv
    from cartridge_forge.protocols.files import models_folder

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    folder = models_folder() / arguments.model
    stored = sum(file.stat().st_size for file in folder.iterdir() if file.name != WRITTEN)
    ids = tuple(tokenizer_of(str(folder))(arguments.document.read_text()).input_ids)
    network = load_model(str(folder))
    kv = document_kv(network, ids[: arguments.cartridge]).numpy()
    context, pipes = get_context("spawn"), {}
    for side in arguments.sides:
        pipes[side], theirs = context.Pipe()
        target = (theirs, side, str(folder), ids, arguments.cartridge, kv)
        context.Process(target=side_process, args=target, daemon=True).start()
    for pipe in pipes.values():
        assert pipe.recv() == "ready"
    turns = random.Random(0)
    rates: dict[str, list[float]] = {}
    responses: dict[tuple[str, Ids], Ids] = {}  # by side and prompt
    for number in range(arguments.rounds + 1):
        for streams in arguments.streams:
            begins = turns.sample(range(len(ids) - arguments.prompt), streams)
            prompts = [ids[b : b + arguments.prompt] for b in begins]
            new = arguments.new if streams == 1 else arguments.new_each
            for side in turns.sample(arguments.sides, k=len(arguments.sides)):
                if streams > 1 and side == "bare":
                    continue
                pipes[side].send((prompts, new))
                answers, seconds = pipes[side].recv()
                assert [len(answer) for answer in answers] == [new] * streams, side
                responses |= {(side, p): a for p, a in zip(prompts, answers, strict=True)}
                if number:  # the first warms up
                    rates.setdefault(f"{side}, {streams} streams", []).append(
                        streams * new / seconds
                    )
    memories = {}
    for side, pipe in pipes.items():
        pipe.send(None)
        memories[side] = pipe.recv()
    ratios = {}
    for streams in arguments.streams:
        ours = rates.get(f"llama.cpp, {streams} streams", [])
        for side in arguments.sides:
            theirs = rates.get(f"{side}, {streams} streams", [])
            if side != "llama.cpp" and ours and theirs:
                name = f"llama.cpp over {side}, {streams} streams"
                ratios[name] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    pairs = [
        (prompt, response, responses["llama.cpp", prompt])
        for (side, prompt), response in responses.items()
        if side == "torch" and "llama.cpp" in arguments.sides
    ]
    differences = [first_difference(network, torch.from_numpy(kv), *pair) for pair in pairs]
    results = {
        "tokens_per_cpu_second": rates,
        "memory_bytes": memories,
        "kept_bytes": stored,
        "differences": differences,
    }
    for name, ratio in ratios.items():
        print(f"{name:<36} {ratio:.2f}", flush=True)
    return ratios, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "document": {"type": Path, "help": "a text of 1,000 tokens or more"},
            "--model": ("smollm2-135m", "a kept model that is a GGUF file"),
            "--sides": {"nargs": "+", "choices": SIDES, "default": list(SIDES)},
            "--streams": ([1, 12], "requests at a time"),
            "--cartridge": (128, "tokens of the cartridge"),
            "--prompt": (16, "tokens of each prompt"),
            "--new": (48, "tokens written of one stream"),
            "--new-each": (24, "tokens written of each of several"),
            "--rounds": (5, "rounds after the first"),
        },
        {"rounds": 2},
    )
