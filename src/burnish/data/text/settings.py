"""Settings for batches of tokens from texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from burnish.errors import ConfigurationError
from burnish.options import option
from burnish.settings import check_settings, read_whole, split, suggestion
from burnish.validation import is_number, is_whole

TASKS = ("label", "masked", "causal")
TRAIN_ON = (COMPLETION, ASSISTANT, ALL) = ("completion", "assistant", "all")
SIDES = ("right", "left")
LONGEST = 512
SHORTEST_BUCKET = 16


def _read_buckets(text: str) -> tuple[int, ...]:
    try:
        return tuple(read_whole(part) for part in split([text]))
    except ValueError:
        raise ConfigurationError(f"--buckets {text}: give whole numbers with commas between, such as 32,64,128") from None


@dataclass(frozen=True, kw_only=True)
class Text:
    """Tokenization of texts, and the task to learn from them.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer``, one of ``transformers``, or the path of a ``tokenizer.json``; None for token data
            (a column ``input_ids``).
        task: ``label`` (of each text), ``masked`` (tokens, Devlin et al. 2018) or ``causal`` (the next token); by default the
            task in training, else ``label``.
        length: most tokens of a text, including special ones; by default that of the model, else 512.
        buckets: ascending padded lengths; each batch gets the first that holds its longest text. Powers of two from 16 to
            ``length`` by default.
        too_long: ``cut`` truncates and counts longer texts; ``error`` refuses them.
        joined: True to join texts and cut them into pieces of ``length``; not for ``label``.
        masked_share: share of tokens for ``masked``.
        column: text column; by default ``text``, ``sentence``, ``document`` or ``content``, or the only one. For ``causal``,
            ``messages``, or ``prompt`` and ``completion``, take precedence.
        train_on: counting tokens for ``causal``: ``completion`` (after the prompt, or the last answer in messages), ``assistant``
            (all its answers) or ``all``. By default ``completion`` for prompt and completion, ``assistant`` for messages, ``all``
            for texts.
        chat_template: Jinja file or text for messages; the tokenizer's own by default.
        padding_side: ``right``, or ``left`` for a model with an ``attention_mask``.

    Raises:
        ConfigurationError: a setting is out of range, or does not apply to the task.
    """

    tokenizer: Any = option(
        None,
        compare=False,
        help="Tokenizer of texts: a tokenizer.json of Hugging Face.",
        shown_default="that of the run",
        metavar="FILE",
        kind=Path,
    )
    task: str | None = option(
        None,
        help="Task for texts: label, masked (masked tokens) or causal (the next token).",
        shown_default="as the model was trained, else label",
    )
    length: int | None = option(
        None,
        help="Longest text in tokens.",
        shown_default="as the model says, else 512",
        spelled="--max-tokens",
        kind=int,
        least=2,
    )
    buckets: Sequence[int] | None = option(
        None,
        help="Lengths that batches are padded to, such as 32,64,128.",
        shown_default="powers of two",
        metavar="LENGTHS",
        read=_read_buckets,
    )
    too_long: str = option("cut", help="Treatment of a longer text: cut (the number is printed), or error.", metavar="WAY")
    joined: bool = option(False, help="Join texts, and cut them into pieces of one length.", kind=bool)
    masked_share: float = option(0.15, help="Share of tokens that the task masked hides.", kind=float)
    column: str | None = option(
        None,
        help="Column of a table that holds the texts.",
        shown_default="text, sentence, document or content",
        metavar="NAME",
        spelled="--text-column",
    )
    train_on: str | None = option(
        None,
        help="Tokens that a language model learns: completion, assistant (its messages) or all.",
        shown_default="the answers, if the data have some",
        metavar="WHICH",
    )
    chat_template: str | Path | None = option(
        None,
        help="Template of messages, a file of Jinja.",
        shown_default="that of the tokenizer",
        metavar="FILE",
        kind=Path,
    )
    padding_side: str | None = option(
        None,
        help="Side of texts that padding is put on: right, or left for a model with an attention_mask.",
        shown_default="right",
        metavar="SIDE",
    )

    def __post_init__(self) -> None:
        if self.task not in (None, *TASKS):
            raise ConfigurationError(f"text: task must be {', '.join(map(repr, TASKS))}, not {self.task!r}")
        if self.length is not None and (not is_whole(self.length) or self.length < 2):
            raise ConfigurationError(f"text: length={self.length!r}: give a whole number of 2 or more")
        if self.too_long not in ("cut", "error"):
            raise ConfigurationError(f"text: too_long must be 'cut' or 'error', not {self.too_long!r}")
        if not is_number(self.masked_share) or not 0 < self.masked_share < 1:
            raise ConfigurationError(f"text: masked_share={self.masked_share!r}: give the share of tokens, between 0 and 1")
        if self.train_on not in (None, *TRAIN_ON):
            raise ConfigurationError(
                f"text: train_on={self.train_on!r} (--train-on): give {', '.join(map(repr, TRAIN_ON))}"
                f"{suggestion(str(self.train_on), TRAIN_ON)}"
            )
        if self.train_on is not None and self.task in ("label", "masked"):
            raise ConfigurationError(
                f"text: train_on={self.train_on!r} (--train-on) is for the task 'causal', and this is '{self.task}': leave it out"
            )
        if self.padding_side not in (None, *SIDES):
            raise ConfigurationError(f"text: padding_side={self.padding_side!r} (--padding-side): give 'right' or 'left'")
        if self.joined and self.task in (None, "label"):
            raise ConfigurationError("text: joined texts have no labels of their own: it is for the tasks 'masked' and 'causal'")
        if self.buckets is not None:
            sizes = tuple(self.buckets)
            if not sizes or not all(is_whole(size) and size >= 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
                raise ConfigurationError(f"text: buckets must be whole numbers of 1 or more, ascending, not {self.buckets!r}")
            object.__setattr__(self, "buckets", tuple(map(int, sizes)))

    def settled(self, known: TextDescription | None, fixed: int | None, of_tokens: bool | None = None) -> Text:
        """Return the settings with task, length and buckets completed.

        Args:
            known: the model's description of its training texts.
            fixed: number of tokens of the model's input; None if symbolic.
            of_tokens: True if the loss takes a label per token, False for one per text; None without a loss.

        Raises:
            ConfigurationError: the model does not take this length, the buckets do not hold it, or the task is unknown.
        """
        recorded_task = None if known is None else known.task
        if of_tokens is not None and recorded_task is not None and (recorded_task != "label") != of_tokens:
            recorded_task = None  # the task of the pretrained model
        task = self.task or recorded_task or (None if of_tokens else "label")
        if task is None:
            raise ConfigurationError(
                "text: the loss compares each token with a label, and what is learned is not known: say which task it is, "
                "'masked' or 'causal' (--task)"
            )
        if self.train_on is not None and task != "causal":
            raise ConfigurationError(
                f"text: train_on={self.train_on!r} (--train-on) is for the task 'causal', and this is '{task}': leave it out"
            )
        length = self.length or (known and known.length) or fixed or LONGEST
        if fixed is not None and length > fixed:
            raise ConfigurationError(f"text: length={length}, and the model takes {fixed} tokens: give {fixed} at most")
        buckets = (fixed,) if fixed is not None else self.buckets
        if buckets is None:
            recorded = known is not None and known.buckets and known.length == length
            buckets = known.buckets if known is not None and recorded else powers_of_two(length)
        if buckets[-1] < length:
            raise ConfigurationError(
                f"text: the longest of the buckets is {buckets[-1]}, and texts may have {length} tokens: give a larger one, or a "
                "smaller length"
            )
        side = self.padding_side or (known and known.padding_side) or "right"
        return replace(self, task=task, length=length, buckets=tuple(buckets), padding_side=side)


TOKENIZER = "tokenizer.json"
"""File name of a run's copy of the tokenizer."""


