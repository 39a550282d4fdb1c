"""Run vLLM's V1 engine with cartridges as prefixes: the one file that imports vLLM (0.32).

    VllmEngine            the engine of an EngineThread; translates requests and outputs
    CartridgeConnector    a KV connector, in the scheduler and in every worker: fills the
                          placeholders' blocks with a cartridge's keys and values
    CartridgeExtension    mixed into vLLM's worker class: holds and drops the tensors
    SeededDraw            a logits processor with the embedded backend's draws, for equal tokens

vLLM finds the last three by their names. docs/adr/0004 describes the mechanism.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.model_executor.models.utils import extract_layer_index
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate

from actors.vllm.draws import SeededRow, leave_drawn
from actors.vllm.kv_layout import (
    PLACEHOLDER,
    KVFill,
    PromptCartridge,
    cache_salt,
    cartridges_of,
    check_shape,
    kv_heads,
    pieces,
    slots,
)
from actors.vllm.outputs import completed, likeliest, of_prompt
from learning.cartridge.composition import frequencies_of, shifted
from learning.cartridge.fingerprint import Fingerprints, joined_fingerprint
from learning.decoding.decode_batch import DecodeState, new_row, uniforms
from learning.decoding.stopping import Decode
from learning.model.document_kv import context_ids
from protocols.errors import DataError, RunError
from protocols.spec.sections import GeneratorSpec
from protocols.types import (
    CARTRIDGE,
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    TokenChunk,
)

MAX_LOGPROBS = 20  # at a position; vLLM's default, and the maximum of other APIs
MAX_REQUESTS = 256  # in one step; vLLM's default on most machines
GIB = 1024**3
LOADED = "cartridges"  # key in kv_transfer_params: [name, version, P] of each, in order
DRAWN = "draw"  # key in extra_args: [seed, temperature, top_p, top_k, first draw]


class VllmEngine:
    """Implement `actors.engine_thread.Engine`, one per process: vLLM has global state."""

    def __init__(
        self,
        path: str,
        dtype: str,
        documents: Mapping[str, tuple[int, ...]],
        end_ids: frozenset[int],
        spec: GeneratorSpec,
        text: Decode,
    ) -> None:
        self.first_token_seconds: float | None = None
        self._path = path
        self._documents = documents
        self._text = text
        self._end_ids = sorted(end_ids)
        self._tensor_parallel = spec.tensor_parallel
        self._first_request: float | None = None
        self._running: dict[str, GenerateRequest] = {}
        self._prefixes: dict[str, PrefixRef] = {}  # of the running requests
        self._followed: dict[str, DecodeState] = {}  # requests that are inspected token by token
        self._streams: set[str] = set()
        self._to_cancel: list[str] = []
        self._tokens: dict[int, int] = {}  # version -> P
        try:
            self._engine = LLMEngine.from_engine_args(engine_arguments(path, dtype, spec))
        except ValueError as error:  # vLLM's error for settings that do not fit the model
            raise RunError(
                f"vLLM cannot start: {error} (its paged memory is generator.kv_gib: "
                f"{spec.kv_gib:g} GiB)"
            ) from error
        model = self._engine.model_config
        self._max_tokens = model.max_model_len
        self._shape = (
            model.get_num_layers(self._engine.vllm_config.parallel_config),
            model.get_total_num_kv_heads(),
            model.get_head_size(),
        )

    def add(self, key: str, request: GenerateRequest, stream: bool = False) -> None:
        row = new_row(request, self._text)
        if row.top_wanted > MAX_LOGPROBS:
            raise DataError(
                f"request {request.id} asks for {row.top_wanted} log-probabilities at a place, and "
                f"vLLM gives at most {MAX_LOGPROBS}; ask for fewer (top_logprobs, until.top)"
            )
        parts = cartridges_of(request, self._tokens)
        extra: dict[str, Any] = {}
        salt: str | None = None
        if parts:
            if len(parts) > 1:
                frequencies_of(self._path)  # raises for a model whose keys cannot be rotated
            before = (PLACEHOLDER,) * sum(part.tokens for part in parts)
            extra["kv_transfer_params"] = {LOADED: [astuple(part) for part in parts]}
            # Blocks found in the prefix cache have no logits, so prompt log-probabilities are
            # computed by a request that shares nothing and loads its cartridges for itself.
            salt = cache_salt(parts, key if request.prompt_logprobs else "")
        else:
            name = request.prefix.name.partition("/")[2]
            before = context_ids(self._documents, name)
        ids = [*before, *request.prompt_ids]
        if len(ids) + request.sampling.max_tokens > self._max_tokens:
            raise DataError(
                f"request {request.id} takes {len(before)} prefix + {len(request.prompt_ids)} "
                f"prompt + {request.sampling.max_tokens} new tokens and the engine holds "
                f"{self._max_tokens}; raise generator.kv_gib or use shorter prompts"
            )
        if self._first_request is None:
            self._first_request = time.perf_counter()
        sampling = request.sampling
        followed = stream or row.stopper is not None
        if sampling.temperature > 0:
            extra[DRAWN] = [
                request.seed, sampling.temperature, sampling.top_p, sampling.top_k,
                request.first_draw,
            ]  # fmt: skip
        parameters = SamplingParams(
            temperature=0.0,  # SeededDraw leaves the drawn token alone to choose from
            max_tokens=sampling.max_tokens,
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # end_ids alone end a response, as with the embedded backend
            logprobs=row.top_wanted,
            prompt_logprobs=1 if request.prompt_logprobs else None,
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
        self._engine.add_request(key, tokens_input(ids, cache_salt=salt), parameters)
        self._running[key] = request
        self._prefixes[key] = request.prefix
        if followed:
            self._followed[key] = row
        if stream:
            self._streams.add(key)

    def step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        known: dict[PrefixRef, tuple[str, ...]] = {}
        for key, news in self._step():
            if isinstance(news, Completion) and not news.error:
                prefix = self._prefixes[key]
                if prefix not in known:
                    known[prefix] = tuple(self._fingerprint(part) for part in prefix.parts)
                news = replace(news, served=known[prefix])
            if isinstance(news, Completion):
                del self._prefixes[key]
            yield key, news

    def _fingerprint(self, part: PrefixRef) -> str:
        """Return the fingerprint of a cartridge as the workers hold it now; "" of a document."""
        if not part.name.startswith(CARTRIDGE):
            return ""
        name = part.name.removeprefix(CARTRIDGE)
        told = self._engine.collective_rpc("cartridge_digests", args=(part.version, name))
        layers, total, size = self._shape
        heads: dict[int, str] = {}
        for digests, _ in told:
            for head, digest in digests.items():  # several ranks may hold one head
                if heads.setdefault(head, digest) != digest:
                    return f"ranks that hold other numbers of head {head}"
        if len(heads) < total:
            return "no longer held by the worker"
        shape = (layers, 2, total, self._tokens[part.version], size)
        dtype = getattr(torch, told[0][1])
        return joined_fingerprint(shape, dtype, [heads[i] for i in range(total)])

    def _step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        outputs = self._engine.step()
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
        row, (made,) = self._followed[key], output.outputs
        if made.finish_reason not in (None, "stop", "length"):
            del self._followed[key]
            self._streams.discard(key)
            yield key, completed(self._running.pop(key), output)
            return
        told, ends = len(row.tokens), set(self._end_ids)
        if output.prompt_logprobs is not None and not row.prompt_logprobs:
            row.prompt_logprobs, row.prompt_likeliest = of_prompt(row.request, output)
        assert made.logprobs is not None
        for token, at in zip(made.token_ids, made.logprobs, strict=True):
            if not row.reason:
                row.add(token, at[token].logprob, likeliest(at, row.top_wanted), token in ends)
        if key in self._streams and len(row.tokens) > told:
            yield key, row.came(told)
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
                row = self._followed.setdefault(key, new_row(request, self._text))
                row.reason = "cancelled"
                yield key, self._ended(key)

    def _ended(self, key: str) -> Completion:
        self._streams.discard(key)
        del self._running[key]
        return self._followed.pop(key).completion()

    def hold(self, version: int, names: tuple[str, ...], kv: Tensor) -> None:
        check_shape(kv.shape, *self._shape, len(names))
        if self._tensor_parallel == 1:
            self._engine.collective_rpc("hold_cartridges", args=(version, names, kv))
        else:  # workers are other processes, and vLLM's messages carry no tensors
            directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.TemporaryDirectory(prefix="forge-vllm-", dir=directory) as made:
                path = os.path.join(made, f"{version}.safetensors")
                save_file({"kv": kv.contiguous()}, path)
                self._engine.collective_rpc("hold_cartridges", args=(version, names, path))
        self._tokens[version] = kv.shape[4]

    def let_go(self, version: int) -> None:
        self._engine.collective_rpc("drop_cartridges", args=(version,))
        del self._tokens[version]

    def loads(self) -> tuple[int, int]:
        (first, *_) = self._engine.collective_rpc("cartridge_loads")  # every rank loads alike
        return first

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def engine_arguments(path: str, dtype: str, spec: GeneratorSpec) -> EngineArgs:
    """Return vLLM's arguments for a replica of this spec."""
    return EngineArgs(
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
        logits_processors=[f"{__name__}:{SeededDraw.__name__}"],
        worker_extension_cls=f"{__name__}.{CartridgeExtension.__name__}",
        kv_transfer_config={
            "kv_connector": CartridgeConnector.__name__,
            "kv_connector_module_path": __name__,
            "kv_role": "kv_consumer",
        },
    )


