"""Export a cartridge to a folder that another engine serves it from: `forge export`.

    transformers    cache.safetensors and ask.py: a filled cache, for `generate`
    llama.cpp       session.exact.bin, session.flash.bin, request.json and ask.py: a slot's state
    vllm            library/ and serve.sh: a library for vLLM's server with our plug-in

Each folder has a README.md that says how to use it, and export.json with what a program needs:

    before, after   ids around a question in a chat of one turn. `chat` is false where there are
                    none, and a prompt is then plain text
    placeholder     the id that stands P times for the cartridge in a prompt

What an engine cannot hold is refused here, with the reason: a file that is read and gives another
answer is worse than none.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from cartridge_forge.learning.model.loading import tokenizer_of
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.library.base_models.gguf_file import GGUF_FAMILIES
from cartridge_forge.plugins.library.exports.llama_session import GGML_TYPES, write_session
from cartridge_forge.plugins.library.formats import kv_cache
from cartridge_forge.plugins.library.formats.base_model import (
    made_for,
    partial_layer,
    read_base,
    require_fit,
)
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import new_path
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge
from cartridge_forge.protocols.errors import DataError

PLACEHOLDER = 0  # any id of the vocabulary: it is never embedded
XLLAMACPP = "xllamacpp==2026.10.11549"  # which writes and reads `llama_session.VERSION`
SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class ExportRequest:
    """Describe an export: the cartridge and what it is called, and the directory of its model."""

    cartridge: CartridgeFile
    name: str
    model: Path


def export(
    cartridge: CartridgeFile, name: str, engine: str, model: Path, folder: Path
) -> CartridgeFile:
    """Write the folder of a cartridge for an engine; return the cartridge with what the model's
    config adds to its provenance. Raises DataError where the engine cannot hold it, where the model
    does not fit, and where the folder is there."""
    if engine in REFUSED:
        raise DataError(REFUSED[engine])
    if engine not in ENGINES:
        raise DataError(f"there is no engine {engine}; there are {', '.join((*ENGINES, *REFUSED))}")
    base = read_base(model)
    require_fit(cartridge, base)
    if partial := partial_layer(model):
        number, kind = partial
        raise DataError(
            f"layer {number} of {model} keeps a {kind} and not all positions, and an export fills "
            "layers that see the whole text: serve the cartridge with forge serve"
        )
    request = ExportRequest(made_for(cartridge, base), name, model)
    with new_path(folder) as fresh:
        fresh.mkdir(mode=0o700)  # it is as confidential as its document
        text = ENGINES[engine](request, fresh)
        (fresh / "README.md").write_text(text, encoding="utf-8")
    return request.cartridge


def chat_turn(model: Path) -> tuple[list[int], list[int]] | None:
    """Return the ids before and after a question that follows a cartridge, up to where the answer
    begins; None for a model that does not chat, and for a tokenizer that joins a question with the
    text around it."""
    tokenizer = tokenizer_of(str(model))
    if not tokenizer.chat_template:
        return None
    renderer = ChatRenderer(tokenizer, {"document": "x"})

    def rendered(question: str) -> list[int]:
        return list(renderer.opening("document", [AgentMessage("user", question)]))

    first, second, third = map(rendered, QUESTIONS)
    head = _shared(first, second)
    tail = _shared(first[::-1], second[::-1])[::-1]
    question_ids = tokenizer(QUESTIONS[2], add_special_tokens=False).input_ids
    return (head, tail) if [*head, *question_ids, *tail] == third else None


QUESTIONS = ("Who?", "what is it", "When was this, and by whom?")


def _shared(a: list[int], b: list[int]) -> list[int]:
    """Return what both lists begin with."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[:length]


