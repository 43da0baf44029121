"""Texts with labels from any source: lines, tables, JSON lines, Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data import csv, parquet
from burnish.data.dataset import group_values
from burnish.data.huggingface import class_column, is_columnar
from burnish.data.label_coding import LABEL_COLUMNS
from burnish.data.missing_values import column_of_text, refuse_other_digits
from burnish.data.text.chat_template import Conversation
from burnish.data.text.conversations import ANSWER, MESSAGES, PROMPT, TOOLS, Pair, answer_columns, read_answers, rows_as_columns
from burnish.data.text.tokens import Tokens
from burnish.errors import DataError
from burnish.untrusted_files import read_json

TOKEN_LABELS, UNCOUNTED = "labels", -100
"""Hugging Face's label column of token data: the tokens, with -100 at those that do not count."""
TEXT_COLUMNS = ("text", "sentence", "document", "content")
TOKENS, MASK = "input_ids", "attention_mask"
FILES = {".txt": "txt", ".jsonl": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
FORMATS = "a .txt file (a text a line), a .csv, .tsv, .parquet or .jsonl file, or a data set with columns"


@dataclass(frozen=True)
class Texts:
    """Texts or their tokens, with labels.

    Attributes:
        texts: one per sample; None for token data.
        tokens: tokens of each sample, for token data.
        labels: names or numbers, or None.
        classes: class names by index, if the data define them.
        source: name for errors.
        pairs: prompt and completion of each sample, if any.
        conversations: messages of each sample, if any.
        counted: mask of counting tokens per sample, if the data define it.
        unread: unused columns.
        places: sample names, if not numbers.
        left_out: number of empty texts left out.
        is_written: True for labels from a text file, where numbers are text too.
        groups: group of each sample, or None.
        label: name of the label column, or None.
    """

    texts: Sequence[str] | None
    tokens: Sequence[Tokens] | None
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    source: str
    left_out: int = 0
    is_written: bool = False
    groups: np.ndarray | None = None
    label: str | None = None
    pairs: Sequence[Pair] | None = None
    conversations: Sequence[Conversation] | None = None
    counted: Sequence[np.ndarray] | None = None
    unread: tuple[str, ...] = ()
    places: Sequence[str] | None = None

    def read_labels(self, known: Sequence[str] | None) -> np.ndarray | None:
        """Return the labels; if all are written numbers, as numbers: class indices or values.

        Args:
            known: class names, if any; labels that are all among them stay names.
        """
        if self.labels is None or not self.is_written or (known is not None and {*self.labels.tolist()} <= {*known}):
            return self.labels
        written = self.labels.tolist()
        refuse_other_digits("label", written, self.source, [f"row {row}" for row in range(len(written))])
        numbers, is_missing = column_of_text(written)
        return self.labels if is_missing.any() else numbers

    @property
    def form(self) -> str:
        """Kind of samples: ``tokens``, ``pairs``, ``messages``, ``dialogues`` (pairs of messages) or ``text``."""
        if self.conversations is not None:
            return "messages" if self.conversations[0].prompt is None else "dialogues"
        return "pairs" if self.pairs is not None else "text" if self.tokens is None else "tokens"

    def place(self, index: int) -> str:
        """Return the name of a sample in a message."""
        return f"sample {index}" if self.places is None else self.places[index]

    def __len__(self) -> int:
        rows = next(each for each in (self.tokens, self.pairs, self.conversations, self.texts) if each is not None)
        return len(rows)


def read_texts(
    source: Any,
    column: str | None,
    label: str | None,
    labelled: bool,
    name: str = "data",
    group: str | None = None,
    is_causal: bool = False,
) -> Texts:
    """Read texts.

    Args:
        source: a path, a dataset with ``column_names``, columns by name, ``(texts, labels)``, or texts.
        column: text column of a table; None for one with a usual name, or the only one.
        label: label column; None for one with a usual name, or the only other one.
        labelled: True if labels are needed.
        name: name of data that are not a file.
        group: column of groups.
        is_causal: True to also read prompts with completions, and messages.

    Raises:
        DataError: there are no data, the format is unknown, a column is missing, or a value is not text.
    """
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).suffix.lower() in FILES):
        return _of_file(Path(source), column, label, labelled, group, is_causal)
    if isinstance(source, list) and (rows := rows_as_columns(source, name)) is not None:
        source = rows
    if is_columnar(source):
        features = getattr(source, "features", {})
        columns = [each for each in source.column_names if each != group]
        label = label or (class_column(source, columns) if labelled else None)
        read = {each: source[each] for each in source.column_names}
        return _of_columns(read, column, label, labelled, name, features, group=group, is_causal=is_causal)
    if isinstance(source, Mapping):
        return _of_columns(source, column, label, labelled, name, group=group, is_causal=is_causal)
    if group is not None:
        group_values(None, group, name, "none: these are texts without columns")
    if isinstance(source, tuple) and len(source) == 2:
        return _made(source[0], np.asarray(source[1]), None, name, labelled)
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        if labelled:
            raise DataError(f"{name}: texts without labels; give (texts, labels), or the task 'masked' or 'causal'")
        return _made(source, None, None, name, labelled)
    raise DataError(
        f"{source if isinstance(source, str) else type(source).__name__}: no texts; text is {FORMATS}, or (texts, labels)"
    )


