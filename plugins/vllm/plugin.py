"""Serve cartridges from vLLM's own server, `vllm serve` (0.32), as a plugin (docs/adr/0024).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CartridgeLibraryConnector",
      "kv_role": "kv_consumer", "kv_connector_extra_config": {"library": "library"}}'

A request names a cartridge of the library in `kv_transfer_params`, {"cartridge": "NAME@VERSION"},
or in `model`, BASE+NAME@VERSION. vLLM calls `register` in each of its processes, by this package's
entry point `vllm.general_plugins`. It changes nothing for servers that run another connector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from http import HTTPStatus
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from cartridge_forge.plugins.vllm.connector import LOADED, CartridgeConnector
from cartridge_forge.plugins.vllm.kv_layout import PLACEHOLDER, PromptCartridge, cache_salt
from cartridge_forge.plugins.vllm.library import CartridgeLibrary, CartridgeMisfit, open_library
from cartridge_forge.protocols.errors import DataError, SpecError

NAME = "CartridgeLibraryConnector"
PLUGIN = "cartridges"  # the name of its entry point
CARTRIDGE_KEY = "cartridge"  # of a request's kv_transfer_params
_WRAPPED = "_forge_wrapped"  # marks a function of vLLM that `register` replaced
TOKENIZED = (TokenizeChatRequest, TokenizeCompletionRequest)
# Whether the chat that is rendered will be counted alone. Otherwise `process_inputs` comes after
# the rendering and puts the placeholders there.
_counting: ContextVar[bool] = ContextVar("counting", default=False)

# In the vLLM logger's tree, which alone the server prints.
logger = init_logger(f"vllm.{__name__}")


class CartridgeLibraryConnector(CartridgeConnector):
    """Fill the placeholders of requests with cartridges that the worker reads from a library when a
    request first needs them."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not hasattr(InputProcessor.process_inputs, _WRAPPED):
            # By its module's path alone: requests would be answered without their cartridges.
            raise SpecError(
                f"the plugin of {NAME} is not loaded: install cartridge-forge beside vLLM, and "
                f"name {PLUGIN} in VLLM_PLUGINS where that is set"
            )
        refuse_settings(vllm_config)
        self._library = library_of(vllm_config)

    def tensor(self, part: PromptCartridge) -> Tensor | None:
        try:
            kv = self._library.tensor(part.name, part.since)
        except DataError as error:  # dropped or damaged after the request was taken
            logger.error("cannot load cartridge %s@%d: %s", part.name, part.since, error)
            return None
        return kv[:, :, self.heads()]


def refuse_settings(vllm_config: VllmConfig) -> None:
    """Raise SpecError for settings of a server under which cartridges would be wrong, or which no
    test has tried."""
    parallel = vllm_config.parallel_config
    context_ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    refused = [
        (transfer.kv_load_failure_policy != "fail",
         "kv_load_failure_policy recompute, which computes placeholders as text: leave it out"),
        (vllm_config.scheduler_config.async_scheduling,
         "asynchronous scheduling: --no-async-scheduling"),
        (vllm_config.use_v2_model_runner,
         "the second model runner: VLLM_USE_V2_MODEL_RUNNER=0"),
        (vllm_config.speculative_config is not None,
         "speculative decoding, whose draft has no cartridge: leave --speculative-config out"),
        (vllm_config.model_config.use_mla,
         "multi-head latent attention, whose cache holds no keys: take another model"),
        (parallel.pipeline_parallel_size > 1,
         "pipeline parallelism: --tensor-parallel-size instead"),
        (context_ranks > 1, "context parallelism: --tensor-parallel-size instead"),
    ]  # fmt: skip
    reasons = [why for on, why in refused if on]
    if reasons:
        raise SpecError(f"{NAME} does not run with " + "; nor with ".join(reasons))


def library_of(vllm_config: VllmConfig) -> CartridgeLibrary:
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    assert transfer is not None
    return open_library(transfer.kv_connector_extra_config, model.model, model.revision)