def _write_facts(request: ExportRequest, folder: Path, **more: Any) -> dict[str, Any]:
    """Write export.json and return its contents."""
    turn, made_of = chat_turn(request.model), request.cartridge.facts
    head, tail = turn or ([], [])
    facts = {
        "cartridge": request.name, "tokens": request.cartridge.tokens,
        "model": str(request.model.absolute()), "dtype": request.cartridge.dtype,
        "weights_sha256": made_of.weights_sha256,
        "weights_dtype": made_of.weights_dtype or "auto",
        "chat": turn is not None, "before": head, "after": tail, **more,
    }  # fmt: skip
    (folder / "export.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def _weights_dtype(request: ExportRequest) -> str:
    """Return the type in which the cartridge saw the weights, as vLLM names it. Its own `auto`
    rounds the weights of a float32 model to half precision."""
    config = json.loads((request.model / "config.json").read_bytes())
    config_dtype = config.get("dtype") or config.get("torch_dtype") or "auto"
    return request.cartridge.facts.weights_dtype or str(config_dtype)


def _heading(request: ExportRequest, engine: str) -> str:
    cartridge = request.cartridge
    return dedent(f"""\
        # {request.name} for {engine}

        A cartridge of {cartridge.tokens} tokens for the model {cartridge.facts.base}: keys and values
        [{cartridge.layers} layers, {cartridge.heads} heads, {cartridge.tokens}, {cartridge.head_dim}]
        in {cartridge.dtype}, rotated for the positions 0 to {cartridge.tokens - 1}. A prompt begins at
        position {cartridge.tokens}. It answers over the weights that it was trained on
        (`weights_sha256` of export.json) and no others.

        """)  # noqa: E501 - the lines of a page, with names filled in


def _write_transformers(request: ExportRequest, folder: Path) -> str:
    label = {"forge": request.cartridge.label()}
    kv_cache.save(request.cartridge.kv, folder / "cache.safetensors", label)
    _write_facts(request, folder)
    shutil.copyfile(SCRIPTS / "ask_transformers.py", folder / "ask.py")
    return _heading(request, "transformers") + dedent("""\
        `pip install torch transformers safetensors`, then

            python ask.py "QUESTION"
            python ask.py "QUESTION" --model DIR

        In your own program:

            from ask import answer_ids, load_cache
            cache = load_cache(model)
            mask = ids.new_ones(1, cache.get_seq_length() + ids.shape[1])
            model.generate(ids, attention_mask=mask, past_key_values=cache)

        `ids` are those of the prompt alone, without a first BOS token: the cartridge has it. `before` and
        `after` of export.json are the ids around a question.
        """)  # noqa: E501 - the lines of a page, with names filled in


def _llama_family(request: ExportRequest) -> bool:
    """Return whether llama.cpp rotates the model's heads in neighbouring pairs. Raises DataError
    for another model than those whose GGUF files are read here."""
    config = json.loads((request.model / "config.json").read_bytes())
    kind, rope = config.get("model_type"), request.cartridge.facts.rope
    kinds = {family.model_type: family for family in GGUF_FAMILIES.values()}
    kinds["mistral"] = GGUF_FAMILIES["llama"]
    if kind not in kinds:
        raise DataError(
            f"{request.model} is of the family {kind}, and the order in which llama.cpp keeps the "
            f"numbers of a key is known of {', '.join(sorted(kinds))}: export it --for transformers"
        )
    if rope.get("rope_type") not in ("default", "linear", "llama3"):
        raise DataError(
            f"the keys are rotated by {rope.get('rope_type')}, and default, linear and llama3 are "
            "known to be the same in llama.cpp: export it --for transformers"
        )
    return kinds[kind].interleaved


def _write_llama(request: ExportRequest, folder: Path) -> str:
    cartridge, interleaved = request.cartridge, _llama_family(request)
    kind = GGML_TYPES[cartridge.kv.dtype][1]
    tokens = [PLACEHOLDER] * cartridge.tokens
    for file, transposed in (("session.exact.bin", True), ("session.flash.bin", False)):
        write_session(
            folder / file, cartridge.kv, tokens, interleaved=interleaved, transposed=transposed
        )
    facts = _write_facts(request, folder, cache_type=kind, placeholder=PLACEHOLDER)
    prompt = [*tokens, *facts["before"], "QUESTION", *facts["after"]]
    body = {"prompt": prompt, "temperature": 0, "n_predict": 64}
    (folder / "request.json").write_text(json.dumps(body) + "\n", encoding="utf-8")
    shutil.copyfile(SCRIPTS / "ask_llama_cpp.py", folder / "ask.py")
    return _heading(request, "llama.cpp") + dedent(f"""\
        MODEL.gguf is the same model as a GGUF file. In one process, with Python:

            pip install {XLLAMACPP}
            python ask.py MODEL.gguf "QUESTION"

        With llama-server of the same age (b11549, session files of version 4):

            llama-server -m MODEL.gguf -c 4096 -np 1 -ctk {kind} -ctv {kind} -fa off --slot-save-path .
            curl -H 'Content-Type: application/json' 'localhost:8080/slots/0?action=restore' \\
              -d '{{"filename": "session.exact.bin"}}'
            curl -H 'Content-Type: application/json' localhost:8080/completion -d @request.json

        request.json is a request of one question, in place of QUESTION. A prompt begins with
        {cartridge.tokens} times the id {PLACEHOLDER}, which stand for the cartridge: `timings.cache_n`
        of the reply is {cartridge.tokens} where it was read. A request without them takes the
        cartridge's place in the slot: restore it again.

        session.exact.bin is for `-fa off`, session.flash.bin for `-fa on`. On a CPU llama.cpp rounds
        attention to half precision with `-fa on`, its default. The types of keys and values are those
        of the cartridge ({kind}); a context with others refuses the file.
        """)  # noqa: E501 - the lines of a page, with names filled in


def _write_vllm(request: ExportRequest, folder: Path) -> str:
    library = CartridgeStore(folder / "library", read_base(request.model))
    add_cartridge(library, request.name, request.cartridge, {})
    _write_facts(request, folder)
    served, dtype = request.cartridge.facts.base, _weights_dtype(request)
    transfer = {
        "kv_connector": "CartridgeLibraryConnector", "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"library": "library"},
    }  # fmt: skip
    (folder / "kv_transfer.json").write_text(json.dumps(transfer, indent=1) + "\n")
    script = folder / "serve.sh"
    script.write_text(
        dedent(f"""\
        #!/bin/sh
        # Serve MODEL with the cartridges of ./library: ./serve.sh [MODEL] [vLLM's own options]
        model={shlex.quote(str(request.model.absolute()))}
        case ${{1:--}} in -*) ;; *) model=$1; shift ;; esac
        test -d "$model" && model=$(cd "$model" && pwd)
        cd "$(dirname "$0")" || exit 1
        VLLM_USE_V2_MODEL_RUNNER=0 exec python -m vllm.entrypoints.openai.api_server \\
          --model "$model" --served-model-name {shlex.quote(served)} --dtype {dtype} \\
          --no-async-scheduling --kv-transfer-config "$(cat kv_transfer.json)" "$@"
        """)
    )
    script.chmod(0o700)
    return _heading(request, "vLLM") + dedent(f"""\
        vLLM 0.32 and cartridge-forge in one Python; then

            ./serve.sh
            curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
              -d '{{"model": "{served}+{request.name}", "messages": [{{"role": "user", "content": "QUESTION"}}]}}'

        - `{served}+{request.name}` names the cartridge; `{served}` has none, in the same batch.
        - A version that is added to library/ while the server runs serves the next request.
        - One cartridge a request. `forge serve` composes several.
        - Asynchronous scheduling is refused: the server does not start with it.
        - The weights are read in {dtype}, as the cartridge was trained over them; vLLM's `auto` would
          round float32 to half precision.
        """)  # noqa: E501 - the lines of a page, with names filled in


# Each fills a new folder and returns the text of its README. It raises DataError.
ENGINES: Mapping[str, Callable[[ExportRequest, Path], str]] = {
    "transformers": _write_transformers, "llama.cpp": _write_llama, "vllm": _write_vllm,
}  # fmt: skip
REFUSED: Mapping[str, str] = {
    "sglang": (
        "there is no export for SGLang: sglang 0.5.23 is for CUDA alone (it requires torch 2.14.1, "
        "sglang-kernel and flashinfer_python[cu13]), so that its tokens could not be compared with "
        "ours; export it --for vllm, or serve it with forge serve"
    ),
    "lmcache": (
        "there is no export for LMCache: its store finds keys and values by the hash of the token "
        "ids before them, and a cartridge has none; lmcache 0.5.6 (numpy 2.2.6 or older, protobuf "
        "below 7) cannot be installed beside this project, and nothing was compared with ours in "
        "an environment without it; export it --for vllm, whose library lies on a disk that "
        "several servers share"
    ),
}
