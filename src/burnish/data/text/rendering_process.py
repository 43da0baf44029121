"""A process that renders chat templates: JSON in, texts and spans of answers out.

Templates come with models from strangers, so jinja2's sandbox renders them in a process with limited memory and time: the sandbox
restricts calls, but not memory. This module imports nothing of burnish, for a fast start.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Span = tuple[int, int]
ASSISTANT = "assistant"
BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around a generation block: characters that Unicode reserves as noncharacters."""
UNSTABLE = "unstable"
"""Fault of a template that changes a message depending on later ones."""


class TooLong(ValueError):
    """A rendered conversation has too many characters."""


class Unstable(Exception):
    """The template renders the first messages differently if others follow."""


class GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}``, the block with the assistant's answer.

    Attributes:
        are_marked: True to mark the blocks in the output.
    """

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.are_marked = False

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def _block(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}" if self.are_marked else caller()


class Template:
    """A compiled chat template.

    Args:
        source: Jinja text.
        tokens: special tokens by role, such as ``eos_token``.

    Raises:
        jinja2.TemplateError: invalid source.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._blocks: Any = environment.extensions[GenerationBlocks.identifier]
        self.has_blocks = any(True for _ in environment.parse(source).find_all(nodes.ExtensionAttribute))
        self._template = environment.from_string(source)
        self._tokens = tokens

    def render(self, messages: Sequence[Any], tools: Any, most: int, prompt: bool = False, marked: bool = False) -> str:
        """Return a conversation as text.

        Args:
            messages: the messages.
            tools: tools for the assistant, or None.
            most: most characters.
            prompt: True to end with the start of the assistant's answer.
            marked: True to put ``BEGIN`` and ``END`` around generation blocks.

        Raises:
            Exception: any error in the template.
        """
        self._blocks.are_marked = marked
        parts, length = [], 0
        for part in self._template.generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens
        ):
            parts.append(part)
            length += len(part)
            if length > most:
                raise TooLong(f"a conversation becomes more than {most:,} characters")
        return "".join(parts)


def answers_of(template: Template, messages: Sequence[Any], tools: Any, most: int) -> tuple[str, list[Span]]:
    """Return a conversation as text, with the spans of the assistant's answers.

    Raises:
        Unstable: there are no generation blocks, and later messages change earlier ones.
        Exception: any error in the template.
    """
    text = template.render(messages, tools, most)
    if template.has_blocks:
        return text, _marked(template.render(messages, tools, most + 2 * len(text), marked=True), text)
    spans = []
    for number, message in enumerate(messages):
        if message.get("role") == ASSISTANT:
            begin = prefix_of(template, messages[:number], tools, text, prompt=True)
            spans.append((begin, prefix_of(template, messages[: number + 1], tools, text)))
    return text, spans


def prefix_of(template: Template, messages: Sequence[Any], tools: Any, text: str, prompt: bool = False) -> int:
    """Return the number of characters that the first messages take in a text.

    Args:
        template: the template.
        messages: the first messages; 0 characters if empty.
        tools: see ``Template.render``.
        text: the whole conversation.
        prompt: True to include the start of the assistant's answer.

    Raises:
        Unstable: the text does not start with them.
    """
    if not messages:
        return 0
    try:
        prefix = template.render(messages, tools, len(text) + 1, prompt)
    except TooLong as error:
        raise Unstable from error
    if not text.startswith(prefix):
        raise Unstable
    return len(prefix)


def _marked(marked: str, text: str) -> list[Span]:
    """Return the spans of generation blocks in a text, from the same text with marks."""
    spans: list[Span] = []
    parts: list[str] = []
    begin, place = None, 0
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN and begin is None:
            begin = place
        elif part == END and begin is not None:
            spans.append((begin, place))
            begin = None
        else:
            parts.append(part)
            place += len(part)
    if begin is not None or "".join(parts) != text:
        raise ValueError("what stands between {% generation %} and {% endgeneration %} is changed after it is written")
    return spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def render_all(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return all conversations as texts with spans, or the first fault.

    Args:
        asked: ``template``, ``tokens``, ``conversations``, ``answers`` (True if only the assistant's answers count) and ``most``,
            the most characters of a short conversation. A conversation has ``messages``, ``tools`` and ``prompt``, the number of
            messages before those that count, or None.

    Returns:
        ``{"texts": [[text, spans], ...]}``, or ``{"fault": message, "kind": name, "conversation": number or None}``.
    """
    number = None
    texts: list[tuple[str, list[Span]]] = []
    try:
        template = Template(asked["template"], asked["tokens"])
        for conversation in asked["conversations"]:
            number = len(texts)
            texts.append(_rendered(template, conversation, asked["answers"], asked["most"] + 16 * len(json.dumps(conversation))))
    except Exception as error:  # a template can raise any exception
        kind = UNSTABLE if isinstance(error, Unstable) else type(error).__name__
        return {"fault": str(error), "kind": kind, "conversation": number}
    return {"texts": texts}


def _rendered(template: Template, conversation: Mapping[str, Any], answers: bool, most: int) -> tuple[str, list[Span]]:
    messages, tools, first = (conversation[name] for name in ("messages", "tools", "prompt"))
    if answers:
        text, spans = answers_of(template, messages, tools, most)
    else:
        text = template.render(messages, tools, most)
        spans = [(0, len(text))]
    if first is None:
        return text, spans
    begin = prefix_of(template, messages[:first], tools, text, prompt=True)
    return text, [(max(begin, start), stop) for start, stop in spans if stop > begin]


def _limit_memory(size: int) -> None:
    """Limit this process to ``size`` bytes above its present memory, if the system supports that."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + size,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        pass


def main() -> None:
    """Answer the request on standard input."""
    asked = json.loads(sys.stdin.buffer.read())
    _limit_memory(asked["memory"])
    answer = json.dumps(render_all(asked))
    sys.stdout.buffer.write(answer.encode())


if __name__ == "__main__":
    main()
