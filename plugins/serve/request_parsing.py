"""Parse requests: look up names, tokenise texts, enforce limits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import cast

from cartridge_forge.learning.draws import LEAST_MASS
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.wire.anthropic_messages import MessagesRequest
from cartridge_forge.plugins.chat.wire.errors import ApiError, bad_request, refusing
from cartridge_forge.plugins.chat.wire.openai_chat import (
    ChatRequest,
    CompletionRequest,
    ForgeOptions,
    SamplingFields,
)
from cartridge_forge.plugins.chat.wire.openai_responses import ResponsesRequest
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.library.names import (
    AUTO,
    CartridgeName,
    ModelName,
    parse_cartridge,
    parse_model,
)
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.access.keys import Caller
from cartridge_forge.plugins.serve.apis import messages_api, responses_api
from cartridge_forge.plugins.serve.apis.hub import library_name
from cartridge_forge.plugins.serve.apis.tokasaurus import (
    CartridgeChatRequest,
    CartridgeCompletionRequest,
    CartridgeSource,
    FingerprintFields,
)
from cartridge_forge.plugins.serve.apis.translation import ChatFields, renaming
from cartridge_forge.plugins.serve.backend import ServerConfig
from cartridge_forge.plugins.serve.request import (
    ServingRequest,
    StrategyRequest,
    VerifyMode,
    chat_date,
    drawn_seed,
)
from cartridge_forge.plugins.serve.routing import CartridgeRouter, RoutedChoice, WordIndex
from cartridge_forge.plugins.serve.structured.grammars import grammar_of
from cartridge_forge.plugins.serve.structured.tools import ToolOffer, messages_of, offer_of
from cartridge_forge.plugins.serve.tokenization import TokenizedPrompt
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import LogitRules, ResponseGrammar
from cartridge_forge.protocols.step import Sampling

DEFAULT_TOKENS = 16  # of a completion, OpenAI's default
GENERAL = "general"  # the default form of answers
NO_OPTIONS = ForgeOptions.model_validate({})
Entries = tuple[CartridgeVersion, ...]
_MODES: Mapping[bool | str, VerifyMode | None] = {
    True: "exact", False: None, "after": "after", "auto": "auto",
}  # fmt: skip


_BODY_NAMES = {"bias": "logit_bias"}


@dataclass(frozen=True)
class ChatPrompt:
    """Hold a chat as the model reads it, and what its responses must match and may call."""

    prompt: TokenizedPrompt
    messages: tuple[AgentMessage, ...]
    grammar: ResponseGrammar | None
    offer: ToolOffer | None


class RouteNeeded(Exception):
    """Say that the router's choice for `question` is needed; None where the request has none."""

    def __init__(self, question: str | None) -> None:
        super().__init__()
        self.question = question


