"""Hugging Face chat templates: search and rendering."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.data.text import rendering_process
from burnish.errors import ConfigurationError, DataError
from burnish.stopping import TimePassed, within_time
from burnish.untrusted_files import allowed_memory, read_bytes, read_json_file

SETTINGS_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
SETTINGS_FILES = (SETTINGS_FILE, TEMPLATE_FILE)
"""Files next to ``tokenizer.json``: settings with special tokens and perhaps the template, and the template itself."""
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LARGEST_TEMPLATE = 1 << 20
"""Largest template; the longest of well-known models have about 20,000 characters."""
MOST_CHARACTERS = 1 << 20
"""Most characters of a rendered conversation; 16 more are allowed per character of its JSON."""
SECONDS, SECONDS_EACH = 20.0, 0.02
"""Time limit for rendering, plus time per message."""
PLAIN = (
    "{% for message in messages %}{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token or '' }}\n{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
"""Default for tokenizers without a template: the role on one line, the content on the next."""
MARKS = "{% generation %} and {% endgeneration %}"


@dataclass(frozen=True)
class Conversation:
    """Messages between user, assistant and others.

    Attributes:
        messages: JSON-compatible mappings with ``role`` and ``content``.
        prompt: number of messages before those to learn; None to learn all answers of the assistant.
        tools: tools for the template, or None.
    """

    messages: Sequence[Mapping[str, Any]]
    prompt: int | None = None
    tools: Any = None


@dataclass(frozen=True)
class TokenizerSettings:
    """Special tokens by role, and the chat template of a tokenizer.

    Attributes:
        tokens: such as ``{"eos_token": "</s>"}``.
        template: Jinja text, several by name in Hugging Face's form, or None.
        name: source of the template, for messages.
    """

    tokens: Mapping[str, str] = field(default_factory=dict)
    template: Any = None
    name: str = "the tokenizer"

    @classmethod
    def beside(cls, tokenizer: Any) -> TokenizerSettings:
        """Return the settings of a tokenizer: from the files next to its path, or from the object.

        Raises:
            DataError: a file cannot be read.
        """
        if isinstance(tokenizer, str | Path):
            return cls._of_folder(Path(tokenizer).parent)
        known = getattr(tokenizer, "special_tokens_map", None)
        template = getattr(tokenizer, "chat_template", None)
        tokens = {name: str(known[name]) for name in TOKENS if name in known} if isinstance(known, Mapping) else {}
        return cls(tokens, template)

    @classmethod
    def _of_folder(cls, folder: Path) -> TokenizerSettings:
        settings, template = folder / SETTINGS_FILE, folder / TEMPLATE_FILE
        held: Any = {}
        if settings.is_file():
            try:
                held = read_json_file(settings)
            except (OSError, ValueError) as error:
                raise DataError(f"{settings}: cannot be read ({error}); repair the file, or remove it") from error
            if not isinstance(held, dict):
                raise DataError(f"{settings}: no object of settings; repair the file, or remove it")
        # A token is a text, or an object with the text as its content.
        known = {name: _content(held.get(name)) for name in TOKENS}
        tokens = {name: token for name, token in known.items() if token is not None}
        if template.is_file():
            return cls(tokens, read_template(template), str(template))
        inside = held.get("chat_template")
        return cls(tokens) if inside is None else cls(tokens, inside, str(settings))

    def with_template(self, asked: str | Path | None) -> TokenizerSettings:
        """Return the settings with another template, given as a file or text; None keeps the template.

        Raises:
            ConfigurationError: ``asked`` is neither a file nor a template.
        """
        if asked is None:
            return self
        if isinstance(asked, str) and "{" in asked:
            return TokenizerSettings(self.tokens, asked, "chat_template")
        try:
            return TokenizerSettings(self.tokens, read_template(Path(asked)), str(asked))
        except DataError as error:
            raise ConfigurationError(f"chat_template (--chat-template): {error}") from error

    def rendered(self, conversations: Sequence[Conversation], answers: bool, source: str) -> list[tuple[str, list[Any]]]:
        """Return each conversation as text, with the spans to learn as pairs of character offsets.

        Args:
            conversations: the conversations.
            answers: True to learn only the assistant's answers; False for everything after the prompt.
            source: name for errors.

        Raises:
            DataError: the template fails, takes too much memory or time, or does not mark the answers.
        """
        template = _default_of(self.template, self.name)
        asked = {
            "template": PLAIN if template is None else template,
            "tokens": self.tokens,
            "conversations": [{"messages": each.messages, "tools": each.tools, "prompt": each.prompt} for each in conversations],
            "answers": answers,
            "most": MOST_CHARACTERS,
        }
        try:
            size = len(json.dumps(asked))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{source}: a conversation holds what JSON does not ({error}); give texts, numbers and lists"
            ) from error
        seconds = SECONDS + SECONDS_EACH * sum(len(each.messages) for each in conversations)
        answer = _render({**asked, "memory": allowed_memory(size)}, seconds, self.name)
        if "fault" in answer:
            raise DataError(self._fault(answer, source))
        return [(text, spans) for text, spans in answer["texts"]]

    def _fault(self, answer: Mapping[str, Any], source: str) -> str:
        number = answer["conversation"]
        where = f"{self.name}: the chat template" if number is None else f"{source}: the chat template, on conversation {number},"
        if answer["kind"] == rendering_process.UNSTABLE:
            return (
                f"{where} writes a message differently once others follow, so where the answers are is not known. "
                f"Put {MARKS} around answers in a copy of the template (chat_template=..., --chat-template FILE), or count all "
                "tokens (train_on='all', --train-on all)"
            )
        reason = str(answer["fault"]).rstrip(".")
        if len(reason) > 300:
            reason = f"{reason[:300]} ..."
        remedy = "give another one (chat_template=..., --chat-template FILE), or repair the conversation"
        if answer["kind"] == "SecurityError":
            return f"{where} does what no template needs to: {reason}. Do not trust it; {remedy}"
        return f"{where} fails: {answer['kind']}: {reason}. To go on, {remedy}"

    def files(self) -> dict[str, str]:
        """Return files, by name, from which ``beside`` reads these settings again; empty if there are none."""
        held = {**self.tokens, **({} if self.template is None else {"chat_template": self.template})}
        return {SETTINGS_FILE: json.dumps(held, indent=1, ensure_ascii=False) + "\n"} if held else {}


def read_template(path: Path) -> str:
    """Return the text of a template file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_bytes(path, LARGEST_TEMPLATE).decode("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the chat template cannot be read ({error}); give a file of Jinja in UTF-8") from error