@dataclass
class PendingFills(KVConnectorMetadata):
    """Hold the fills that workers load before the next forward pass."""

    fills: list[KVFill]


class CartridgeConnector(KVConnectorBase_V1, SupportsHMA):
    """Fill the blocks of a request's placeholders with its cartridges.

    In the scheduler it reports their tokens as already computed and notes the blocks. In a worker
    it writes them just before the forward pass that first reads them, with the keys rotated to
    their positions. Blocks that the prefix cache has under the request's salt were filled before
    and are skipped.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                "a cartridge needs a model whose layers all attend to every token; this one has "
                f"{len(kv_cache_config.kv_cache_groups)} kinds of cache: sample it with "
                "generator.backend torch"
            )
        self._block_tokens = vllm_config.cache_config.block_size
        self._noted: list[KVFill] = []
        self._held: dict[int, tuple[tuple[str, ...], Tensor]] = {}
        self._fingerprints = Fingerprints()
        self._failed: set[int] = set()
        self.loads = 0
        self.loaded_tokens = 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- in the scheduler -----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = sum(part.tokens for part in _parts(request))
        return max(0, tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            parts = _parts(request)
            (ids,) = blocks.get_block_ids()
            tokens = sum(part.tokens for part in parts)
            self._noted.append(KVFill(parts, tokens - num_external_tokens, tokens, tuple(ids)))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        noted, self._noted = self._noted, []
        return PendingFills(noted)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # -- in a worker ----------------------------------------------------------------------------

    def hold(self, version: int, names: tuple[str, ...], kv: Tensor) -> None:
        """Keep this rank's heads of [C, L, 2, H_kv, P, D], on the host."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        mine = kv[:, :, :, kv_heads(kv.shape[3], rank, ranks)]
        # With one rank the tensor is not copied; several ranks keep their own heads only.
        self._held[version] = (names, mine.clone() if ranks > 1 else mine)

    def drop(self, version: int) -> None:
        self._held.pop(version, None)

    def digests(self, version: int, name: str) -> tuple[dict[int, str], str]:
        """Return the digests of this rank's heads of a cartridge, by the head's index, and the
        dtype; none of a version that it lost."""
        if version not in self._held:
            return {}, ""
        names, kv = self._held[version]
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        total = self._vllm_config.model_config.get_total_num_kv_heads()
        mine = range(total)[kv_heads(total, rank, ranks)]
        digests = self._fingerprints.heads(kv[names.index(name)])
        return dict(zip(mine, digests, strict=True)), str(kv.dtype).removeprefix("torch.")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PendingFills)
        if not metadata.fills:
            return
        layers = [
            (extract_layer_index(name), layer)
            for name, layer in forward_context.no_compile_layers.items()
            if getattr(layer, "kv_cache", None) is not None
        ]
        with gpu_sync_allowed():  # vLLM may be set to refuse copies from host memory
            for fill in metadata.fills:
                self._load(fill, layers)

    def _load(self, fill: KVFill, layers: list[tuple[int, Any]]) -> None:
        device, model = layers[0][1].kv_cache.device, self._vllm_config.model_config
        for piece in pieces(fill.parts, fill.first, fill.stop):
            part, start = piece.part, piece.start
            held = self._held.get(part.version)
            if held is None or part.name not in held[0]:
                # The engine keeps a version until its requests have ended, so this is a worker that
                # lost it. vLLM fails the requests that hold these blocks, and no other.
                self._failed.update(fill.blocks[: -(-fill.stop // self._block_tokens)])
                return
            kv = held[1][held[0].index(part.name), :, :, :, piece.first : piece.stop]
            kv = kv.to(device, model.dtype)
            if start:
                kv = shifted(kv, start, frequencies_of(model.model))
            where = slots(fill.blocks, self._block_tokens, start + piece.first, start + piece.stop)
            at = torch.tensor(where, device=device)
            for index, layer in layers:
                # [2, tokens, H_kv, D]: the order in which an attention layer takes keys and values.
                keys, values = kv[index].transpose(1, 2).contiguous()
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, at)
            self.loads += 1
            self.loaded_tokens += len(where)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: loading is done before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, *_: Any, **__: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Return at once: nothing is saved."""


def _parts(request: Any) -> tuple[PromptCartridge, ...]:
    """Return the cartridges of a vLLM request, as `VllmEngine.add` sent them."""
    return tuple(
        PromptCartridge(*sent) for sent in (request.kv_transfer_params or {}).get(LOADED, ())
    )


class SeededDraw(LogitsProcessor):
    """Draw the tokens of `temperature` > 0 by the request's own stream (actors/vllm/draws.py).

    With equal logits these are the embedded backend's tokens. vLLM's own seeds promise less, and
    fail on CPUs where a seeded prompt is read in chunks. Log-probabilities are taken before this.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, SeededRow] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _drawn_row)

    def apply(self, logits: Tensor) -> Tensor:
        return leave_drawn(logits, self._rows)


