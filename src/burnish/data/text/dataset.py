"""Texts as a dataset of tokens, padded to a few lengths, with their targets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from burnish.data.data_spec import DataSpec, fit_label
from burnish.data.label_coding import LabelDescription, divided, several_labels, takes_several
from burnish.data.missing_values import alike_but_for_case, marks_among
from burnish.data.model_metadata import DataDescription
from burnish.data.text.columns import MASK, TOKENS, Texts, read_texts
from burnish.data.text.conversations import marked_conversations, marked_pairs, settle_train_on
from burnish.data.text.settings import ALL, Text, TextDescription
from burnish.data.text.tokenizer import TextTokenizer
from burnish.data.text.tokens import Masking, Tokens, TokenTable, next_tokens, order_by_length
from burnish.errors import ConfigurationError, DataError
from burnish.program import Entry

SEGMENTS, PLACES = "token_type_ids", "position_ids"
SHOWN = 5
"""Most texts to name in a note."""
CLASSES_LAST = "cross_entropy:class_axis=-1"


class TextDataset:
    """Texts as batches of tokens, each padded to the first bucket that holds its longest text.

    One compiled program with a symbolic number of tokens takes all lengths; attention mask and ignored labels exclude padding. A
    shuffling ``Loader`` keeps similar lengths together.

    A batch has the program's inputs among ``input_ids``, ``attention_mask`` (1 for tokens), ``token_type_ids`` (0) and
    ``position_ids``, [samples, tokens]; a single input of any name gets the tokens. Labels are per text, [samples], or per token,
    [samples, tokens]: the original token at masked places (``masked``), or the next token if it counts (``causal``,
    ``Text.train_on``). Texts without a counting token, such as a truncated answer, are left out and named.

    Args:
        source: see ``burnish.data.text.columns.read_texts``.
        text: settings of the tokenization.
        spec: inputs of the program.
        label: label column.
        classes: class names by index.
        name: name of data that are not a file.
        group: column of groups.
        separator: text between several labels.

    Attributes:
        text: complete settings.
        described: description for the trained model.
        classes: class names, or None.
        cut: number of truncated texts.
        is_length_known: True if the model declares that it takes this length.
        note: remarks for the user.
        groups: group of each text, or None.

    Raises:
        DataError: texts are unreadable or too long, the tokenizer is missing or another than in training, the model lacks a
            token, or its inputs and labels do not fit texts.
        ConfigurationError: the settings do not fit the model.
    """

    preprocessing = None

    def __init__(
        self,
        source: Any,
        text: Text,
        spec: DataSpec,
        label: str | None = None,
        classes: Sequence[str] | None = None,
        name: str = "data",
        group: str | None = None,
        separator: str | None = None,
    ):
        self._inputs = _inputs_of(spec, name)
        extent = self._inputs[TOKENS].extents[1]
        of_tokens = None if spec.label is None else _is_of_tokens(spec.label, self._inputs[TOKENS])
        known = spec.described.text
        self.text = text = text.settled(known, extent if isinstance(extent, int) else None, of_tokens)
        self.is_length_known = isinstance(extent, int) or (
            known is not None and known.length is not None and (text.length or 0) <= known.length
        )
        is_labelled = text.task == "label" and spec.label is not None
        is_causal = text.task == "causal"
        texts = read_texts(source, text.column, label, is_labelled, name, group, is_causal)
        if is_causal:
            form = "text" if texts.form == "tokens" and texts.counted is None else texts.form
            recorded = None if known is None else known.train_on
            # Without a loss no token counts, so a text needs no answer.
            train_on = ALL if spec.label is None else settle_train_on(form, text.train_on, recorded, texts.source)
            self.text = text = replace(text, train_on=train_on)
        self._source, self.cut, self.groups = texts.source, 0, texts.groups
        self._by = "class" if texts.label is None else f"'{texts.label}'"
        self._texts: np.ndarray | None = None
        tokenizer = None if text.tokenizer is None else TextTokenizer(text.tokenizer, text.length or 0)
        self._tokenizer = tokenizer
        self._check_tokenizer(tokenizer, spec, texts)
        self._notes = [f"{texts.left_out} empty lines are left out"] if texts.left_out else []
        if texts.unread:
            self._notes.append(f"not read: {', '.join(map(repr, texts.unread))}")
        self._padding = 0 if tokenizer is None or tokenizer.padding is None else tokenizer.padding
        self._check_padding_side()
        self._table = self._tokens(texts, tokenizer)
        self._check_vocabulary(tokenizer)
        self._masking: Masking | None = None
        self.classes: tuple[str, ...] | None = None
        self.labels: LabelDescription | None = None
        self._labels, self._label = None, spec.label
        if is_labelled:
            assert spec.label is not None
            labels = texts.read_labels(classes or spec.described.classes)
            assert labels is not None
            classes = classes or (spec.class_order(texts.classes) if texts.classes else None)
            names: tuple[str, ...] | None = None
            if labels.dtype.kind in "US" and takes_several(spec.label):
                separator = separator or (None if spec.described.labels is None else spec.described.labels.separator)
                if separator is not None:
                    rows = divided(labels.tolist(), separator)
                    labels, names = several_labels(rows, self._source, classes or spec.described.classes)
                    self.labels = LabelDescription((label or "label",), separator)
            self._labels, self.classes = fit_label(labels, spec.only_label(name), self._source, classes, spec)
            self.classes = names or self.classes
            if labels.dtype.kind in "US":
                named = np.unique(labels.astype(str)).tolist()
                self._notes += [*alike_but_for_case(named), *marks_among(named)]
        elif spec.label is not None:
            self._ignored = _ignored(spec.only_label(self._source), self._inputs[TOKENS], self._source, str(text.task))
            if text.task == "masked":
                self._masking = _masking(text, tokenizer, self._source)
        buckets = np.asarray(text.buckets)
        if spec.predicts:  # one bucket, since the outputs of all batches are concatenated
            buckets = buckets[np.searchsorted(buckets, [self._table.lengths.max()])]
        self._buckets = buckets
        self._bucket_of = np.searchsorted(buckets, self._table.lengths)
        self.described = TextDescription.of(text, None if tokenizer is None else tokenizer.checksum)
        self.note = f"{self._source}: {'; '.join(self._notes)}" if self._notes else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a reading process, without the tokenizer, which may not be picklable."""
        return {**self.__dict__, "_tokenizer": None}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def divisible(self) -> int:
        """Number of texts before they are joined."""
        return len(self) if self._texts is None else len(self._texts) - 1

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each text and what defines it, in words; None if there are no classes."""
        labels = self._labels
        return None if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1 else (labels, self._by)

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> TextDataset:
        """Return some of the texts; joined texts are joined again."""
        part, places = copy.copy(self), np.asarray(indices, np.int64)
        part._tokenizer, part.groups, part._texts = self._tokenizer, None, None  # a copied dataset has no tokenizer
        if self._texts is not None:
            part._table = part._without_empty(self._table.kept(places, self._texts).joined(self.text.length or 0))
        else:
            part._table = self._table.kept(places)
            part._labels = None if self._labels is None else self._labels[places]
        part._bucket_of = np.searchsorted(self._buckets, part._table.lengths)
        part.note = self.note if like is None else None
        return part

    def words(self, index: int) -> str | None:
        """Return a text decoded from its tokens; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.words(self._table.text(index).tolist())

    @property
    def longest(self) -> int:
        """Padded length of the longest text."""
        return int(self._buckets[self._bucket_of.max()])

    def padded(self, tokens: int) -> dict[str, np.ndarray]:
        """Return a batch of the longest text, truncated or padded to ``tokens`` tokens, to test the model."""
        index = np.array([self._table.lengths.argmax()])
        extent = max(tokens, int(self._table.lengths.max()))
        label = None if self._label is None else self._label.name
        batch = self._batch(index, extent, 0, 0)
        return {name: array if name == label else array[:, :tokens] for name, array in batch.items()}

    def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Return the order of an epoch, with texts of one bucket together; see ``order_by_length``."""
        return order_by_length(self._bucket_of, batch_size, seed, epoch)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the texts at ``indices``, always with the same masks."""
        return self.batch_of_epoch(indices, 0, 0)

    def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return the texts at ``indices`` for an epoch, padded to the first bucket that holds them all."""
        indices = np.asarray(indices, np.int64)
        return self._batch(indices, int(self._buckets[self._bucket_of[indices].max(initial=0)]), seed, epoch)

    def _batch(self, indices: np.ndarray, extent: int, seed: int, epoch: int) -> dict[str, np.ndarray]:
        from_left = self.text.padding_side == "left"
        tokens, is_token = self._table.filled(indices, extent, from_left)
        labels: np.ndarray | None = None
        if self._masking is not None:
            labels = np.full_like(tokens, self._ignored)
            for row, index in enumerate(indices.tolist()):
                text = self._table.text(index)
                replaced, chosen = self._masking.masked(text, seed, epoch, index)
                places = np.flatnonzero(is_token[row])
                tokens[row, places] = replaced
                labels[row, places[chosen]] = text[chosen]
        elif self._labels is not None:
            labels = self._labels[indices]
        elif self._label is not None:
            labels = next_tokens(tokens, is_token, self._ignored, self._table.is_counted(indices, is_token))
        tokens[~is_token] = self._padding
        places = np.broadcast_to(np.arange(extent), tokens.shape)
        if from_left:
            places = np.maximum(np.cumsum(is_token, axis=1) - 1, 0)
        made = {TOKENS: tokens, MASK: is_token, SEGMENTS: np.zeros_like(tokens), PLACES: places}
        batch = {entry.name: _as(entry, made[role]) for role, entry in self._inputs.items()}
        if labels is not None and self._label is not None:
            batch[self._label.name] = _as(self._label, labels)
        return batch

    def _tokens(self, texts: Texts, tokenizer: TextTokenizer | None) -> TokenTable:
        if texts.counted is not None and texts.tokens is not None and self.text.train_on != ALL:
            table = self._with_counted(zip(texts.tokens, texts.counted, strict=True), texts)
        elif texts.tokens is not None:
            rows = enumerate(texts.tokens)
            table = TokenTable(row if self.text.joined else self._fitted(row, partial(_same, row), index) for index, row in rows)
        else:
            assert tokenizer is not None
            if texts.texts is None:
                table = self._with_counted(self._answers(texts, tokenizer), texts)
            else:
                table = TokenTable(self._encoded(texts.texts, tokenizer))
        if self.cut:
            self._notes.append(
                f"of {len(texts):,} texts, {self.cut:,} had more than {self.text.length} tokens, and lost the rest"
            )
        if not self.text.joined:
            return self._without_empty(table, texts)
        self._texts = table.starts
        return self._without_empty(table.joined(self.text.length or 0))

    def _answers(self, texts: Texts, tokenizer: TextTokenizer) -> Iterator[tuple[Tokens, np.ndarray]]:
        train_on = str(self.text.train_on)
        if texts.pairs is not None:
            marked = marked_pairs(texts.pairs, train_on)
        else:
            assert texts.conversations is not None
            settings = tokenizer.settings.with_template(self.text.chat_template)
            if settings.template is None:
                self._notes.append(
                    "the tokenizer has no chat template: messages are written as their role, a line break and their content "
                    "(--chat-template for another)"
                )
            marked = marked_conversations(texts.conversations, train_on, settings, self._source)
        for tokens, counted in tokenizer.encode_marked(marked):
            if texts.pairs is not None and tokenizer.end is not None and tokens[-1:] != [tokenizer.end]:
                tokens, counted = [*tokens, tokenizer.end], [*counted, True]
            yield tokens, np.asarray(counted, bool)

    def _with_counted(self, rows: Iterable[tuple[Tokens, np.ndarray]], texts: Texts) -> TokenTable:
        kept: list[Tokens] = []
        flags: list[np.ndarray] = [np.zeros(0, bool)]
        for index, (tokens, counted) in enumerate(rows):
            if not self.text.joined:
                tokens = self._fitted(tokens, partial(_same, tokens), index, texts.place(index))
            kept.append(tokens)
            flags.append(counted[: len(tokens)])
        return TokenTable(kept, np.concatenate(flags))

    def _encoded(self, texts: Sequence[str], tokenizer: TextTokenizer) -> Iterator[Tokens]:
        end = tokenizer.end if self.text.task == "causal" else None
        for index, tokens in enumerate(tokenizer.encode(texts)):
            if end is not None and tokens[-1:] != [end]:
                tokens = [*tokens, end]
            yield tokens if self.text.joined else self._fitted(tokens, partial(tokenizer.cut, texts[index]), index)

    def _fitted(self, tokens: Tokens, cut: Callable[[], Tokens], index: int, place: str | None = None) -> Tokens:
        length = self.text.length or 0
        if len(tokens) <= length:
            return tokens
        if self.text.too_long == "error":
            raise DataError(
                f"{self._source}: {place or f'sample {index}'} has {len(tokens)} tokens, and {length} at most are read: raise "
                "the length, shorten the text, or let long ones be cut off (too_long='cut')"
            )
        self.cut += 1
        return cut()[:length]

    def _without_empty(self, table: TokenTable, texts: Texts | None = None) -> TokenTable:
        """Remove texts that are too short to learn from; an empty text with a label becomes one padding token."""
        least = {"label": 1, "masked": 1, "causal": 2}[str(self.text.task)]
        short = table.lengths < least
        if table.counted is not None:
            table = self._without_unanswered(table, short, texts)
            short = table.lengths < least
        if not short.any():
            return table
        if self.text.task == "label":
            rows = [table.text(index) for index in range(len(table))]
            self._notes.append(f"{int(short.sum())} texts have no token")
            padding = np.array([self._padding])
            return TokenTable(padding if empty else text for text, empty in zip(rows, short, strict=True))
        if short.all():
            raise DataError(f"{self._source}: no text has {least} tokens or more")
        self._notes.append(f"{int(short.sum())} texts with fewer than {least} tokens are left out")
        if self.groups is not None and not self.text.joined:
            self.groups = self.groups[~short]
        return table.kept(np.flatnonzero(~short))

    def _without_unanswered(self, table: TokenTable, short: np.ndarray, texts: Texts | None) -> TokenTable:
        """Remove and name texts without a token that counts; for pieces of joined texts, only require that one has some."""
        kept = [index for index in range(len(table)) if table.learned(index) and not short[index]]
        lost = sorted({*range(len(table))}.difference(kept))
        what = {"completion": "a completion", "assistant": "an answer of the assistant"}.get(self.text.train_on or "", "a token")
        reason = f"nothing of {what} within {self.text.length} tokens (--max-tokens)"
        if not kept:
            raise DataError(f"{self._source}: there is {reason}, in no text: allow more tokens, or give texts with answers")
        if not lost or texts is None:
            return table
        named = ", ".join(map(texts.place, lost[:SHOWN])) + (f" and {len(lost) - SHOWN:,} more" if len(lost) > SHOWN else "")
        self._notes.append(f"left out, as there is {reason}: {len(lost):,} of {len(table):,}, {named}")
        if self.groups is not None:
            self.groups = self.groups[kept]
        return table.kept(kept)

    def _check_tokenizer(self, tokenizer: TextTokenizer | None, spec: DataSpec, texts: Texts) -> None:
        if tokenizer is None:
            if texts.tokens is None:
                raise DataError(f"{self._source}: texts become tokens by a tokenizer: name one (--tokenizer tokenizer.json)")
            return
        recorded = spec.described.text.tokenizer if spec.described.text is not None else None
        if recorded is not None and recorded != tokenizer.checksum:
            raise DataError(
                f"{self._source}: the model was trained with another tokenizer (checksum {recorded[:12]}, and this one has "
                f"{tokenizer.checksum[:12]}): give the one that it was trained with"
            )

    def _check_padding_side(self) -> None:
        if self.text.padding_side == "left" and MASK not in self._inputs:
            raise ConfigurationError(
                f"text: padding_side='left' (--padding-side): the model has no input '{MASK}' to hide padding before a text: "
                "leave it out, and texts are padded on the right"
            )

    def _check_vocabulary(self, tokenizer: TextTokenizer | None) -> None:
        entry, tokens = self._inputs[TOKENS], self._table.tokens
        low, high = entry.minimum, entry.maximum
        largest = int(tokens.max(initial=0)) if tokenizer is None else max(tokenizer.size - 1, int(tokens.max(initial=0)))
        if low is None or high is None or (largest <= high and int(tokens.min(initial=0)) >= 0):
            return
        whose = "the data hold" if tokenizer is None else "the tokenizer has"
        raise DataError(
            f"{self._source}: {whose} tokens up to {largest}, and the model's input '{entry.name}' takes 0 to {high}: take the "
            "tokenizer that the model was made for, or a model with more rows"
        )


def _same(tokens: Tokens) -> Tokens:
    return tokens


def _inputs_of(spec: DataSpec, source: str) -> dict[str, Entry]:
    known = (TOKENS, MASK, SEGMENTS, PLACES)
    inputs = {entry.name: entry for entry in spec.data}
    if len(inputs) == 1:
        inputs = {TOKENS: spec.data[0]}
    wrong = next((name for name in inputs if name not in known), None)
    if wrong is not None or TOKENS not in inputs:
        has = ", ".join(repr(entry.name) for entry in spec.data)
        raise DataError(
            f"{source}: texts fill the inputs {', '.join(map(repr, known))}, or the only one of a model, and this one has {has}: "
            "give arrays by input name"
        )
    for entry in inputs.values():
        if len(entry.extents) != 2 or (entry.name == inputs[TOKENS].name and entry.dtype.is_floating_point()):
            raise DataError(
                f"{source}: the input '{entry.name}' is {entry.dtype} of {len(entry.extents)} dimensions, and texts give whole "
                "numbers [samples, tokens]: take a model that reads tokens"
            )
    return inputs


def _is_of_tokens(label: Entry, tokens: Entry) -> bool:
    """True if the loss takes a class per token: the label's second extent is symbolic if that of the tokens is."""
    return (
        not label.dtype.is_floating_point()
        and len(label.extents) == 2
        and isinstance(label.extents[1], int) <= isinstance(tokens.extents[1], int)
    )


def _ignored(label: Entry, tokens: Entry, source: str, task: str) -> int:
    if not _is_of_tokens(label, tokens) or label.dtype.is_floating_point():
        raise DataError(
            f"{source}: the task '{task}' has a label for each token, and the loss compares with '{label.name}' "
            f"[{', '.join(map(str, label.extents))}]: a model of language gives [batch, tokens, vocabulary], and its loss is "
            f"{CLASSES_LAST} (--loss {CLASSES_LAST})"
        )
    if label.ignored is None:
        raise DataError(
            f"{source}: the loss counts every token, padding too: choose one with an ignore_index, such as {CLASSES_LAST}"
        )
    return label.ignored


def _masking(text: Text, tokenizer: TextTokenizer | None, source: str) -> Masking:
    if tokenizer is None:
        raise DataError(f"{source}: which token is the mask, the tokenizer knows: name it (--tokenizer tokenizer.json)")
    if tokenizer.mask is None:
        raise DataError(f"{source}: the tokenizer has no token [MASK] or <mask>: train one with it, or choose the task 'causal'")
    return Masking(text.masked_share, tokenizer.mask, tokenizer.size, tokenizer.special)


def _as(entry: Entry, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=entry.numpy_dtype)
