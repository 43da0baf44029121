"""Tokens of many texts in memory, batches of like lengths, and random masks over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Tokens = Sequence[int] | np.ndarray
"""Of one text."""
ORDER = 0
"""The stream of random numbers for the order, as ``Loader`` has it."""


class TokenTable:
    """Tokens of many texts, four bytes each.

    Attributes:
        tokens: of all texts, int32 [all].
        starts: where each text begins, and where the last ends, int64 [texts + 1].
        lengths: tokens of each text, int64 [texts].
        counted: which of the tokens a language model is to learn, bool [all]; None for all of them.
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
        """Return the tokens of a text, int32 [length]; not to be changed."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def learned(self, index: int) -> int:
        """Return how many tokens of a text a language model learns, each from those before it."""
        if self.counted is None:
            return max(int(self.lengths[index]) - 1, 0)
        return int(self.counted[self.starts[index] + 1 : self.starts[index + 1]].sum())

    def kept(self, indices: Sequence[int] | np.ndarray, starts: np.ndarray | None = None) -> TokenTable:
        """Return the table of some of the texts.

        Args:
            indices: of the texts.
            starts: where texts begin among all tokens, and where the last ends, if they are others than those of the table.
        """
        starts = self.starts if starts is None else starts
        places = [slice(int(starts[index]), int(starts[index + 1])) for index in indices]
        counted = None if self.counted is None else np.concatenate([self.counted[:0], *(self.counted[place] for place in places)])
        return TokenTable([self.tokens[place] for place in places], counted)

    def joined(self, length: int) -> TokenTable:
        """Return the tokens of all texts cut into pieces of a length; the last may be shorter."""
        pieces = (self.tokens[start : start + length] for start in range(0, len(self.tokens), length))
        return TokenTable(pieces, self.counted)

    def filled(self, indices: np.ndarray, extent: int, from_left: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return texts [n, extent], int64, with 0 around each, and which places hold tokens, bool [n, extent].

        Args:
            indices: of the texts, int64 [n].
            extent: tokens of the longest or more.
            from_left: True to put what fills a row up before the text, not after it.
        """
        lengths = self.lengths[indices][:, None]
        is_token = np.arange(extent) >= extent - lengths if from_left else np.arange(extent) < lengths
        filled = np.zeros((len(indices), extent), np.int64)
        filled[is_token] = np.concatenate([self.text(index) for index in indices.tolist()] or [self.tokens[:0]])
        return filled, is_token

    def is_counted(self, indices: np.ndarray, is_token: np.ndarray) -> np.ndarray:
        """Return which places hold tokens that count, bool [n, extent].

        Args:
            indices, is_token: as ``filled`` takes and returns them.
        """
        if self.counted is None:
            return is_token
        counted = np.zeros_like(is_token)
        parts = [self.counted[self.starts[index] : self.starts[index + 1]] for index in indices.tolist()]
        counted[is_token] = np.concatenate(parts or [self.counted[:0]])
        return counted


def order_by_length(buckets: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch in which most batches hold samples of one bucket.

    The samples are shuffled, those of each bucket stay together, and the batches that are cut are shuffled. Batches on the border
    of two buckets hold samples of both. The samples of a last batch that is shorter are drawn from all.

    Args:
        buckets: which bucket each sample belongs to, [samples].
        batch_size: samples in a batch.
        seed, epoch: what the order is a function of.

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
"""The stream of random numbers for masks; ``Loader`` has others for the order and for augmentation."""
MASKED, OTHER = 0.8, 0.9
"""Of the tokens that are chosen, four fifths become the mask, a tenth any other token, and a tenth stays."""


@dataclass(frozen=True)
class Masking:
    """Chooses tokens that a model is to tell, after Devlin et al. 2018, appendix A.1, and its published code.

    Of the tokens of a text that stand for a piece of it, ``share`` are chosen, rounded, and one at least. What is chosen, and
    what becomes of it, is a function of the seed, the epoch and the number of the text alone: not of the batch that it is in, of
    how far it is padded, or of how many workers there are.

    Attributes:
        share: of the tokens.
        mask: the token that stands for a gap.
        size: how many tokens there are.
        special: those that are never chosen, and that no token becomes.
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
        """The tokens that stand for a piece of text; the mask alone where there is none."""
        ordinary = np.setdiff1d(np.arange(self.size), self._special, assume_unique=True)
        return ordinary if len(ordinary) else np.array([self.mask])

    def masked(self, tokens: np.ndarray, seed: int, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text with those that were chosen replaced, and which they are.

        Args:
            tokens: [length].
            seed, epoch, number: what the choice is a function of.

        Returns:
            The tokens, and which were chosen, bool [length].
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
    """Return, for each place, the token after it, [n, places]; ``ignored`` where there is none, or it does not count.

    Args:
        tokens: [n, places].
        is_token: which places hold tokens, and no padding.
        ignored: the label that counts nowhere.
        is_counted: which tokens count; None for all.
    """
    labels = np.full_like(tokens, ignored)
    # What stands before the first token of a text is padding, from which nothing is learned.
    is_learned = is_token[:, :-1] & (is_token if is_counted is None else is_counted)[:, 1:]
    labels[:, :-1] = np.where(is_learned, tokens[:, 1:], ignored)
    return labels