def _drawn_row(
    parameters: SamplingParams, prompt: list[int] | None, tokens: list[int]
) -> SeededRow | None:
    drawn = (parameters.extra_args or {}).get(DRAWN)
    if drawn is None:
        return None
    seed, temperature, top_p, top_k, first = drawn
    assert parameters.max_tokens is not None
    stream = uniforms(seed, parameters.max_tokens, first)
    return SeededRow(Sampling(temperature, top_p, top_k), stream, tokens)


class CartridgeExtension:
    """Add methods to vLLM's worker class, called by `collective_rpc`."""

    def hold_cartridges(self, version: int, names: tuple[str, ...], kv: Tensor | str) -> None:
        """Hold [C, L, 2, H_kv, P, D], or the path of a safetensors file with it as "kv"."""
        tensor = load_file(kv)["kv"] if isinstance(kv, str) else kv
        _connector().hold(version, tuple(names), tensor)

    def drop_cartridges(self, version: int) -> None:
        _connector().drop(version)

    def cartridge_digests(self, version: int, name: str) -> tuple[dict[int, str], str]:
        return _connector().digests(version, name)

    def cartridge_loads(self) -> tuple[int, int]:
        return _connector().loads, _connector().loaded_tokens


def _connector() -> CartridgeConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, CartridgeConnector)
    return connector