def register() -> None:
    """Make the connector known to vLLM by its name, and let requests name cartridges. vLLM may call
    this more than once in a process."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, CartridgeLibraryConnector.__name__)
    _wrap(InputProcessor, "process_inputs", _process_inputs)
    _wrap(BaseServing, "_check_model", _check_model)
    _wrap(ServingTokenization, "create_tokenize", _create_tokenize)
    _wrap(AnthropicServingMessages, "count_tokens", _count_tokens)
    _wrap(OpenAIServingChat, "render_chat_request", _render_chat_request)


def _wrap(owner: type[Any], name: str, wrapper: Any) -> None:
    """Replace a method by `wrapper`, which is given the method first."""
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def serves_cartridges(vllm_config: VllmConfig) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == NAME


def _process_inputs(
    original: Any, self: InputProcessor, request_id: str, prompt: Any, params: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Put a cartridge's placeholders before the prompt that names it."""
    if serves_cartridges(self.vllm_config):
        prompt, params = with_cartridge(
            library_of(self.vllm_config), self.renderer.get_bos_token_id(), prompt, params,
            bool(kwargs.get("resumable")),
        )  # fmt: skip
    return original(self, request_id, prompt, params, *args, **kwargs)


def with_cartridge(
    library: CartridgeLibrary, bos: int | None, prompt: Any, params: Any, resumable: bool
) -> tuple[Any, Any]:
    """Return a request's prompt and parameters, with the placeholders of the cartridge that it
    names before the prompt; both as they are where it names none. A leading `bos` of the prompt is
    dropped, because the cartridge begins with it. Raises VLLMValidationError, which clients see as
    status 400."""
    extra = getattr(params, "extra_args", None) or {}
    sent = extra.get("kv_transfer_params") or {}
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if not isinstance(sent, Mapping):
        raise VLLMValidationError(
            f"kv_transfer_params is an object: got {sent!r}", parameter="kv_transfer_params"
        )
    if salt and "@" in salt:
        # It would read, or leave, blocks in the prefix cache under a cartridge's name.
        raise VLLMValidationError(
            "cache_salt: @ is in the salts of cartridges alone", parameter="cache_salt"
        )
    if LOADED in sent:
        raise VLLMValidationError(
            f"kv_transfer_params.{LOADED} is written by the server; name one cartridge in "
            f"kv_transfer_params.{CARTRIDGE_KEY}",
            parameter="kv_transfer_params",
        )
    if CARTRIDGE_KEY not in sent:
        return prompt, params
    named = named_cartridge(sent)
    refuse_request(prompt, params, resumable)
    try:
        part = library.find(named)
    except DataError as error:
        raise VLLMValidationError(str(error), parameter=CARTRIDGE_KEY) from error
    params = params.clone()
    params.extra_args = {
        **extra,
        "kv_transfer_params": {LOADED: [[part.name, part.since, part.tokens]]},
    }
    ids = placed(part, prompt["prompt_token_ids"], bos)
    if len(ids) == part.tokens:
        raise VLLMValidationError("the prompt has no token; give it one at least")
    salt = cache_salt([part], salt or "")
    return {**prompt, "prompt_token_ids": ids, "cache_salt": salt}, params


def placed(part: PromptCartridge, ids: Sequence[int], bos: int | None) -> list[int]:
    """Return a prompt's ids behind the placeholders of a cartridge, without a leading `bos`."""
    token_ids = ids[1:] if ids and ids[0] == bos else ids
    return [PLACEHOLDER] * part.tokens + list(token_ids)


def named_cartridge(sent: Mapping[str, Any]) -> str:
    """Return the cartridge that kv_transfer_params name. Raises VLLMValidationError."""
    named = sent[CARTRIDGE_KEY]
    if not isinstance(named, str) or len(sent) > 1:
        raise VLLMValidationError(
            f"kv_transfer_params name one cartridge, and nothing else: "
            f'{{"{CARTRIDGE_KEY}": "NAME@VERSION"}}',
            parameter="kv_transfer_params",
        )
    return named


def refuse_request(prompt: Any, params: Any, resumable: bool) -> None:
    """Raise VLLMValidationError for a request that a cartridge cannot stand before."""
    wrong = ""
    if not isinstance(params, SamplingParams):
        wrong = "a request that generates nothing: leave the cartridge out"
    elif not isinstance(prompt, dict) or prompt.get("type") != "token":
        wrong = "a prompt that is no text or token ids: send text"
    elif resumable:
        wrong = "a prompt that arrives in parts: send it whole"
    elif params.prompt_logprobs is not None:
        wrong = "prompt log-probabilities: leave out prompt_logprobs, and echo beside logprobs"
    elif params.repetition_penalty != 1.0:
        wrong = "repetition_penalty, which would count the placeholders: use frequency_penalty"
    elif params.skip_reading_prefix_cache:
        wrong = "skip_reading_prefix_cache, which skips the cartridge too: leave it out"
    if wrong:
        raise VLLMValidationError(f"a cartridge does not go with {wrong}", parameter=CARTRIDGE_KEY)


