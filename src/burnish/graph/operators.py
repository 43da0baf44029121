"""Operators of the standard that draw numbers."""

from __future__ import annotations

RANDOM_OPERATORS = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""What draws numbers, or may."""