def _of_file(path: Path, column: str | None, label: str | None, labelled: bool, group: str | None, is_causal: bool) -> Texts:
    kind = FILES.get(path.suffix.lower())
    if not path.is_file() or kind is None:
        raise DataError(f"{path}: {'no such file' if kind else 'no file of texts'}; text is {FORMATS}")
    if kind == "txt":
        return _of_lines(path, labelled)
    lines: list[int] | None = None
    columns: Mapping[str, Sequence[Any]]
    if kind == "jsonl":
        columns, lines = _json_columns(path)
    elif kind == "csv":
        columns, lines = csv.read_columns(path, (PROMPT, ANSWER) if is_causal else ())
    else:
        columns = parquet.read_columns(path)
    texts = _of_columns(columns, column, label, labelled, str(path), lines=lines, group=group, is_causal=is_causal)
    return replace(texts, is_written=kind == "csv")


def _of_lines(path: Path, labelled: bool) -> Texts:
    """Return one text per line, after a label and a tab if labelled. Empty lines are left out and counted."""
    texts, labels, empty = [], [], 0
    for number, line in _lines(path):
        if not line.strip():
            empty += 1
            continue
        if labelled:
            label, tab, line = line.partition("\t")
            if not tab or not label.strip() or not line.strip():
                raise DataError(
                    f"{path}, line {number}: a label, a tab and a text are expected; without labels, the task is another"
                )
            labels.append(label.strip())
        texts.append(line)
    return replace(_made(texts, np.asarray(labels) if labelled else None, None, str(path), labelled, empty), is_written=True)


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no text in UTF-8 ({error})") from error


