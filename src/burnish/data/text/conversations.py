"""Columns of prompts with completions, and of messages between user and assistant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from burnish.data.text.chat_template import Conversation, TokenizerSettings
from burnish.data.text.settings import ALL, ASSISTANT, COMPLETION, TRAIN_ON
from burnish.data.text.tokenizer import MarkedText
from burnish.errors import ConfigurationError, DataError
from burnish.untrusted_files import read_json

PROMPT, ANSWER, MESSAGES, TOOLS = "prompt", "completion", "messages", "tools"
ROLE, CONTENT = "role", "content"
FORM = f"a list of objects with '{ROLE}' and '{CONTENT}'"
Pair = tuple[str, str]


def rows_as_columns(rows: Sequence[Any], source: str) -> Mapping[str, Sequence[Any]] | None:
    """Return the columns of a list of objects, by the first one's keys, or of a list of conversations.

    Args:
        rows: samples.
        source: name for errors.

    Returns:
        The columns; None if the rows are neither.

    Raises:
        DataError: the rows are the messages of a single conversation, or only some are objects.
    """
    if not rows:
        return None
    if all(isinstance(row, list) and row and all(isinstance(each, Mapping) for each in row) for row in rows):
        return {MESSAGES: rows}
    if not isinstance(rows[0], Mapping):
        return None
    wrong = next((number for number, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise DataError(f"{source}: sample {wrong} is a {type(rows[wrong]).__name__}, and the first is an object: give all alike")
    if {ROLE, CONTENT} <= rows[0].keys() and not {MESSAGES, PROMPT, "text"} & rows[0].keys():
        raise DataError(f"{source}: these are the messages of one conversation: give a list of conversations, [[...], ...]")
    return {name: [row.get(name) for row in rows] for name in rows[0]}


def answer_columns(names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns with answers: messages, or prompt and completion; empty if there are none."""
    known = {*names}
    if MESSAGES in known:
        return (MESSAGES,)
    return (PROMPT, ANSWER) if {PROMPT, ANSWER} <= known else ()


def read_answers(
    columns: Mapping[str, Sequence[Any]], used: Sequence[str], source: str, places: Sequence[str]
) -> list[Pair] | list[Conversation]:
    """Return the contents of columns with answers: pairs of texts, or conversations.

    Args:
        columns: columns by name.
        used: names of the columns with answers.
        source: name for errors.
        places: row names, for errors.

    Raises:
        DataError: a value is neither text nor a list of messages.
    """
    rows = [[_parsed(value) for value in columns[name]] for name in used]
    tools = [_parsed(value) for value in columns[TOOLS]] if TOOLS in columns else [None] * len(rows[0])
    if len(used) == 1:
        return [
            Conversation(_messages(row, used[0], source, place), tools=tool)
            for row, tool, place in zip(rows[0], tools, places, strict=True)
        ]
    pairs, conversations = [], []
    for prompt, answer, tool, place in zip(*rows, tools, places, strict=True):
        if isinstance(prompt, str) and isinstance(answer, str):
            pairs.append((prompt, answer))
        elif isinstance(prompt, str) or isinstance(answer, str):
            raise DataError(f"{source}, {place}: one of prompt and completion is a text, and the other is not: give both alike")
        else:
            before = _messages(prompt, used[0], source, place)
            conversations.append(Conversation([*before, *_messages(answer, used[1], source, place)], len(before), tool))
    if pairs and conversations:
        raise DataError(f"{source}: some prompts are texts, and others are messages: give all alike")
    return pairs or conversations


def _parsed(value: Any) -> Any:
    """Parse a list of messages that a table holds as JSON; other values are unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def _messages(value: Any, column: str, source: str, place: str) -> list[dict[str, Any]]:
    if isinstance(value, Mapping) and all(isinstance(each, list) for each in value.values()):  # older datasets: lists by key
        value = [dict(zip(value, each, strict=False)) for each in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        shown = "empty" if isinstance(value, list) else f"a {type(value).__name__}"
        raise DataError(f"{source}, {place}: '{column}' is {shown}, and {FORM} is expected")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get(ROLE), str):
            has = f"has {', '.join(map(repr, message))}" if isinstance(message, Mapping) else f"is a {type(message).__name__}"
            raise DataError(
                f"{source}, {place}: message {number} of '{column}' {has}, and {FORM} is expected; rename its keys if they are "
                "called otherwise"
            )
        content = message.get(CONTENT)
        if not isinstance(content, str | list | None):
            kind = type(content).__name__
            raise DataError(f"{source}, {place}: the content of message {number} is a {kind}, and a text is expected")
    return [dict(message) for message in value]


def settle_train_on(form: str, asked: str | None, recorded: str | None, source: str) -> str:
    """Return the kind of tokens that count in the loss.

    Args:
        form: kind of texts: ``text``, ``pairs``, ``messages``, ``dialogues`` (prompts and completions of messages) or ``tokens``
            (with labels that define it).
        asked: requested kind, or None.
        recorded: kind in the model's training, used if possible.
        source: name for errors.

    Raises:
        ConfigurationError: the data do not allow the requested kind.
    """
    two = (COMPLETION, ALL)
    possible = {"text": (ALL,), "pairs": two, "tokens": two, "messages": (ASSISTANT, COMPLETION, ALL)}.get(form, TRAIN_ON)
    if asked is not None and asked not in possible:
        held = "plain texts, all of whose tokens count" if form == "text" else "texts of a prompt and a completion"
        remedy = (
            "give columns prompt and completion, or messages, or leave it out"
            if form == "text"
            else f"give {COMPLETION!r} or {ALL!r}"
        )
        raise ConfigurationError(f"{source}: train_on={asked!r} (--train-on), and the data hold {held}: {remedy}")
    return asked or (recorded if recorded in possible else possible[0])


def marked_pairs(pairs: Sequence[Pair], train_on: str) -> list[MarkedText]:
    """Return prompts and completions as texts, in which the completion counts, or everything."""
    return [
        MarkedText(prompt + answer, [(0 if train_on == ALL else len(prompt), len(prompt) + len(answer))])
        for prompt, answer in pairs
    ]


def marked_conversations(
    conversations: Sequence[Conversation], train_on: str, settings: TokenizerSettings, source: str
) -> list[MarkedText]:
    """Return conversations rendered by the chat template, with the answers that count.

    Raises:
        DataError: the template fails, or does not mark the answers.
    """
    is_of_pairs = conversations[0].prompt is not None
    whole = train_on == ALL
    asked = [Conversation(each.messages, None, each.tools) for each in conversations] if whole else conversations
    answers = train_on == ASSISTANT or (train_on == COMPLETION and not is_of_pairs)
    rendered = settings.rendered(asked, answers and not whole, source)
    last = train_on == COMPLETION and not is_of_pairs
    return [MarkedText(text, [(begin, end) for begin, end in (spans[-1:] if last else spans)], True) for text, spans in rendered]