TextLike = Text | Mapping[str, Any] | str | Path | Any
"""``Text``, its settings by name, a tokenizer, or the path of a ``tokenizer.json``."""


def as_text(text: TextLike | None) -> Text | None:
    """Return settings given in any short form.

    Raises:
        ConfigurationError: an unknown setting, or a value out of range.
    """
    if text is None or isinstance(text, Text):
        return text
    if isinstance(text, str | Path):
        return Text(tokenizer=text)
    if hasattr(text, "encode_batch") or hasattr(text, "all_special_ids"):  # a tokenizer object
        return Text(tokenizer=text)
    if isinstance(text, Mapping):
        check_settings("text", Text, text)
        return Text(**text)
    raise ConfigurationError(
        f"text={text!r}: give burnish.data.Text(tokenizer=...), its settings, a tokenizer, or a path of a tokenizer.json"
    )


@dataclass(frozen=True)
class TextDescription:
    """The description of a model's training texts.

    Attributes:
        task, length, buckets, joined, masked_share, train_on, padding_side: see ``Text``; None or empty if unknown. ``right`` is
            not written.
        tokenizer: checksum of the tokenizer, or None.
    """

    task: str | None = None
    length: int | None = None
    buckets: tuple[int, ...] = ()
    joined: bool = False
    masked_share: float | None = None
    tokenizer: str | None = None
    train_on: str | None = None
    padding_side: str | None = None

    @classmethod
    def of(cls, text: Text, checksum: str | None) -> TextDescription:
        """Return the description of complete settings."""
        share = text.masked_share if text.task == "masked" else None
        side = None if text.padding_side == "right" else text.padding_side
        return cls(text.task, text.length, tuple(text.buckets or ()), text.joined, share, checksum, text.train_on, side)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> TextDescription:
        """Return the description that ``options`` wrote.

        Raises:
            ConfigurationError: ``options`` has other contents.
        """
        unknown = options.keys() - {each.name for each in fields(cls)}
        known: dict[str, Any] = {name: value for name, value in options.items() if name not in unknown}
        read = cls(**{**known, "buckets": tuple(known.get("buckets", ()))})
        Text(
            task=read.task,
            length=read.length,
            buckets=read.buckets or None,
            train_on=read.train_on,
            padding_side=read.padding_side,
        )
        if read.tokenizer is not None and not isinstance(read.tokenizer, str):
            raise ConfigurationError(f"text: the checksum of the tokenizer is {read.tokenizer!r}")
        return read

    def options(self) -> dict[str, Any]:
        """Return the known values, JSON-compatible."""
        return {name: list(value) if name == "buckets" else value for name, value in asdict(self).items() if value}

    def text(self) -> str:
        """Return the description in words."""
        learned = {"label": "labels", "masked": f"{100 * (self.masked_share or 0):g} % masked", "causal": "the next token"}
        learned["causal"] += {COMPLETION: " of completions", ASSISTANT: " of the assistant's answers"}.get(
            self.train_on or "", ""
        )
        sizes = ", ".join(map(str, self.buckets))
        pieces = f"joined and cut into pieces of {self.length}" if self.joined else f"{self.length} tokens at most"
        side = " on the left" if self.padding_side == "left" else ""
        return f"{learned.get(self.task or '', 'tokens')}; {pieces}, padded to {sizes}{side}"


def powers_of_two(length: int) -> tuple[int, ...]:
    """Return the default buckets for texts of up to ``length`` tokens."""
    sizes = [SHORTEST_BUCKET]
    while 2 * sizes[-1] < length:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < length), length)