def _json_columns(path: Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the objects of a JSON lines file as columns by the first one's keys (None for no value), and their line numbers."""
    columns: dict[str, list[Any]] = {}
    lines = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            entry = read_json(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(entry, dict):
            raise DataError(f"{path}, line {number}: a {type(entry).__name__}, and an object is expected")
        columns = columns or {name: [] for name in entry}
        lines.append(number)
        for name, values in columns.items():
            values.append(entry.get(name))
    return columns, lines


def _of_columns(
    columns: Mapping[str, Any],
    column: str | None,
    label: str | None,
    labelled: bool,
    source: str,
    features: Mapping[str, Any] | None = None,
    lines: Sequence[int] | None = None,
    group: str | None = None,
    is_causal: bool = False,
) -> Texts:
    if group is not None:
        values = np.asarray(_whole(columns[group], group, source, lines)) if group in columns else None
        groups = group_values(values, group, source, ", ".join(map(repr, columns)))
        rest = {each: held for each, held in columns.items() if each != group}
        made = _of_columns(rest, column, label, labelled, source, features, lines, is_causal=is_causal)
        return replace(made, groups=groups)
    names = list(columns)
    if is_causal and (TOKENS not in names or column is not None):
        used = answer_columns(names if column is None else [column])
        if used and (column is None or column == MESSAGES):
            return _with_answers(columns, used, source, lines)
    chosen = label or next((name for name in names if name.lower() in LABEL_COLUMNS), None)
    tokens: list[Tokens] | None = None
    texts: list[str] = []
    held = ""
    if TOKENS in names and column is None:
        tokens = _tokens(columns, source)
    else:
        held = _text_column(columns, column, chosen, source)
        texts = _whole(columns[held], held, source, lines)
        others = [name for name in names if name != held]
        chosen = chosen or (others[0] if len(others) == 1 else None)
    if not labelled:
        made = _made(texts, None, tokens, source, labelled)
        if not is_causal:
            return made
        read = {held} if tokens is None else {TOKENS, MASK, TOKEN_LABELS}
        unread = tuple(name for name in names if name not in read)
        return replace(made, counted=_counted(columns, tokens, source), unread=unread, places=_places(lines))
    if chosen is None or chosen not in names:
        missing = f"no column '{chosen}'" if chosen else "no column is called label, y or target"
        raise DataError(f"{source}: {missing}, and labels are to be learned; the columns are {', '.join(names)}")
    try:
        values = np.asarray(_whole(columns[chosen], chosen, source, lines))
    except ValueError:  # lists of different lengths
        values = np.empty((0, 0))
    if values.ndim != 1:
        raise DataError(
            f"{source}: the column '{chosen}' holds lists, and a text has one label; the tasks 'masked' and 'causal' make labels "
            "for tokens"
        )
    classes = getattr((features or {}).get(chosen), "names", None)
    if classes is not None and values.dtype.kind in "iu":
        if len(values) and not 0 <= values.min() <= values.max() < len(classes):
            wrong = values[(values < 0) | (values >= len(classes))][0]
            raise DataError(f"{source}: the label {wrong} is none of the {len(classes)} classes; leave these samples out")
        values = np.asarray(classes)[values]
    return replace(_made(texts, values, tokens, source, labelled, classes=classes), label=chosen)


def _with_answers(columns: Mapping[str, Any], used: Sequence[str], source: str, lines: Sequence[int] | None) -> Texts:
    whole = {name: _whole(columns[name], name, source, lines) for name in used}
    if not whole[used[0]]:
        raise DataError(f"{source}: no texts")
    known = {**columns, **whole}
    count = len(whole[used[0]])
    places = _places(lines) or [f"sample {row}" for row in range(count)]
    answers = read_answers(known, used, source, places)
    unread = tuple(name for name in columns if name not in (*used, TOOLS))
    is_of_texts = isinstance(answers[0], tuple)
    held: dict[str, Any] = {"pairs" if is_of_texts else "conversations": answers}
    return Texts(None, None, None, None, source, unread=unread, places=places, **held)


def _places(lines: Sequence[int] | None) -> list[str] | None:
    return None if lines is None else [f"line {line}" for line in lines]


def _counted(columns: Mapping[str, Any], tokens: Sequence[Tokens] | None, source: str) -> list[np.ndarray] | None:
    """Return masks of the tokens that count, from Hugging Face's label column."""
    if tokens is None or TOKEN_LABELS not in columns:
        return None
    labels = [np.asarray(row) for row in columns[TOKEN_LABELS]]
    if any(row.ndim != 1 for row in labels):  # one label per text, which a language model does not learn
        return None
    if MASK in columns:
        labels = [row[np.asarray(mask, dtype=bool)] for row, mask in zip(labels, columns[MASK], strict=True)]
    for index, (row, own) in enumerate(zip(labels, tokens, strict=True)):
        if len(row) != len(own) or np.any((row != UNCOUNTED) & (row != np.asarray(own))):
            raise DataError(
                f"{source}: '{TOKEN_LABELS}' of sample {index} are neither its tokens nor {UNCOUNTED}: give the tokens "
                "themselves, which are shifted by one later, or leave the column out"
            )
    return [row != UNCOUNTED for row in labels]


def _whole(values: Iterable[Any], name: str, source: str, lines: Sequence[int] | None) -> list[Any]:
    """Return the values of a column; raise DataError if one is missing."""
    held = list(values)
    row = next((row for row, value in enumerate(held) if value is None), None)
    if row is not None:
        place = f"row {row}" if lines is None else f"line {lines[row]}"
        raise DataError(f"{source}, {place}: no value for '{name}'; fill it in or remove the {place.partition(' ')[0]}")
    return held


def _text_column(columns: Mapping[str, Any], column: str | None, label: str | None, source: str) -> str:
    if column is not None:
        if column not in columns:
            raise DataError(f"{source}: no column '{column}'; the columns are {', '.join(columns)}")
        return column
    named = next((name for name in columns if name.lower() in TEXT_COLUMNS), None)
    others = [name for name in columns if name != label]
    if named is None and len(others) != 1:
        raise DataError(
            f"{source}: which column holds the texts is not known: none is called {', '.join(TEXT_COLUMNS)}; the columns are "
            f"{', '.join(columns)}: name one (--text-column)"
        )
    return named or others[0]


def _tokens(columns: Mapping[str, Any], source: str) -> list[Tokens]:
    """Return the given tokens, without those that the mask column marks as padding."""
    rows = []
    for index, row in enumerate(map(np.asarray, columns[TOKENS])):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise DataError(f"{source}: '{TOKENS}' of sample {index} is no list of whole numbers")
        rows.append(row)
    if MASK not in columns:
        return list(rows)
    masks = [np.asarray(mask, dtype=bool) for mask in columns[MASK]]
    return [row[mask] for row, mask in zip(rows, masks, strict=True)]


def _made(
    texts: Iterable[Any],
    labels: np.ndarray | None,
    tokens: Sequence[Tokens] | None,
    source: str,
    labelled: bool,
    empty: int = 0,
    classes: Sequence[str] | None = None,
) -> Texts:
    held = list(texts)
    for index, text in enumerate(held):
        if not isinstance(text, str):
            raise DataError(f"{source}: sample {index} is a {type(text).__name__}, and a text is expected")
    named = None if classes is None else tuple(map(str, classes))
    made = Texts(None if tokens is not None else held, tokens, labels if labelled else None, named, source, empty)
    if not len(made):
        raise DataError(f"{source}: no texts")
    if made.labels is not None and len(made.labels) != len(made):
        raise DataError(f"{source}: {len(made)} texts and {len(made.labels)} labels; each text needs one")
    return made
