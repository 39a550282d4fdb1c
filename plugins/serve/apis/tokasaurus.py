"""Define Tokasaurus' cartridge requests, and the fields that its clients read of a reply.

Verified against public code:
- requests: `Cartridge`, `CartridgeCompletionsRequest` and `CartridgeChatCompletionRequest` in
  tokasaurus/server/types.py of ScalingIntelligence/tokasaurus, branch geoff/cartridges (commit
  845f115, 2025-08-25). Its server takes any `model` name ("default", "todo"), requires max_tokens
  or max_completion_tokens of a chat but not both, and refuses with HTTP 400;
- replies: tokasaurus/server/utils.py there. `system_fingerprint` is JSON text with
  `completion_ids`, a list of ids for each choice with the end token. Where
  `logprobs_in_fingerprint` is set it has `packed_chosen_logprobs` (base64 of float32) and, where
  top-k was requested too, `packed_topk_indices` (int32) and `packed_topk_logprobs` (float32), row
  by row; all three are null otherwise. `usage.prompt_tokens` counts a prompt once for each choice;
- the routes: its server has /custom/cartridge/...; the example in the README of
  HazyResearch/cartridges posts to /v1/cartridge/...: both are served;
- the client: cartridges/clients/tokasaurus.py of HazyResearch/cartridges expects one model in
  /v1/models, where cartridges are listed here too; it takes `completion_ids[0]` and decodes the
  packed arrays. It posts batches to another route, which replies with a pickle: that route is not
  served here.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from cartridge_forge.plugins.chat.wire.openai_chat import (
    MAX_COMPOSED,
    ChatRequest,
    CompletionRequest,
)
from cartridge_forge.plugins.chat.wire.parts import RequestPart
from cartridge_forge.protocols.step import Completion


class CartridgeSource(RequestPart):
    id: str = Field(min_length=1, max_length=1024, description="a name of the library, or its path")
    source: Literal["wandb", "local", "huggingface"] = "wandb"
    force_redownload: bool = Field(
        default=False,
        description="of huggingface: look for a newer commit; others are always the newest version",
    )


class FingerprintFields(RequestPart):
    """Read the fields that Tokasaurus adds to all of its routes."""

    logprobs_in_fingerprint: bool = Field(
        default=False, description="log-probabilities as packed arrays in `system_fingerprint`"
    )


class TextCompletionRequest(CompletionRequest, FingerprintFields):
    """Read a body of `/v1/completions`."""


class ChatCompletionRequest(ChatRequest, FingerprintFields):
    """Read a body of `/v1/chat/completions`."""

    apply_chat_template_overrides: dict[Literal["enable_thinking"], bool] | None = Field(
        default=None, description="of no effect: taken for templates that do not think"
    )


class CartridgeFields(RequestPart):
    """Read the field that Tokasaurus' cartridge routes add to the others."""

    cartridges: list[CartridgeSource] | None = Field(
        None, max_length=MAX_COMPOSED, description="composed in this order, each behind the last"
    )


class CartridgeCompletionRequest(TextCompletionRequest, CartridgeFields):
    """Read a body of `/v1/cartridge/completions`: a prompt, and cartridges by their source."""


class CartridgeChatRequest(ChatCompletionRequest, CartridgeFields):
    """Read a body of `/v1/cartridge/chat/completions`: a chat, and cartridges by their source."""


def fingerprint(completions: Sequence[Completion], packed: bool, top: int | None) -> str:
    """Return `system_fingerprint`: exact ids, and with `packed` their log-probabilities."""
    chosen = top_ids = top_logprobs = None
    if packed:
        chosen = [_pack("f", c.logprobs) for c in completions]
        if top:
            rows = [[pair for row in c.top_logprobs for pair in row[:top]] for c in completions]
            top_ids = [_pack("i", [i for i, _ in row]) for row in rows]
            top_logprobs = [_pack("f", [p for _, p in row]) for row in rows]
    return json.dumps(
        {
            "completion_ids": [list(c.token_ids) for c in completions],
            "packed_chosen_logprobs": chosen,
            "packed_topk_indices": top_ids,
            "packed_topk_logprobs": top_logprobs,
        }
    )


def _pack(kind: str, values: Sequence[float] | Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode("ascii")
