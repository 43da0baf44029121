"""Tokens of many texts in memory, batches of similar lengths, and random masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Tokens = Sequence[int] | np.ndarray
"""Tokens of one text."""
ORDER = 0
"""Key of the random stream for the order, equal to that of ``Loader``."""


class TokenTable:
    """Tokens of many texts, four bytes each.

    Attributes:
        tokens: tokens of all texts, int32 [all].
        starts: start of each text, and the end of the last, int64 [texts + 1].
        lengths: tokens of each text, int64 [texts].
        counted: mask of the tokens that a language model learns, bool [all]; None for all.
    """

    def __init__(self, texts: Iterable[Tokens], counted: np.ndarray | None = None):
        pieces = [np.asarray(text, dtype=np.int32) for text in texts]
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        self.tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        self.counted = counted

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, index: int) -> np.ndarray:
        """Return the tokens of a text, int32 [length], as a view."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def learned(self, index: int) -> int:
        """Return the number of tokens that a language model learns from a text."""
        if self.counted is None:
            return max(int(self.lengths[index]) - 1, 0)
        return int(self.counted[self.starts[index] + 1 : self.starts[index + 1]].sum())

    def kept(self, indices: Sequence[int] | np.ndarray, starts: np.ndarray | None = None) -> TokenTable:
        """Return the table of some texts.

        Args:
            indices: numbers of the texts.
            starts: other boundaries of texts among all tokens, instead of the table's.
        """
        starts = self.starts if starts is None else starts
        places = [slice(int(starts[index]), int(starts[index + 1])) for index in indices]
        counted = None if self.counted is None else np.concatenate([self.counted[:0], *(self.counted[place] for place in places)])
        return TokenTable([self.tokens[place] for place in places], counted)

    def joined(self, length: int) -> TokenTable:
        """Return all tokens cut into pieces of ``length``; the last may be shorter."""
        pieces = (self.tokens[start : start + length] for start in range(0, len(self.tokens), length))
        return TokenTable(pieces, self.counted)

    def filled(self, indices: np.ndarray, extent: int, from_left: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return texts padded with 0, int64 [n, extent], and the mask of tokens, bool [n, extent].

        Args:
            indices: numbers of the texts, int64 [n].
            extent: padded length.
            from_left: True to pad on the left.
        """
        lengths = self.lengths[indices][:, None]
        is_token = np.arange(extent) >= extent - lengths if from_left else np.arange(extent) < lengths
        filled = np.zeros((len(indices), extent), np.int64)
        filled[is_token] = np.concatenate([self.text(index) for index in indices.tolist()] or [self.tokens[:0]])
        return filled, is_token

    def is_counted(self, indices: np.ndarray, is_token: np.ndarray) -> np.ndarray:
        """Return the mask of tokens that count, bool [n, extent].

        Args:
            indices, is_token: argument and result of ``filled``.
        """
        if self.counted is None:
            return is_token
        counted = np.zeros_like(is_token)
        parts = [self.counted[self.starts[index] : self.starts[index + 1]] for index in indices.tolist()]
        counted[is_token] = np.concatenate(parts or [self.counted[:0]])
        return counted


def order_by_length(buckets: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return an order of an epoch in which most batches have samples of one bucket.

    The samples are shuffled and grouped by bucket; then the batches are shuffled. A batch at the border of two buckets has
    samples of both. A smaller last batch is drawn from all samples.

    Args:
        buckets: bucket of each sample, [samples].
        batch_size: samples per batch.
        seed, epoch: seeds of the order.

    Returns:
        The indices of all samples, int64 [samples].
    """
    generator = np.random.default_rng((seed, ORDER, epoch))
    shuffled = generator.permutation(len(buckets)).astype(np.int64)
    whole = len(buckets) // batch_size * batch_size
    grouped = shuffled[:whole][np.argsort(buckets[shuffled[:whole]], kind="stable")]
    batches = generator.permutation(grouped.reshape(-1, batch_size))
    return np.concatenate([batches.reshape(-1), shuffled[whole:]])


MASKING = 2
"""Key of the random stream for masks, distinct from those of ``Loader``."""
MASKED, OTHER = 0.8, 0.9
"""Four fifths of the chosen tokens become the mask, a tenth another token, and a tenth stay."""


@dataclass(frozen=True)
class Masking:
    """Random choice of tokens to predict, after Devlin et al. 2018, appendix A.1, and its published code.

    ``share`` of a text's ordinary tokens are chosen, rounded, and at least one. The choice depends only on the seed, the epoch
    and the number of the text, and not on its batch, padding or the number of workers.

    Attributes:
        share: share of tokens.
        mask: the mask token.
        size: number of tokens in the vocabulary.
        special: tokens that are never chosen nor inserted.
    """

    share: float
    mask: int
    size: int
    special: frozenset[int]

    @cached_property
    def _special(self) -> np.ndarray:
        return np.array(sorted(self.special), np.int64)

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """Tokens to insert: all but special ones; the mask if there are none."""
        ordinary = np.setdiff1d(np.arange(self.size), self._special, assume_unique=True)
        return ordinary if len(ordinary) else np.array([self.mask])

    def masked(self, tokens: np.ndarray, seed: int, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text with the chosen ones replaced.

        Args:
            tokens: [length].
            seed, epoch, number: seeds of the choice.

        Returns:
            The tokens, and the mask of chosen ones, bool [length].
        """
        generator = np.random.default_rng((seed, MASKING, epoch, number))
        open_places = np.flatnonzero(~np.isin(tokens, self._special))
        count = min(len(open_places), max(1, round(self.share * len(open_places))))
        places = generator.permutation(open_places)[:count]
        draws = generator.random(count)
        others = self._ordinary[generator.integers(0, len(self._ordinary), count)]
        replaced, chosen = tokens.copy(), np.zeros(len(tokens), bool)
        chosen[places] = True
        replaced[places] = np.where(draws < MASKED, self.mask, np.where(draws < OTHER, others, tokens[places]))
        return replaced, chosen


def next_tokens(tokens: np.ndarray, is_token: np.ndarray, ignored: int, is_counted: np.ndarray | None = None) -> np.ndarray:
    """Return the next token at each place, [n, places]; ``ignored`` if there is none or it does not count.

    Args:
        tokens: [n, places].
        is_token: mask of tokens, without padding.
        ignored: the label that the loss ignores.
        is_counted: mask of tokens that count; None for all.
    """
    labels = np.full_like(tokens, ignored)
    # Left padding: nothing is learned from the padding before the first token.
    is_learned = is_token[:, :-1] & (is_token if is_counted is None else is_counted)[:, 1:]
    labels[:, :-1] = np.where(is_learned, tokens[:, 1:], ignored)
    return labels
