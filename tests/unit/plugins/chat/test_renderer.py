"""Contexts in exact tokens: what was sampled stays as it is, under every kind of template."""

import copy
from dataclasses import replace

import pytest
from episode_setup import (
    ASKED,
    HANDBOOK,
    LOST,
    QUESTION,
    RIGHT,
    TEMPLATES,
    conversation,
    episode_of,
    ids_of,
    tokenizer,
    turn_of,
)

from cartridge_forge.plugins.chat.episodes import Turn
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer, messages_read, messages_so_far
from cartridge_forge.plugins.clinic.desk import TOOLS
from cartridge_forge.protocols.errors import DataError

BOS, END, USER, ASSISTANT = 1, 2, 4, 5


@pytest.mark.parametrize("name", TEMPLATES)
def test_head_and_opening_join_to_the_whole_conversation(name: str) -> None:
    talk = conversation(name)
    whole = tokenizer(name).apply_chat_template(
        [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": QUESTION.content}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    assert [*talk.head("desk_01"), *talk.opening("desk_01", (QUESTION,))] == whole
    bare = tokenizer(name).apply_chat_template(
        [{"role": "user", "content": QUESTION.content}], add_generation_prompt=True,
        return_dict=False,
    )  # fmt: skip
    assert len(talk.head(None)) == 1
    assert [*talk.head(None), *talk.opening(None, (QUESTION,))] == bare


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_document_is_tokenized_once_and_the_ids_stay_those_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, words = conversation(name), tokenizer(name)
    questions = [AgentMessage("user", f"what is the {w}?") for w in ("surgeon", "diet", "ward")]
    wholes = [
        words.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in (AgentMessage("system", HANDBOOK), q)],
            add_generation_prompt=True, return_dict=False,
        )
        for q in questions
    ]  # fmt: skip
    read: list[str] = []
    tokenise = talk._tokenise
    monkeypatch.setattr(talk, "_tokenise", lambda text: read.append(text) or tokenise(text))
    found = [[*talk.head("desk_01"), *talk.opening("desk_01", (q,))] for q in questions]
    assert found == wholes
    # The head, the first conversation whole, and what follows its head; then what follows alone.
    assert [HANDBOOK in text for text in read] == [True, True, False, False, False]


def test_without_a_special_token_after_the_head_the_whole_is_read_each_time() -> None:
    """This tokenizer puts a space before a text that it reads by itself, which stands in no whole
    conversation."""
    words = copy.deepcopy(tokenizer())
    words.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    document = "the chart says sodium."
    talk = ChatRenderer(words, {"desk_01": document})
    for question in ("what is it?", "is it high?"):
        whole = words(f"<|bos|>{document}{question}<|end|>", add_special_tokens=False).input_ids
        alone = words(f"{question}<|end|>", add_special_tokens=False).input_ids
        assert whole[-len(alone) :] != alone
        opening = talk.opening("desk_01", (AgentMessage("user", question),))
        assert [*talk.head("desk_01"), *opening] == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_between_special_tokens(name: str) -> None:
    said = (QUESTION, AgentMessage("assistant", "it is xu."), AgentMessage("user", "why?"))
    texts = conversation(name).texts_of(conversation(name).opening("desk_01", said))
    assert texts == [m.content for m in said]


