"""Choose the passages of a text that a question is asked over, in place of a cartridge as long.

    text -> passages of half of P tokens, which overlap by half -> ranked by BM25 or embeddings
    -> PASSAGES that do not overlap, in the text's order

With their place in the chat template they take at most P tokens, those of a cartridge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.retrieval import Bm25Router
from cartridge_forge.plugins.documents.study.embeddings import EmbeddingRanker, embedder
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import CartridgeLayout
from cartridge_forge.protocols.step import PrefixRef

Retriever = Literal["bm25", "embeddings"]
PASSAGES = 2
LEAST_TOKENS = 2
BETWEEN = "\n\n"
NO_PREFIX = PrefixRef("document/", 0)  # a prompt that holds its passages itself
RETRIEVED = "retrieved"  # the arm over passages alone
RETRIEVED_CARTRIDGE = "retrieved_cartridge"  # over the cartridge, with passages in the question


def _head(conversation: ChatRenderer, passages: str) -> tuple[int, ...]:
    return conversation.over({RETRIEVED: passages}).head(RETRIEVED)


def passage_tokens(conversation: ChatRenderer, tokens: int) -> int:
    """Return the tokens of each of PASSAGES that stand in the chat template in place of a cartridge
    of `tokens` tokens; under LEAST_TOKENS there is no room for them."""
    return (tokens - len(_head(conversation, "x")) + 1) // PASSAGES


def require_room(conversation: ChatRenderer, tokens: int) -> None:
    """Raise DataError where so few tokens hold the chat template and no passage."""
    if passage_tokens(conversation, tokens) < LEAST_TOKENS:
        raise DataError(
            f"{PASSAGES} passages and their place in the chat template do not fit into {tokens} "
            f"tokens: raise cartridge.tokens, or leave out the arms {RETRIEVED} and "
            f"{RETRIEVED_CARTRIDGE}"
        )


class PassageIndex:
    """Rank the passages of texts that are read as one, for prompts of at most `tokens` tokens."""

    def __init__(
        self, texts: Sequence[str], tokenizer: Any, conversation: ChatRenderer, tokens: int,
        retriever: Retriever = "bm25",
    ) -> None:  # fmt: skip
        """Raise DataError as `require_room` does, RunError where `embeddings` are not installed."""
        require_room(conversation, tokens)
        self._conversation, self._tokenizer, self._tokens = conversation, tokenizer, tokens
        self._size = passage_tokens(conversation, tokens)
        self._ids: list[int] = []
        for text in texts:
            self._ids += tokenizer(text + BETWEEN, add_special_tokens=False).input_ids
        step = max(1, self._size // 2)
        starts = range(0, max(1, len(self._ids) - step), step)
        passages = {f"{at:09d}": self._text(at, 0) for at in starts}
        self._ranker = (
            EmbeddingRanker(passages)
            if retriever == "embeddings"
            else Bm25Router.of_texts(passages)
        )

    def head(self, passages: str) -> tuple[int, ...]:
        """Return the ids of a conversation's head with these passages as its document."""
        return _head(self._conversation, passages)

    def best(self, question: str) -> str:
        """Return the passages for a question; the text's first ones where BM25 finds no word of
        it. Their head has at most `tokens` tokens."""
        names = [name for name, _ in self._ranker.top(question, len(self._ranker.names))]
        chosen: list[int] = []
        for at in (int(name) for name in (names or self._ranker.names)):
            if len(chosen) < PASSAGES and all(abs(at - other) >= self._size for other in chosen):
                chosen.append(at)
        shorter = 0  # a passage's text may have other tokens than it was cut from
        while len(self.head(words := self._joined(chosen, shorter))) > self._tokens:
            shorter += 1
        return words

    def _joined(self, starts: Sequence[int], shorter: int) -> str:
        return BETWEEN.join(self._text(at, shorter) for at in sorted(starts))

    def _text(self, at: int, shorter: int) -> str:
        text: str = self._tokenizer.decode(self._ids[at : at + self._size - shorter])
        return text.strip()


class PassagePrompts:
    """Make the prompts of the arms RETRIEVED and RETRIEVED_CARTRIDGE of a run."""

    def __init__(
        self, layout: CartridgeLayout, texts: Mapping[str, str], tokenizer: Any,
        conversation: ChatRenderer, tokens: int, arms: Collection[str],
        retriever: Retriever = "bm25",
    ) -> None:  # fmt: skip
        """Take the contexts' texts, of which each cartridge has those of its `layout`, and the
        tokens P of a cartridge. Raises DataError where one of the `arms` has no room, RunError
        where one needs `embeddings` that are not installed."""
        if not {RETRIEVED, RETRIEVED_CARTRIDGE}.isdisjoint(arms):
            require_room(conversation, tokens)
            if retriever == "embeddings":
                embedder()
        self._layout, self._texts, self._tokenizer = layout, texts, tokenizer
        self._conversation, self._tokens, self._retriever = conversation, tokens, retriever
        self._indices: dict[str, PassageIndex] = {}  # by cartridge

    def _index(self, cartridge: str) -> PassageIndex:
        if cartridge not in self._indices:
            texts = [self._texts[context] for context in self._layout.contexts[cartridge]]
            self._indices[cartridge] = PassageIndex(
                texts, self._tokenizer, self._conversation, self._tokens, self._retriever
            )
        return self._indices[cartridge]

    def as_document(
        self, cartridge: str, messages: Sequence[AgentMessage]
    ) -> tuple[tuple[int, ...], PrefixRef]:
        """Return a whole prompt with passages for its last turn where the document would stand, and
        that nothing stands before it."""
        index = self._index(cartridge)
        words = index.best(messages[-1].content)
        conversation = self._conversation.over({RETRIEVED: words})
        return (*index.head(words), *conversation.opening(RETRIEVED, messages)), NO_PREFIX

    def before_question(
        self, cartridge: str, context: str, messages: Sequence[AgentMessage]
    ) -> tuple[int, ...]:
        """Return a prompt over a cartridge with passages before the words of its last turn."""
        *earlier, last = messages
        words = self._index(cartridge).best(last.content)
        last = replace(last, content=f"{words}{BETWEEN}{last.content}")
        return self._conversation.opening(context, (*earlier, last))