class RequestParser:
    """Parse one caller's requests for one model. Every method raises ApiError, and one that parses
    a request for `auto` RouteNeeded. The time of a method grows with the length of the text; any
    thread may call it."""

    def __init__(
        self, config: ServerConfig, caller: Caller, grammars: Grammars, index: WordIndex
    ) -> None:
        self._grammars = grammars
        self.model, self._limits = config.model, config.limits
        self._texts, self._library = config.texts, config.library
        self._strategies, self._caller, self._hub = config.strategies, caller, config.hub
        self._verify, self._drafts = config.verify, config.drafts
        permitted = None if caller.cartridges is None else caller.may_use
        self.router = CartridgeRouter(config.library, permitted, index)
        self._route: RoutedChoice | ApiError | None = None

    def route(self, question: str | None) -> RoutedChoice | ApiError:
        """Return the router's choice for a question, or why there is none. Reads the library."""
        try:
            with refusing(404, "model", "not_routed"):
                self.router.require()
            if question is None:
                raise bad_request(
                    f"{AUTO} goes by the words of a question; send one prompt, of text, or name a "
                    "cartridge",
                    "prompt",
                    "not_routed",
                )
            with refusing(400, "model", "not_routed"):
                return self.router.choose(question)
        except ApiError as error:
            return error

    def routed_to(self, route: RoutedChoice | ApiError) -> RequestParser:
        """Return a parser of one request, of the model `auto`, with the router's choice for it."""
        parser = copy(self)
        parser._route = route
        return parser

    def chat(self, body: ChatRequest) -> ServingRequest:
        forge = body.forge or NO_OPTIONS
        name = self._name(body.model, forge)
        question = _question(body)
        entries, routed = self._entries(name, forge, question)
        request = _with_fingerprint(self._chat(body, entries), body)
        request = replace(self._with_strategy(request, name, forge), routed=routed)
        return _with_passages(self._with_verify(request, forge), forge, question)

    def completion(self, body: CompletionRequest) -> ServingRequest:
        forge = body.forge or NO_OPTIONS
        name = self._name(body.model, forge)
        if name.strategy is not None:
            raise bad_request(
                "strategies answer chats: they write prompts of their own; use "
                "/v1/chat/completions",
                "forge.strategy",
            )
        question = _question(body)
        entries, routed = self._entries(name, forge, question)
        request = replace(_with_fingerprint(self._completion(body, entries), body), routed=routed)
        return _with_passages(self._with_verify(request, forge), forge, question)

    def cartridge_chat(self, body: CartridgeChatRequest) -> ServingRequest:
        """Parse a chat of Tokasaurus' route, which ignores the name of the model."""
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise bad_request(
                "one of max_tokens and max_completion_tokens is given, not both", "max_tokens"
            )
        entries, routed = self._sourced(body.cartridges, _question(body))
        return _with_fingerprint(replace(self._chat(body, entries), routed=routed), body)

    def cartridge_completion(self, body: CartridgeCompletionRequest) -> ServingRequest:
        entries, routed = self._sourced(body.cartridges, _question(body))
        return _with_fingerprint(replace(self._completion(body, entries), routed=routed), body)

    def responses(self, body: ResponsesRequest) -> ServingRequest:
        return self._translated("resp", responses_api.chat_of(body), body.stream)

    def messages(self, body: MessagesRequest) -> ServingRequest:
        return self._translated("msg", messages_api.chat_of(body), body.stream)

    def message_tokens(self, body: MessagesRequest) -> int:
        """Return the prompt tokens of Anthropic's messages, as the usage of their reply has
        them."""
        fields = messages_api.chat_of(body)
        with renaming(fields.places):
            chat = fields.chat(stream=False)
            forge = chat.forge or NO_OPTIONS
            entries, _ = self._entries(self._name(chat.model, forge), forge, _question(chat))
            return self._chat_prompt(chat, entries).prompt.counted

    def _translated(self, kind: str, chat: ChatFields, stream: bool | None) -> ServingRequest:
        """Parse another API's request as the chat that it is."""
        with renaming(chat.places):
            request = self.chat(chat.chat(stream))
        return replace(request, id=f"{kind}_{request.id.rpartition('-')[2]}")

    def name_of(self, text: str) -> ModelName:
        """Return the parsed name of a model that is served. Raises ApiError 404. Reads the library
        for the router's model."""
        name = self._served(text)
        if name.cartridge == CartridgeName(AUTO):
            with refusing(404, "model", "not_routed"):
                self.router.require()
        return name

    def _served(self, text: str) -> ModelName:
        with refusing(404, "model", "model_not_found"):
            name = parse_model(text)
            if name.base == AUTO and name.cartridge is None:
                name = ModelName(self.model, CartridgeName(AUTO), name.strategy)
            if name.base != self.model:
                raise DataError(f"the model {name.base} is not served here; ask for {self.model}")
        with refusing(404, "model", "strategy_not_found"):
            if name.strategy not in (None, *self._strategies.names()):
                raise DataError(
                    f"there is no strategy {name.strategy}; GET /v1/models lists those there are"
                )
        if name.cartridge not in (None, CartridgeName(AUTO)):
            self._entry(name.cartridge, "model")
        return name

    def _name(self, model: str, forge: ForgeOptions) -> ModelName:
        name = self._served(model)
        cartridge, strategy = name.cartridge, name.strategy
        if forge.cartridge is not None:
            with refusing(400, "forge.cartridge"):
                cartridge = parse_cartridge(forge.cartridge)
            if name.cartridge not in (None, cartridge):
                raise bad_request(
                    f"model names the cartridge {name.cartridge} and forge.cartridge {cartridge}; "
                    "name one",
                    "forge.cartridge",
                )
        if forge.strategy is not None:
            if forge.strategy not in self._strategies.names():
                raise bad_request(
                    "forge.strategy is none there is; GET /v1/models lists them", "forge.strategy"
                )
            if strategy not in (None, forge.strategy):
                raise bad_request(
                    f"model names the strategy {strategy} and forge.strategy another; name one",
                    "forge.strategy",
                )
            strategy = forge.strategy
        if strategy is None and not forge.options is forge.form is forge.budget is None:
            raise bad_request(
                "forge.options, form and budget belong to a strategy; name one in forge.strategy",
                "forge.strategy",
            )
        return ModelName(name.base, cartridge, strategy)

    def _entries(
        self, name: ModelName, forge: ForgeOptions, question: str | None
    ) -> tuple[Entries, RoutedChoice | None]:
        """Return the named cartridges, or the one that the router chooses for the question."""
        if forge.cartridges is None:
            if name.cartridge == CartridgeName(AUTO):
                return self._routed(question)
            return () if name.cartridge is None else (self._entry(name.cartridge),), None
        if name.cartridge is not None:
            raise bad_request(
                f"the cartridge {name.cartridge} is named beside forge.cartridges; put it into "
                "that list, where its order is told",
                "forge.cartridges",
            )
        with refusing(400, "forge.cartridges"):
            named = [parse_cartridge(text) for text in forge.cartridges]
        return tuple(self._entry(cartridge) for cartridge in named), None

    def _routed(self, question: str | None) -> tuple[Entries, RoutedChoice]:
        """Return the router's choice. Raises RouteNeeded before it is made, ApiError where there is
        none."""
        route = self._route
        if route is None:
            raise RouteNeeded(question)
        if isinstance(route, ApiError):
            raise route
        return (route.entry,), route

    def _entry(self, cartridge: CartridgeName, param: str = "forge.cartridge") -> CartridgeVersion:
        with refusing(404, param, "cartridge_not_found"):
            return self._permitted(cartridge)

    def _permitted(self, cartridge: CartridgeName) -> CartridgeVersion:
        """Return a cartridge that the caller may use. Raises ApiError 403 before it is looked up,
        and DataError."""
        self._caller.check(cartridge.name)
        if self._caller.cartridges is not None and not self._library.versions(cartridge.name):
            raise DataError(f"there is no cartridge {cartridge.name}")  # names no other
        return self._library.get(cartridge)

    def _sourced(
        self, cartridges: Sequence[CartridgeSource] | None, question: str | None
    ) -> tuple[Entries, RoutedChoice | None]:
        names = [library_name(source, self._hub) for source in cartridges or ()]
        if names == [AUTO]:
            return self._routed(question)
        with refusing(400, "cartridges", "cartridge_not_found"):
            return tuple(self._permitted(self._library.named(name)) for name in names), None

    def _chat(self, body: ChatRequest, entries: Entries) -> ServingRequest:
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        limits = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request(
                "max_tokens and max_completion_tokens are one limit and differ; give one",
                "max_tokens",
            )
        chat = self._chat_prompt(body, entries)
        return self._parsed(
            "chatcmpl", body, entries, (chat.prompt,), next(iter(limits), None),
            (body.top_logprobs or 0) if body.logprobs else None, chat.messages, chat.grammar,
            chat.offer,
        )  # fmt: skip

    def _chat_prompt(self, body: ChatRequest, entries: Entries) -> ChatPrompt:
        """Return a chat as the model reads it."""
        offer = offer_of(body, self._texts.calls, self._grammars)
        grammar = grammar_of(body, self._grammars)
        if offer is not None and grammar is not None:
            raise bad_request(
                "response_format and structured_outputs leave no room for calls of tools; give "
                'tool_choice: "none", or leave one out',
                "tools",
            )
        self._require_unread_variables(body)
        messages = messages_of(body.messages, self._texts.calls)
        self._require_short(sum(self._texts.fewest(m.content) for m in messages), "messages")
        tools = offer.tools if offer else ()
        prompt = self._texts.chat(messages, bool(entries), tools, chat_date(entries))
        return ChatPrompt(prompt, messages, offer.grammar if offer else grammar, offer)

    def _require_unread_variables(self, body: ChatRequest) -> None:
        """Raise ApiError for a variable that the chat template reads. Those that it does not read
        have no effect, as in vLLM."""
        variables = {
            f"chat_template_kwargs.{name}": name for name in body.chat_template_kwargs or ()
        }
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = "reasoning_effort"
        for param, name in variables.items():
            if self._texts.template_mentions(name):
                raise bad_request(
                    f"{param} is not served: the chat template of {self.model} reads it, and a "
                    "chat is rendered as the cartridges were trained, with the template's own "
                    "default; leave it out",
                    param,
                    "unsupported",
                )

    def _rules(self, body: SamplingFields) -> LogitRules | None:
        """Return the changes of logits that a body asks for, None for none."""
        bias = dict[int, float]()
        for key, number in (body.logit_bias or {}).items():
            is_id = key.isascii() and key.isdecimal() and len(key) < 10
            if not is_id or int(key) >= self._texts.vocabulary:
                raise bad_request(
                    f"logit_bias has the key {key[:20]!r}; its keys are token ids as text, "
                    f'"0" to "{self._texts.vocabulary - 1}"',
                    "logit_bias",
                )
            if number:
                bias[int(key)] = min(100.0, max(-100.0, number))  # as vLLM does
        rules = LogitRules(
            tuple(bias.items()),
            1.0 if body.repetition_penalty is None else body.repetition_penalty,
            body.frequency_penalty or 0.0,
            body.presence_penalty or 0.0,
            body.min_p or 0.0,
        )
        return None if rules == LogitRules() else rules

    def _stop_ids(self, body: SamplingFields) -> tuple[int, ...]:
        stop_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
        for token in stop_ids:
            if token >= self._texts.vocabulary:
                raise bad_request(
                    f"stop_token_ids has {token}, and this model has ids from 0 to "
                    f"{self._texts.vocabulary - 1}",
                    "stop_token_ids",
                )
        return stop_ids

    def _completion(self, body: CompletionRequest, entries: Entries) -> ServingRequest:
        raw = body.prompt
        one = isinstance(raw, str) or isinstance(raw[0], int)
        prompts = cast(Sequence[str | Sequence[int]], [raw] if one else raw)
        if len(prompts) > self._limits.max_choices:
            raise self._too_many()
        for prompt in prompts:
            fewest = self._texts.fewest(prompt) if isinstance(prompt, str) else len(prompt)
            self._require_short(fewest, "prompt")
        echo = bool(body.echo)
        if echo and body.stream:
            raise bad_request("echo is not served with stream; leave one of them out", "echo")
        if body.max_tokens == 0 and not echo:
            raise bad_request("max_tokens 0 needs echo: true; else ask for a token", "max_tokens")
        read = tuple(self._texts.prompt(p, bool(entries), "prompt", echo) for p in prompts)
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        grammar = grammar_of(body, self._grammars)
        return self._parsed("cmpl", body, entries, read, most, body.logprobs, grammar=grammar)

    def _parsed(
        self,
        kind: str,
        body: SamplingFields,
        entries: Entries,
        prompts: tuple[TokenizedPrompt, ...],
        most: int | None,
        top_logprobs: int | None,
        messages: tuple[AgentMessage, ...] = (),
        grammar: ResponseGrammar | None = None,
        offer: ToolOffer | None = None,
    ) -> ServingRequest:
        n = body.n or 1
        if len(prompts) * n > self._limits.max_choices:
            raise self._too_many()
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        request_id = f"{kind}-{secrets.token_hex(12)}"
        top_p = 1.0 if body.top_p is None else max(body.top_p, LEAST_MASS)
        stop = [] if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
        return ServingRequest(
            id=request_id,
            model=body.model,
            prompts=prompts,
            n=n,
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=top_p,
                top_k=max(0, body.top_k or 0),
                max_tokens=self._room(prompts, entries, most),
            ),
            seed=drawn_seed(request_id) if body.seed is None else body.seed,
            stops=tuple(dict.fromkeys(stop)),
            top_logprobs=top_logprobs,
            stream=bool(body.stream),
            entries=entries,
            messages=messages,
            grammar=grammar,
            tools=offer,
            rules=self._rules(body),
            stop_ids=self._stop_ids(body),
        )

    def _room(
        self,
        prompts: Sequence[TokenizedPrompt],
        entries: Sequence[CartridgeVersion],
        most: int | None,
    ) -> int:
        """Return the most tokens of a response. Raises ApiError where the context has no room."""
        limits = self._limits
        cartridge_tokens = sum(entry.manifest.tokens for entry in entries)
        read = max(p.counted for p in prompts) + cartridge_tokens
        room = limits.context - read
        wanted = most or 1
        if wanted > room:
            of_cartridge = f", {cartridge_tokens} of them of the cartridge" if entries else ""
            raise bad_request(
                f"the model has {limits.context} positions: {read} are read{of_cartridge}, and "
                f"max_tokens asks for {wanted}; shorten the prompt or lower max_tokens",
                "max_tokens" if room > 0 else "messages" if most is None else "prompt",
                "context_length_exceeded",
            )
        if wanted > limits.max_tokens:
            raise bad_request(
                f"a response may have {limits.max_tokens} tokens here; lower max_tokens",
                "max_tokens",
            )
        return min(room, limits.max_tokens) if most is None else most

    def _require_short(self, fewest: int, param: str) -> None:
        """Raise ApiError for a text that cannot fit. Without it 4 MB are tokenised for seconds, in
        the one thread that reads requests."""
        if fewest > self._limits.context:
            raise bad_request(
                f"the model has {self._limits.context} positions, and the text has at least "
                f"{fewest} tokens; shorten it",
                param,
                "context_length_exceeded",
            )

    def _with_strategy(
        self, request: ServingRequest, name: ModelName, forge: ForgeOptions
    ) -> ServingRequest:
        """Attach the strategy. Raises for fields that a strategy, with its one answer, cannot
        serve."""
        if name.strategy is None:
            return request
        for what, value in (
            ("n", request.n > 1),
            ("stop", bool(request.stops)),
            ("top_k", request.sampling.top_k > 0),
            ("stop_token_ids", bool(request.stop_ids)),
            *((_BODY_NAMES.get(n, n), True) for n in _changes(request.rules)),
            ("logprobs", request.top_logprobs is not None),
            ("tools", request.tools is not None),
            ("response_format", request.grammar is not None),
        ):
            if value:
                raise bad_request(
                    f"{what} is not served with a strategy, which gives one answer and says in "
                    "`forge` how it came; leave it out",
                    what,
                )
        chosen = StrategyRequest(
            name.strategy, forge.options or {}, forge.form or GENERAL, forge.budget
        )
        return replace(request, strategy=chosen)

    def _with_verify(self, request: ServingRequest, forge: ForgeOptions) -> ServingRequest:
        """Attach how the document verifies. Raises for requests that it cannot verify; where the
        request does not ask for it these are served as without it."""
        explicit = forge.verify is not None
        mode = _MODES[forge.verify if forge.verify is not None else self._verify.mode]
        why = ""
        if mode is None:
            return request
        if len(request.entries) != 1:
            why = (
                "needs one cartridge, whose document verifies, and the request names "
                f"{len(request.entries) or 'none'}; name one"
            )
        elif request.strategy is not None:
            why = "is not served with a strategy, which writes prompts of its own; leave one out"
        elif request.echo:
            why = "is not served with echo; leave one out"
        elif mode != "after" and (request.tools is not None or request.grammar is not None):
            why = "true and auto are not served with tools or a response_format; ask for after"
        elif mode != "after" and request.rules is not None:
            changed = " and ".join(_BODY_NAMES.get(n, n) for n in _changes(request.rules))
            why = f"true and auto are not served with {changed}; ask for after"
        elif mode == "exact" and not self._drafts:
            why = (
                "true needs the embedded engine, which verifies drafts, and generator.backend is "
                "another; ask for auto (the document's answer without a draft) or after"
            )
        if why and explicit:
            raise bad_request(f"forge.verify {why}", "forge.verify", "not_verifiable")
        return request if why else replace(request, verify=mode)

    def _too_many(self) -> ApiError:
        return bad_request(
            f"one request may ask for {self._limits.max_choices} responses, prompts times n; send "
            "several requests",
            "n",
        )