def _default_of(template: Any, name: str) -> str | None:
    if isinstance(template, list):  # Hugging Face's [{"name": ..., "template": ...}]
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, Mapping)}
    if isinstance(template, Mapping):
        if not isinstance(template.get("default"), str):
            raise DataError(
                f"{name}: several chat templates, {', '.join(map(repr, template))}, and none is called 'default': give one "
                "(chat_template=..., --chat-template FILE)"
            )
        template = template["default"]
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > LARGEST_TEMPLATE:
        raise DataError(f"{name}: 'chat_template' is no text of up to {LARGEST_TEMPLATE:,} characters: repair it, or remove it")
    return template


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _render(asked: Mapping[str, Any], seconds: float, name: str) -> dict[str, Any]:
    """Return the answer of ``rendering_process.render_all``, run in its own process with limits of memory and time."""
    found, program = [str(place) for place in sys.path], rendering_process.__file__
    run = f"import runpy, sys; sys.path[:] = {found!r}; runpy.run_path({program!r}, run_name='__main__')"
    command = [sys.executable, "-I", "-c", run]
    try:
        done = subprocess.run(command, input=json.dumps(asked).encode(), capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise _too_much(name, f"longer than {seconds:,.0f} s") from error
    except OSError:  # an embedded interpreter has no executable; then only time is limited
        try:
            return within_time(seconds, lambda: rendering_process.render_all(asked))
        except TimePassed as error:
            raise _too_much(name, f"longer than {seconds:,.0f} s") from error
    if done.returncode:
        raise _too_much(name, f"more than {asked['memory']:,} bytes of memory, or ended the process that renders it")
    answer: dict[str, Any] = json.loads(done.stdout)
    if answer.get("kind") == "MemoryError":
        raise _too_much(name, f"more than {asked['memory']:,} bytes of memory")
    return answer


def _too_much(name: str, what: str) -> DataError:
    return DataError(
        f"{name}: the chat template takes {what}. Do not trust it; give another one (chat_template=..., --chat-template FILE)"
    )
