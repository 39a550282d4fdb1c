"""Run vLLM's V1 engine (0.32) with cartridges as prefixes, as the engine of an EngineThread.

It translates requests and outputs. `plugins.vllm.connector` is what vLLM loads inside; no other
module imports vLLM. docs/adr/0004 describes the mechanism.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from cartridge_forge.learning.cartridge import CartridgeId, joined_fingerprint
from cartridge_forge.learning.draws import DecodeState, new_row
from cartridge_forge.learning.teacher import context_ids
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.decoding.stopping import Decode
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.plugins.vllm import connector
from cartridge_forge.plugins.vllm.connector import (
    DRAWN,
    LOADED,
    CartridgeConnector,
    CartridgeExtension,
    SeededDraw,
    SentDraw,
)
from cartridge_forge.plugins.vllm.kv_layout import (
    PLACEHOLDER,
    cache_salt,
    cartridges_of,
    check_shape,
)
from cartridge_forge.plugins.vllm.outputs import completed, likeliest, of_prompt
from cartridge_forge.protocols.errors import DataError, PublishError, RunError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import (
    CARTRIDGE,
    Completion,
    GenerateRequest,
    PrefixRef,
    count_work,
    require_ids,
)

MAX_LOGPROBS = 20  # at a position; vLLM's default, and the maximum of other APIs
MAX_REQUESTS = 256  # in one step; vLLM's default on most machines
GIB = 1024**3


class VllmEngine:
    """Implement `plugins.decoding.engine_thread.Engine`, one per process: vLLM has global
    state."""

    def __init__(
        self,
        path: str,
        dtype: str,
        documents: Mapping[str, tuple[int, ...]],
        end_ids: frozenset[int],
        spec: GeneratorSpec,
        text: Decode,
        grammars: Grammars,
    ) -> None:
        self.first_token_seconds: float | None = None
        self._path = path
        self._documents = documents
        self._text, self._grammars = text, grammars
        self._end_ids = sorted(end_ids)
        self._tensor_parallel = spec.tensor_parallel
        self._first_request: float | None = None
        self._running: dict[str, GenerateRequest] = {}
        self._prefixes: dict[str, PrefixRef] = {}  # of the running requests, as they are held
        self._followed: dict[str, DecodeState] = {}  # requests that are inspected token by token
        self._streams: set[str] = set()
        self._to_cancel: list[str] = []
        self._tokens: dict[CartridgeId, int] = {}  # P of each
        try:
            self._engine = LLMEngine.from_engine_args(engine_arguments(path, dtype, spec))
        except ValueError as error:  # vLLM's error for settings that do not fit the model
            raise RunError(
                f"vLLM cannot start: {error} (its paged memory is generator.kv_gib: "
                f"{spec.kv_gib:g} GiB)"
            ) from error
        model = self._engine.model_config
        self._max_tokens = model.max_model_len
        self._vocabulary = model.get_vocab_size()
        self._shape = (
            model.get_num_layers(self._engine.vllm_config.parallel_config),
            model.get_total_num_kv_heads(),
            model.get_head_size(),
        )

    def add(
        self, key: str, request: GenerateRequest, prefix: PrefixRef, stream: bool = False
    ) -> None:
        row = new_row(request, self._vocabulary, self._text, grammars=self._grammars)
        if row.top_wanted > MAX_LOGPROBS:
            raise DataError(
                f"request {request.id} asks for {row.top_wanted} log-probabilities at a place, and "
                f"vLLM gives at most {MAX_LOGPROBS}; ask for fewer (top_logprobs, until.top)"
            )
        parts = cartridges_of(request.id, prefix, self._tokens)
        extra: dict[str, Any] = {}
        salt: str | None = None
        if parts:
            if len(parts) > 1:
                frequencies_of(self._path)  # raises for a model whose keys cannot be rotated
            prefix_ids = (PLACEHOLDER,) * sum(part.tokens for part in parts)
            extra["kv_transfer_params"] = {LOADED: [astuple(part) for part in parts]}
            # Blocks found in the prefix cache have no logits, so prompt log-probabilities are
            # computed by a request that shares nothing and loads its cartridges for itself.
            salt = cache_salt(parts, key if request.prompt_logprobs else "")
        else:
            name = prefix.name.partition("/")[2]
            prefix_ids = request.document_ids or context_ids(self._documents, name)
            require_ids(prefix_ids, self._vocabulary, f"document {name}")
        ids = [*prefix_ids, *request.prompt_ids]
        if len(ids) + request.sampling.max_tokens > self._max_tokens:
            raise DataError(
                f"request {request.id} takes {len(prefix_ids)} prefix + {len(request.prompt_ids)} "
                f"prompt + {request.sampling.max_tokens} new tokens and the engine holds "
                f"{self._max_tokens}; raise generator.kv_gib or use shorter prompts"
            )
        if self._first_request is None:
            self._first_request = time.perf_counter()
        sampling = request.sampling
        # A grammar that fails is noticed here, by a matcher beside the worker's own.
        followed = stream or row.stopper is not None or row.grammar is not None
        stop_ids = [i for i in request.stop_ids if i not in self._end_ids]
        if sampling.temperature > 0 or row.grammar is not None or request.rules is not None:
            drawn = SentDraw(
                request.seed, sampling.temperature, sampling.top_p, sampling.top_k,
                request.first_draw, None if request.grammar is None else astuple(request.grammar),
                len(request.prompt_ids), None if request.rules is None else asdict(request.rules),
                stop_ids,
            )  # fmt: skip
            extra[DRAWN] = vars(drawn)
        parameters = SamplingParams(
            temperature=0.0,  # SeededDraw leaves the drawn token alone to choose from
            max_tokens=sampling.max_tokens,
            stop_token_ids=[*self._end_ids, *stop_ids],
            ignore_eos=True,  # these ids alone end a response, as with the embedded backend
            logprobs=row.top_wanted if row.keeps_logprobs else None,
            prompt_logprobs=max(1, request.top_logprobs) if request.prompt_logprobs else None,
            # vLLM would skip the connector as well, and compute the placeholders as tokens.
            skip_reading_prefix_cache=False if salt else None,
            detokenize=False,
            # The first request reports its first token; outputs of others are built once, unless
            # their tokens are inspected during decoding.
            output_kind=RequestOutputKind.DELTA
            if followed
            else RequestOutputKind.FINAL_ONLY
            if self._running or self.first_token_seconds
            else RequestOutputKind.CUMULATIVE,
            extra_args=extra or None,
        )
        try:
            self._engine.add_request(key, tokens_input(ids, cache_salt=salt), parameters)
        except (ValueError, TypeError) as error:  # of arguments; the engine does not have it
            raise DataError(f"request {request.id} is refused by vLLM: {error}") from error
        self._running[key] = request
        self._prefixes[key] = prefix
        if followed:
            self._followed[key] = row
        if stream:
            self._streams.add(key)

    def step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        fingerprints: dict[PrefixRef, tuple[str, ...]] = {}
        for key, news in self._step():
            if isinstance(news, Completion) and not news.error:
                prefix = self._prefixes[key]
                if prefix not in fingerprints:
                    fingerprints[prefix] = tuple(self._fingerprint(part) for part in prefix.parts)
                news = replace(news, served=fingerprints[prefix])
            if isinstance(news, Completion):
                del self._prefixes[key]
            yield key, news

    def _fingerprint(self, part: PrefixRef) -> str:
        """Return the fingerprint of a cartridge as the workers hold it now; "" of a document."""
        if not part.name.startswith(CARTRIDGE):
            return ""
        name = part.name.removeprefix(CARTRIDGE)
        replies = self._engine.collective_rpc("cartridge_digests", args=(name, part.version))
        layers, total, size = self._shape
        heads: dict[int, str] = {}
        for digests, _ in replies:
            for head, digest in digests.items():  # several ranks may hold one head
                if heads.setdefault(head, digest) != digest:
                    return f"ranks that hold other numbers of head {head}"
        if len(heads) < total:
            return "no longer held by the worker"
        shape = (layers, 2, total, self._tokens[name, part.version], size)
        dtype = getattr(torch, replies[0][1])
        return joined_fingerprint(shape, dtype, [heads[i] for i in range(total)])

    def _step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        outputs = self._engine.step()
        count_work(1)  # at least a token: most requests tell nothing before their end
        if outputs and self.first_token_seconds is None and self._first_request is not None:
            self.first_token_seconds = time.perf_counter() - self._first_request
        for output in outputs:
            assert isinstance(output, RequestOutput)
            key = output.request_id
            if key in self._followed:
                yield from self._follow(key, output)
            elif output.finished:
                yield key, completed(self._running.pop(key), output)
        yield from self._cancelled()

    def cancel(self, key: str) -> None:
        if key in self._running:
            self._to_cancel.append(key)

    def _follow(
        self, key: str, output: RequestOutput
    ) -> Iterable[tuple[str, TokenChunk | Completion]]:
        """Yield the new tokens of a request that is inspected token by token."""
        row, (completion,) = self._followed[key], output.outputs
        if completion.finish_reason not in (None, "stop", "length"):
            del self._followed[key]
            self._streams.discard(key)
            yield key, completed(self._running.pop(key), output)
            return
        sent, ends = len(row.tokens), frozenset(self._end_ids)
        if output.prompt_logprobs is not None and not row.prompt_logprobs:
            read = of_prompt(row.request, output)
            row.prompt_logprobs, row.prompt_likeliest, row.prompt_top = read
        logprobs = completion.logprobs or [None] * len(completion.token_ids)
        for token, at in zip(completion.token_ids, logprobs, strict=True):
            if row.reason:
                break
            top = () if at is None else likeliest(at, row.top_wanted)
            row.add(token, at and at[token].logprob, top, row.ends(token, ends))
        if key in self._streams and len(row.tokens) > sent:
            yield key, row.chunk(sent)
        if row.reason:
            if not output.finished:
                self._engine.abort_request([key])
            yield key, self._ended(key)

    def _cancelled(self) -> Iterable[tuple[str, Completion]]:
        keys, self._to_cancel = self._to_cancel, []
        for key in keys:
            if key in self._running:
                self._engine.abort_request([key])
                request = self._running[key]
                row = self._followed.setdefault(
                    key, new_row(request, self._vocabulary, self._text, grammars=self._grammars)
                )
                row.reason = "cancelled"
                yield key, self._ended(key)

    def _ended(self, key: str) -> Completion:
        self._streams.discard(key)
        del self._running[key]
        return self._followed.pop(key).completion()

    def hold(self, cartridges: Mapping[CartridgeId, Tensor]) -> None:
        for (name, _), kv in cartridges.items():
            check_shape(name, kv.shape, *self._shape)
        try:
            self._hold(cartridges)
        except (MemoryError, RuntimeError) as error:  # torch's word for no memory
            names = ", ".join(name for name, _ in cartridges)
            raise PublishError(f"cartridge {names} could not be loaded: {error}") from error
        self._tokens |= {key: kv.shape[3] for key, kv in cartridges.items()}

    def _hold(self, cartridges: Mapping[CartridgeId, Tensor]) -> None:
        ids = list(cartridges)
        tensors = {str(i): kv for i, kv in enumerate(cartridges.values())}
        if self._tensor_parallel == 1:
            self._engine.collective_rpc("hold_cartridges", args=(ids, tensors))
        else:  # workers are other processes, and vLLM's messages carry no tensors
            directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.TemporaryDirectory(prefix="forge-vllm-", dir=directory) as folder:
                path = os.path.join(folder, "cartridges.safetensors")
                save_file({name: kv.contiguous() for name, kv in tensors.items()}, path)
                self._engine.collective_rpc("hold_cartridges", args=(ids, path))

    def let_go(self, cartridges: Sequence[CartridgeId]) -> None:
        self._engine.collective_rpc("drop_cartridges", args=(cartridges,))
        for key in cartridges:
            del self._tokens[key]

    def loads(self) -> tuple[int, int]:
        (first, *_) = self._engine.collective_rpc("cartridge_loads")  # every rank loads alike
        return first

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def engine_arguments(path: str, dtype: str, spec: GeneratorSpec) -> EngineArgs:
    """Return vLLM's arguments for a replica of this spec."""
    # Although kv_cache_memory_bytes is given, vLLM demands this share of the GPU to be free.
    share = {} if spec.gpu_share is None else {"gpu_memory_utilization": spec.gpu_share}
    return EngineArgs(
        **share,
        model=path,
        dtype=dtype,
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # the model's own sampling defaults do not apply
        max_logprobs=MAX_LOGPROBS,
        logprobs_mode="raw_logprobs",  # at temperature 1, before truncation
        enable_prefix_caching=True,
        block_size=spec.block_tokens,
        max_num_batched_tokens=spec.chunk_tokens,
        max_num_seqs=min(MAX_REQUESTS, spec.chunk_tokens),
        max_model_len=-1,  # as many as the model and kv_gib allow
        kv_cache_memory_bytes=int(spec.kv_gib * GIB),
        tensor_parallel_size=spec.tensor_parallel,
        enforce_eager=current_platform.is_cpu(),  # compiling pays off on GPUs alone
        async_scheduling=False,  # vLLM's choice on CPUs, so that GPUs run the tested path
        disable_log_stats=True,
        use_tqdm_on_load=False,
        logits_processors=[f"{connector.__name__}:{SeededDraw.__name__}"],
        worker_extension_cls=f"{connector.__name__}.{CartridgeExtension.__name__}",
        kv_transfer_config={
            "kv_connector": CartridgeConnector.__name__,
            "kv_connector_module_path": connector.__name__,
            "kv_role": "kv_consumer",
        },
    )
