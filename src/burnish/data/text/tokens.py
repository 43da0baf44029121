"""Tokens of many texts, one after the other in memory, and the order in which batches of like lengths come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """

    def __init__(self, texts: Iterable[Tokens]):
        pieces = [np.asarray(text, dtype=np.int32) for text in texts]
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        self.tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, index: int) -> np.ndarray:
        """Return the tokens of a text, int32 [length]; not to be changed."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def joined(self, length: int) -> TokenTable:
        """Return the tokens of all texts cut into pieces of a length; the last may be shorter."""
        return TokenTable(self.tokens[start : start + length] for start in range(0, len(self.tokens), length))

    def filled(self, indices: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Return texts [n, extent], int64, with 0 after each, and which places hold tokens, bool [n, extent]."""
        is_token = np.arange(extent) < self.lengths[indices][:, None]
        filled = np.zeros((len(indices), extent), np.int64)
        filled[is_token] = np.concatenate([self.text(index) for index in indices.tolist()] or [self.tokens[:0]])
        return filled, is_token


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
