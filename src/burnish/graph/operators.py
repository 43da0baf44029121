"""Sets of standard operators that several parts of the library go by."""

from __future__ import annotations

RANDOM_OPERATORS = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""What draws numbers, or may."""
