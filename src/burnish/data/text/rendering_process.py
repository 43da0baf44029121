"""A process that renders chat templates: a template and conversations as JSON go in, texts and the places of answers come out.

A template comes with a model from a stranger. So it is rendered in the sandbox of jinja2, and in a process of its own whose
memory and time are limited: a sandbox keeps a template from calling what it should not, but not from filling the memory.
The file imports nothing of burnish, so that the process starts at once.
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
"""What surrounds the body of a generation block while it is rendered: characters that Unicode keeps free of any text."""
UNSTABLE = "unstable"
"""The kind of fault of a template that writes a message otherwise once others follow it."""


class TooLong(ValueError):
    """A conversation becomes more characters than it may."""


class Unstable(Exception):
    """The template writes the beginning of a conversation otherwise than that beginning alone."""


class GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}``: what stands between is the answer of the assistant.

    Attributes:
        are_marked: True while the places of the blocks are wanted.
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
        source: in Jinja.
        tokens: special tokens by role, such as ``eos_token``.

    Raises:
        jinja2.TemplateError: the source is no template.
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
            messages: of the conversation.
            tools: that the assistant may call; None without any.
            most: how many characters there may be.
            prompt: True to end where the assistant begins its answer.
            marked: True to surround the body of each generation block with ``BEGIN`` and ``END``.

        Raises:
            Exception: whatever the template does wrong.
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
    """Return a conversation as text, and where in it the answers of the assistant are.

    Raises:
        Unstable: the template has no generation blocks, and writes messages otherwise once others follow them.
        Exception: whatever the template does wrong.
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
    """Return how many characters of a text its first messages are.

    Args:
        template: the template.
        messages: the first ones; without any, nothing is before the prompt of the assistant.
        tools: as ``Template.render`` takes them.
        text: of the whole conversation.
        prompt: True for the place where the assistant begins its answer.

    Raises:
        Unstable: the text does not begin with them.
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
    """Return the places of generation blocks in a text, given the same text with marks around them."""
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
    """Return the texts of all conversations with the places of what counts, or what is wrong with one of them.

    Args:
        asked: ``template``, ``tokens``, ``conversations``, ``answers`` (True if the answers of the assistant count, and nothing
            else) and ``most``, the characters that a conversation of one character may become. A conversation is ``messages``,
            ``tools`` and ``prompt``: the number of messages before those that count, or None.

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
    except Exception as error:  # a template may fail in any way that Python may
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
    """Let this process take so many bytes more than it has, where the system can limit that."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + size,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        pass


def main() -> None:
    """Answer what comes on the standard input, as the whole of a process."""
    asked = json.loads(sys.stdin.buffer.read())
    _limit_memory(asked["memory"])
    answer = json.dumps(render_all(asked))
    sys.stdout.buffer.write(answer.encode())


if __name__ == "__main__":
    main()