def test_a_turn_by_hand() -> None:
    """<|user|> what is the surgeon ? <|end|> <|assistant|> and so on, one id a word."""
    talk, asked = conversation("with_tool_token"), ids_of("what is the surgeon?")
    tool = tokenizer("with_tool_token").convert_tokens_to_ids("<|tool|>")
    context, branch = talk.context("desk_01", ASKED, ())
    assert (context, branch) == ((USER, *asked, END, ASSISTANT), 0)

    said = (*ids_of("find surgeon in urology."), END)
    note = ids_of("note 17.")
    one = turn_of(said, context, AgentMessage("tool", "note 17."), name="with_tool_token")
    assert talk.context("desk_01", ASKED, (one,)) == (
        (*context, *said, tool, *note, END, ASSISTANT),
        0,
    )
    cut = turn_of(said[:-2], context, AgentMessage("tool", "note 17."), name="with_tool_token")
    assert talk.context("desk_01", ASKED, (cut,)) == (
        (*context, *said[:-2], END, tool, *note, END, ASSISTANT),
        0,
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", [RIGHT, LOST])
def test_messages_give_the_recorded_contexts_again(name: str, said: tuple[str, ...]) -> None:
    episode = episode_of(said, name)
    talk = conversation(name)
    for t, turn in enumerate(episode.turns):
        messages = messages_so_far(episode.opening, episode.turns[:t])
        assert turn.branch == 0
        assert talk.opening("desk_01", messages, episode.opening.tools) == turn.context_ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_was_sampled_is_never_tokenised_again(name: str) -> None:
    """The letters of a word one by one decode to the word, and stay letters."""
    talk = conversation(name)
    letters = tuple(tokenizer(name).convert_tokens_to_ids(["\u0120", *"weber"]))
    assert talk.decode(letters).strip() == "weber"
    assert letters != ids_of("weber", name)
    context, _ = talk.context("desk_01", ASKED, ())
    one = turn_of(letters, context, AgentMessage("tool", "note 17."), name=name)
    after, branch = talk.context("desk_01", ASKED, (one,))
    assert branch == 0
    assert after[: len(context) + len(letters)] == (*context, *letters)


def thinking(name: str, *said: AgentMessage) -> tuple[ChatRenderer, Turn]:
    talk = conversation(name)
    context, _ = talk.context("desk_01", ASKED, ())
    ids = ids_of("<think>urology</think>find surgeon in urology.", name)
    return talk, turn_of((*ids, tokenizer(name).eos_token_id), context, *said, name=name)


def test_a_template_that_forgets_thoughts_branches() -> None:
    talk, one = thinking("forgets", AgentMessage("tool", "note 17."))
    assert "think" in one.text
    after, branch = talk.context("desk_01", ASKED, (one,))
    assert branch == 1
    answered = (QUESTION, AgentMessage("assistant", "find surgeon in urology."))
    assert after == talk.opening("desk_01", (*answered, AgentMessage("tool", "note 17.")))


def test_thoughts_that_are_kept_do_not_branch_until_the_user_speaks() -> None:
    talk, one = thinking("keeps_some", AgentMessage("tool", "note 17."))
    after, branch = talk.context("desk_01", ASKED, (one,))
    assert branch == 0
    assert after == talk.opening("desk_01", messages_so_far(ASKED, (one,)))
    talk, one = thinking("keeps_some", AgentMessage("user", "go on."))
    after, branch = talk.context("desk_01", ASKED, (one,))
    assert branch == 1
    assert "think" not in tokenizer("keeps_some").decode(after)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hint_is_a_users_message_before_the_generation_prompt(name: str) -> None:
    talk = conversation(name)
    opening = talk.opening("desk_01", (QUESTION,))
    hint = AgentMessage("user", "find surgeon first.")
    assert talk.with_hint(opening, hint.content) == talk.opening("desk_01", (QUESTION, hint))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hint_taken_out_again_leaves_the_context(name: str) -> None:
    talk, episode = conversation(name), episode_of(LOST, name)
    prompt = len(talk.opening("desk_01", (QUESTION,))) - len(
        tokenizer(name).apply_chat_template(
            [{"role": "user", "content": QUESTION.content}], return_dict=False
        )[len(talk.head(None)) :]
    )
    for failed in episode.turns:
        context = failed.context_ids
        assert talk.with_hint(context, "") == context
        hinted = talk.with_hint(context, "find surgeon first.")
        assert (*hinted[: len(context) - prompt], *hinted[-prompt:]) == context
        assert len(hinted) > len(context)


def test_what_is_said_is_a_response_with_its_end() -> None:
    for name in TEMPLATES:
        end = tokenizer(name).eos_token_id
        assert conversation(name).saying("answer weber.") == (*ids_of("answer weber.", name), end)


def with_template(template: str) -> ChatRenderer:
    found = tokenizer().__class__.from_pretrained(tokenizer().name_or_path)
    found.chat_template = template
    return ChatRenderer(found, {"desk_01": HANDBOOK})


def test_a_space_that_was_sampled_is_no_closing_token() -> None:
    talk = with_template(
        "{% for m in messages %}{{ m.role + ': ' + m.content + ' \\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    context, _ = talk.context("desk_01", ASKED, ())
    said, rest = ids_of("read "), ids_of(" \ntool: note 17. \nassistant: ")
    assert said[-1] == rest[0]
    one = turn_of(said, context, AgentMessage("tool", "note 17."), name="shipped")
    assert talk.context("desk_01", ASKED, (one,)) == ((*context, *said, *rest), 0)


def test_templates_that_cannot_do_it_say_so() -> None:
    with pytest.raises(DataError, match="tell the agent of its tools in its first message"):
        conversation("keeps_some").opening("desk_01", (QUESTION,), TOOLS)
    strict = with_template(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"refuses a conversation of system, tool: no tools; use"):
        strict.opening("desk_01", (AgentMessage("tool", "x"),))
    counts = with_template(
        "{% for m in messages %}{{ messages|length }}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"reads desk_02, .* documents: desk_01; add it"):
        conversation().opening("desk_02", (QUESTION,))
    with pytest.raises(DataError, match="no hint can be inserted"):
        counts.with_hint((1, 2), "x")
    with pytest.raises(DataError, match="no action of a teacher can become a response"):
        counts.saying("x")
    with pytest.raises(DataError, match=r"must end with the .* prompt \[5\]: got \[4\]"):
        conversation().with_hint((USER, USER), "x")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_new_conversation_branches_and_reads_its_question_alone(name: str) -> None:
    talk = conversation(name)
    context, _ = talk.context("desk_01", ASKED, ())
    said = (*ids_of("answer weber.", name), tokenizer(name).eos_token_id)
    next_question = AgentMessage("user", "what is the sodium?")
    ended = turn_of(said, context, AgentMessage("tool", "right."), next_question, name=name)
    ended = replace(ended, observation=replace(ended.observation, new_conversation=True))
    after, branch = talk.context("desk_01", ASKED, (ended,))
    assert (after, branch) == (talk.opening("desk_01", (next_question,)), 1)
    assert messages_read(ASKED, (ended,)) == (next_question,)
    assert messages_so_far(ASKED, (ended,))[-2:] == ended.observation.messages
    begun = replace(turn_of(said, after, AgentMessage("tool", "note 9."), name=name), branch=1)
    assert messages_so_far(ASKED, (ended, begun)) == messages_read(ASKED, (ended, begun))
    assert [m.content for m in messages_read(ASKED, (ended, begun))][::2] == [
        "what is the sodium?", "note 9."
    ]  # fmt: skip
    assert talk.context("desk_01", ASKED, (ended, begun))[1] == 1
