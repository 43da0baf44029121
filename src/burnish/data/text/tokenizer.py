"""Hugging Face tokenizers (``tokenizers.Tokenizer``, ``tokenizer.json``, ``transformers``) with one interface."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from burnish.data.text.chat_template import TokenizerSettings
from burnish.errors import DataError
from burnish.installing import install_command
from burnish.untrusted_files import read_bytes

LARGEST_NUMBER = (1 << 24) - 1
"""Largest token number; the library allocates memory for all smaller ones."""
AT_ONCE = 1000
"""Texts per call of the tokenizer."""
LARGEST_TOKENIZER = 256 << 20
"""Largest tokenizer file, in bytes."""
MASKS = ("[MASK]", "<mask>")
PADDINGS = ("[PAD]", "<pad>")
ENDS = ("<|endoftext|>", "</s>", "[SEP]", "<eos>")
Encode = Callable[[Sequence[str]], list[list[int]]]
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class MarkedText:
    """A text with the parts that count in the loss.

    Attributes:
        text: the text.
        spans: ascending character ranges that count.
        is_complete: True if the text contains its special tokens, so the tokenizer adds none.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    is_complete: bool = False


EncodeMarked = Callable[[Sequence[MarkedText]], list[tuple[list[int], list[bool]]]]


class TextTokenizer:
    """A tokenizer, with its own truncation and padding turned off.

    Args:
        source: a ``tokenizers.Tokenizer``, one of ``transformers``, or the path of a ``tokenizer.json``.
        length: length of truncated texts, including special tokens.

    Attributes:
        name: path of the tokenizer, for messages.
        size: number of tokens.
        special: special tokens.
        mask, padding: mask and padding tokens, or None.
        checksum: checksum of everything that affects the tokens.

    Raises:
        DataError: the file is missing or not a tokenizer, or its library is missing.
    """

    def __init__(self, source: Any, length: int):
        self.name, self._source = "the tokenizer", source
        if isinstance(source, str | Path):
            self.name, source = str(source), _read(Path(source))
        source = getattr(source, "backend_tokenizer", source)
        self.special: frozenset[int]
        if hasattr(source, "encode_batch") and hasattr(source, "to_str"):
            self._of_tokenizers(source, length)
        elif callable(source) and hasattr(source, "all_special_ids"):
            self._of_transformers(source, length)
        else:
            raise DataError(
                f"a value of type {type(source).__name__} is no tokenizer: give a tokenizers.Tokenizer, one of transformers, or "
                "the path of a tokenizer.json"
            )

    def _of_tokenizers(self, source: Any, length: int) -> None:
        # Copies, since padding and truncation are settings of the caller's tokenizer.
        whole, cut = (type(source).from_str(source.to_str()) for _ in range(2))
        for each in (whole, cut):
            each.no_padding()
            each.no_truncation()
        cut.enable_truncation(length)
        self._whole, self._cut = _encoder(whole), _encoder(cut)
        self._decode: Callable[..., Any] | None = whole.decode
        self.size = int(whole.get_vocab_size())
        self.special = frozenset(index for index, token in whole.get_added_tokens_decoder().items() if token.special)
        self._find_end: Callable[[], int | None] = lambda: _first(
            whole.token_to_id, [*filter(None, [self.settings.tokens.get("eos_token")]), *ENDS]
        )
        self.mask, self.padding = (_first(whole.token_to_id, names) for names in (MASKS, PADDINGS))
        self._marked = _marked_encoder(whole)
        self.checksum = hashlib.sha256(whole.to_str().encode()).hexdigest()

    def _of_transformers(self, source: Any, length: int) -> None:
        self._decode = getattr(source, "decode", None)
        self._whole = lambda texts: source(list(texts), truncation=False, padding=False)["input_ids"]
        self._cut = lambda texts: source(list(texts), truncation=True, max_length=length, padding=False)["input_ids"]
        self._marked = _marked_by_parts(source)
        self.size = len(source)
        self.special = frozenset(source.all_special_ids)
        self._find_end = lambda: source.eos_token_id
        self.mask, self.padding = source.mask_token_id, source.pad_token_id
        self.checksum = hashlib.sha256(repr(sorted(source.get_vocab().items())).encode()).hexdigest()

    @cached_property
    def settings(self) -> TokenizerSettings:
        """Special tokens by role, and the chat template.

        Raises:
            DataError: a file cannot be read.
        """
        return TokenizerSettings.beside(self._source)

    @cached_property
    def end(self) -> int | None:
        """The token at the end of a text: from ``settings``, or with a usual name; None if there is none.

        Raises:
            DataError: the settings cannot be read.
        """
        return self._find_end()

    def encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the tokens of each text, without truncation.

        Raises:
            DataError: the tokenizer has no tokens for a text.
        """
        for start in range(0, len(texts), AT_ONCE):
            yield from self._encoded(self._whole, texts[start : start + AT_ONCE])

    def encode_marked(self, texts: Sequence[MarkedText]) -> Iterator[tuple[list[int], list[bool]]]:
        """Yield the tokens of each text, without truncation, and the mask of those that count.

        All or none of the texts are complete. A token counts if one of its characters does; special tokens after a text count if
        its last token does.

        Raises:
            DataError: the tokenizer has no tokens for a text.
        """
        for start in range(0, len(texts), AT_ONCE):
            yield from self._encoded(self._marked, texts[start : start + AT_ONCE])

    def words(self, tokens: Sequence[int]) -> str | None:
        """Decode tokens, without special ones; None if the tokenizer cannot."""
        return None if self._decode is None else str(self._decode(list(tokens), skip_special_tokens=True))

    def cut(self, text: str) -> list[int]:
        """Return the tokens of a truncated text.

        Raises:
            DataError: the tokenizer has no tokens for it.
        """
        return self._encoded(self._cut, [text])[0]

    def _encoded(self, encode: Callable[[Sequence[Given]], list[Made]], texts: Sequence[Given]) -> list[Made]:
        try:
            return encode(texts)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self.name}: a text cannot be made tokens ({error}); repair the tokenizer") from error


def _read(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{path}: tokenizers are read with a package that is not installed; {install_command('tokenizers')}"
        ) from error
    try:
        text = read_bytes(path, LARGEST_TOKENIZER).decode("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the tokenizer cannot be read ({error})") from error
    try:
        read = tokenizers.Tokenizer.from_str(text)
        numbers = sorted(read.get_vocab().values())
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: no tokenizer.json of Hugging Face tokenizers ({error})") from error
    if numbers and numbers[-1] > LARGEST_NUMBER:
        raise DataError(f"{path}: a token has the number {numbers[-1]}, and {LARGEST_NUMBER} is the largest that burnish reads")
    twice = next((one for one, other in itertools.pairwise(numbers) if one == other), None)
    if twice is not None:
        raise DataError(f"{path}: two tokens have the number {twice}, and which of them it stands for is not known; repair it")
    return read


def _encoder(tokenizer: Any) -> Encode:
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _marked_encoder(tokenizer: Any) -> EncodeMarked:
    def encode(texts: Sequence[MarkedText]) -> list[tuple[list[int], list[bool]]]:
        made = []
        encodings = tokenizer.encode_batch([text.text for text in texts], add_special_tokens=not texts[0].is_complete)
        for text, encoding in zip(texts, encodings, strict=True):
            counted = [_overlaps(begin, end, text.spans) for begin, end in encoding.offsets]
            made.append((encoding.ids, _with_end(counted, [begin == end for begin, end in encoding.offsets])))
        return made

    return encode


def _overlaps(begin: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(begin < stop and start < end for start, stop in spans)


def _with_end(counted: list[bool], is_empty: Sequence[bool]) -> list[bool]:
    """Mark tokens without characters at the end of a text as counted if the token before them is."""
    last = next((place for place in reversed(range(len(counted))) if not is_empty[place]), -1)
    return counted if last < 0 or not counted[last] else [*counted[: last + 1], *[True] * (len(counted) - last - 1)]


def _marked_by_parts(tokenizer: Any) -> EncodeMarked:
    """Return an encoder for tokenizers without character offsets, which tokenizes counted and other parts one by one."""

    def tokens_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(texts: Sequence[MarkedText]) -> list[tuple[list[int], list[bool]]]:
        made = []
        for text in texts:
            tokens, counted, place = list[int](), list[bool](), 0
            for begin, end in [*text.spans, (len(text.text), len(text.text))]:
                for part, counts in ((text.text[place:begin], False), (text.text[begin:end], True)):
                    own = tokens_of(part)
                    tokens += own
                    counted += [counts] * len(own)
                place = end
            if not text.is_complete:
                bare, whole = tokens_of("a"), list(tokenizer("a")["input_ids"])
                before = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
                after = whole[before + len(bare) :]
                counted = [*[False] * before, *counted, *[bool(counted) and counted[-1]] * len(after)]
                tokens = [*whole[:before], *tokens, *after]
            made.append((tokens, counted))
        return made

    return encode


def _first(number_of: Callable[[str], int | None], names: Sequence[str]) -> int | None:
    numbers = (number_of(name) for name in names)
    return next((number for number in numbers if number is not None), None)