async def _check_model(original: Any, self: BaseServing, request: Any) -> Any:
    """Read BASE+NAME@VERSION as the model BASE and a cartridge, and check the cartridge before a
    stream begins, so that an error has its status."""
    client = _engine_client(self)
    fields = getattr(type(request), "model_fields", {})
    takes = "kv_transfer_params" in fields or isinstance(request, TOKENIZED)
    if client is None or not takes or not serves_cartridges(client.vllm_config):
        return await original(self, request)
    base, plus, cartridge = (request.model or "").rpartition("+")
    sent = getattr(request, "kv_transfer_params", None) or {}
    if plus and not self._is_model_supported(request.model) and self._is_model_supported(base):
        if sent.get(CARTRIDGE_KEY, cartridge) != cartridge:
            return self.create_error_response(
                f"model names the cartridge {cartridge} and kv_transfer_params another; name one",
                param="model",
            )
        request.model = base
        sent = {**sent, CARTRIDGE_KEY: cartridge}
        request.kv_transfer_params = sent
    if CARTRIDGE_KEY in sent:
        if getattr(request, "use_beam_search", False):
            return self.create_error_response(
                "a cartridge does not go with use_beam_search: leave it out", param=CARTRIDGE_KEY
            )
        try:
            library_of(client.vllm_config).find(named_cartridge(sent))
        except CartridgeMisfit as error:
            return self.create_error_response(str(error), param=CARTRIDGE_KEY)
        except DataError as error:
            return self.create_error_response(
                str(error),
                err_type="NotFoundError",
                status_code=HTTPStatus.NOT_FOUND,
                param=CARTRIDGE_KEY,
            )
    return await original(self, request)


def _engine_client(serving: BaseServing) -> Any:
    """Return what runs the engine of a server; None in a server that renders prompts alone."""
    models = getattr(serving, "models", None)
    return getattr(serving, "engine_client", None) or getattr(models, "engine_client", None)


def _with_placeholders(serving: Any, request: Any, ids: Sequence[int]) -> list[int]:
    """Return the ids that the engine would be given for a request that `_check_model` has read."""
    client = _engine_client(serving)
    sent = getattr(request, "kv_transfer_params", None) or {}
    if client is None or CARTRIDGE_KEY not in sent or not serves_cartridges(client.vllm_config):
        return list(ids)
    part = library_of(client.vllm_config).find(named_cartridge(sent))
    return placed(part, ids, serving.online_renderer.renderer.get_bos_token_id())


async def _create_tokenize(
    original: Any, self: ServingTokenization, request: Any, *args: Any
) -> Any:
    """Tokenise a request with the placeholders of the cartridge that it names."""
    reply = await original(self, request, *args)
    if isinstance(reply, ErrorResponse):
        return reply
    ids = _with_placeholders(self, request, reply.tokens)
    strings = reply.token_strs
    if strings is not None:
        strings = self.renderer.get_tokenizer().convert_ids_to_tokens(ids)
    return reply.model_copy(update={"tokens": ids, "count": len(ids), "token_strs": strings})


async def _count_tokens(
    original: Any, self: AnthropicServingMessages, *args: Any, **kwargs: Any
) -> Any:
    token = _counting.set(True)
    try:
        return await original(self, *args, **kwargs)
    finally:
        _counting.reset(token)


async def _render_chat_request(original: Any, self: OpenAIServingChat, request: Any) -> Any:
    """Render a chat that is counted with the placeholders of the cartridge that it names."""
    rendered = await original(self, request)
    if isinstance(rendered, ErrorResponse) or not _counting.get():
        return rendered
    conversation, prompts = rendered
    return conversation, [
        {
            **prompt,
            "prompt_token_ids": _with_placeholders(self, request, prompt["prompt_token_ids"]),
        }
        for prompt in prompts
    ]
