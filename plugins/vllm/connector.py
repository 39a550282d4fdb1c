"""Load cartridges inside vLLM (0.32): the classes that it finds by their names in this module.

    CartridgeConnector    a KV connector, in the scheduler and in every worker: fills the
                          placeholders' blocks with a cartridge's keys and values
    CartridgeExtension    mixed into vLLM's worker class: holds and drops the tensors
    SeededDraw            a logits processor with the embedded backend's draws, for equal tokens

`plugins.vllm.engine` translates requests for them. docs/adr/0004 describes the mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
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
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate

from cartridge_forge.learning.cartridge import CartridgeId, Fingerprints, shifted
from cartridge_forge.learning.draws import uniforms
from cartridge_forge.learning.model.control_tokens import token_count
from cartridge_forge.learning.model.loading import tokenizer_of
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.plugins.vllm.draws import GrammarFollower, SeededRow, leave_drawn
from cartridge_forge.plugins.vllm.kv_layout import KVFill, PromptCartridge, kv_heads, pieces, slots
from cartridge_forge.protocols.response_rules import LogitRules, ResponseGrammar
from cartridge_forge.protocols.step import Sampling

LOADED = "cartridges"  # key in kv_transfer_params: [name, since, P] of each, in order
DRAWN = "draw"  # key in extra_args: the fields of `SentDraw`


@dataclass(frozen=True)
class SentDraw:
    """Hold how `SeededDraw` draws a request's tokens, as plain data that vLLM passes on.
    `prompt_tokens` are those of the prompt behind its prefix. `rules` are the fields of
    `LogitRules`. `stop_ids` end a response without being end tokens of the model."""

    seed: int
    temperature: float
    top_p: float
    top_k: int
    first: int
    grammar: tuple[Any, ...] | None
    prompt_tokens: int
    rules: dict[str, Any] | None
    stop_ids: list[int]


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
        self._held: dict[CartridgeId, Tensor] = {}
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

    def hold(self, cartridge: CartridgeId, kv: Tensor) -> None:
        """Keep this rank's heads of [L, 2, H_kv, P, D], on the host."""
        mine = kv[:, :, self.heads()]
        # With one rank the tensor is not copied; several ranks keep their own heads only.
        self._held[cartridge] = mine.clone() if mine.shape != kv.shape else mine

    def heads(self) -> slice:
        """Return the key/value heads of the model that this rank holds."""
        total = self._vllm_config.model_config.get_total_num_kv_heads()
        return kv_heads(
            total, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        )

    def tensor(self, part: PromptCartridge) -> Tensor | None:
        """Return this rank's heads of a cartridge, [L, 2, H, P, D]; None of one that it lost."""
        return self._held.get((part.name, part.since))

    def drop(self, cartridge: CartridgeId) -> None:
        self._held.pop(cartridge, None)

    def digests(self, cartridge: CartridgeId) -> tuple[dict[int, str], str]:
        """Return the digests of this rank's heads of a cartridge, by the head's index, and the
        dtype; none of one that it lost."""
        if cartridge not in self._held:
            return {}, ""
        kv = self._held[cartridge]
        mine = range(self._vllm_config.model_config.get_total_num_kv_heads())[self.heads()]
        digests = self._fingerprints.heads(kv)
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
            tensor = self.tensor(part)
            if tensor is None:
                # Whoever sent the request saw to it that workers have it, so this is one that lost
                # it. vLLM fails the requests that hold these blocks, and no other.
                self._failed.update(fill.blocks[: -(-fill.stop // self._block_tokens)])
                return
            kv = tensor[:, :, :, piece.first : piece.stop].to(device, model.dtype)
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
    """Draw the tokens of `temperature` > 0 by the request's own stream, and leave those alone that
    the tokenizer has and its grammar allows (plugins/vllm/draws.py). vLLM's own grammars need its
    tokenizer, which is not loaded, and would be followed otherwise than by the embedded backend.

    With equal logits these are the embedded backend's tokens. vLLM's own seeds promise less, and
    fail on CPUs where a seeded prompt is read in chunks. Log-probabilities are taken before this.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, SeededRow] = {}
        self._path = vllm_config.model_config.model
        self._tokens = token_count(self._path)
        self._grammars: dict[tuple[int, ...], Grammars] = {}  # by the tokens that end a response

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: Tensor) -> Tensor:
        if self._tokens is not None:
            logits[:, self._tokens :] = float("-inf")
        return leave_drawn(logits, self._rows)

    def _row(
        self, parameters: SamplingParams, prompt: list[int] | None, tokens: list[int]
    ) -> SeededRow | None:
        drawn = (parameters.extra_args or {}).get(DRAWN)
        if drawn is None:
            return None
        sent = SentDraw(**drawn)
        assert parameters.max_tokens is not None
        stream = uniforms(sent.seed, parameters.max_tokens, sent.first)
        follower = None
        if sent.grammar is not None:
            ends = tuple(i for i in parameters.stop_token_ids or () if i not in sent.stop_ids)
            if ends not in self._grammars:
                read = partial(tokenizer_of, self._path)
                self._grammars[ends] = Grammars(read, frozenset(ends))
            compiler = self._grammars[ends]
            follower = GrammarFollower(compiler.matcher(ResponseGrammar(*sent.grammar)), ends)
        sampling = Sampling(sent.temperature, sent.top_p, sent.top_k)
        prompt_ids = () if prompt is None else prompt[len(prompt) - sent.prompt_tokens :]
        rules = None if sent.rules is None else LogitRules(**sent.rules)
        return SeededRow(sampling, stream, tokens, follower, rules, prompt_ids)


class CartridgeExtension:
    """Add methods to vLLM's worker class, called by `collective_rpc`."""

    def hold_cartridges(
        self, cartridges: Sequence[CartridgeId], kv: Mapping[str, Tensor] | str
    ) -> None:
        """Hold cartridges with their tensors [L, 2, H_kv, P, D], or those of a safetensors file,
        under the names "0", "1", ..."""
        tensors = load_file(kv) if isinstance(kv, str) else kv
        for i, (name, since) in enumerate(cartridges):
            _connector().hold((name, since), tensors[str(i)])

    def drop_cartridges(self, cartridges: Sequence[CartridgeId]) -> None:
        for name, since in cartridges:
            _connector().drop((name, since))

    def cartridge_digests(self, name: str, since: int) -> tuple[dict[int, str], str]:
        return _connector().digests((name, since))

    def cartridge_loads(self) -> tuple[int, int]:
        return _connector().loads, _connector().loaded_tokens


def _connector() -> CartridgeConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, CartridgeConnector)
    return connector