def _changes(rules: LogitRules | None) -> list[str]:
    """Return the fields in which rules of logits differ from none."""
    none = vars(LogitRules())
    return [name for name, value in vars(rules or LogitRules()).items() if value != none[name]]


def _with_fingerprint(request: ServingRequest, body: SamplingFields) -> ServingRequest:
    """Return the request with log-probabilities where the fingerprint is to hold them. Raises
    ApiError for a stream, which has no fingerprint."""
    if not (isinstance(body, FingerprintFields) and body.logprobs_in_fingerprint):
        return request
    if body.stream:
        raise bad_request(
            "logprobs_in_fingerprint is of whole replies; leave stream out, or ask for logprobs",
            "logprobs_in_fingerprint",
        )
    return request if request.top_logprobs is not None else replace(request, top_logprobs=0)


def _with_passages(
    request: ServingRequest, forge: ForgeOptions, question: str | None
) -> ServingRequest:
    """Attach the question whose responses are told with passages, where that is asked for. Raises
    for requests that have no document, or no question."""
    if not forge.passages:
        return request
    if len(request.entries) != 1:
        why = (
            "needs one cartridge, whose document has the passages, and the request names "
            f"{len(request.entries) or 'none'}; name one"
        )
    elif request.strategy is not None or request.echo:
        why = "is not served with a strategy or with echo; leave one out"
    elif question is None:
        why = "goes by the words of a question; send one prompt, of text"
    else:
        return replace(request, supported=question)
    raise bad_request(f"forge.passages {why}", "forge.passages", "no_passages")


def _question(body: ChatRequest | CompletionRequest) -> str | None:
    """Return the words to route by: the last user message, or the one prompt of text."""
    if isinstance(body, ChatRequest):
        return next((m.text for m in reversed(body.messages) if m.role == "user"), "")
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return prompts[0] if len(prompts) == 1 and isinstance(prompts[0], str) else None
