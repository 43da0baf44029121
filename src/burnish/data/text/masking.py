"""What a language model is to say of tokens: those that are masked, or the next one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

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


def next_tokens(tokens: np.ndarray, is_token: np.ndarray, ignored: int) -> np.ndarray:
    """Return, for each place, the token after it, [n, places]; ``ignored`` where there is none.

    Args:
        tokens: [n, places].
        is_token: which places hold tokens, and no padding.
        ignored: the label that counts nowhere.
    """
    labels = np.full_like(tokens, ignored)
    labels[:, :-1] = np.where(is_token[:, 1:], tokens[:, 1:], ignored)
    return labels
