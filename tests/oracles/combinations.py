"""Fewer cases than a whole product of options, in which each few of the options still meet in every way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


def covering(
    *options: tuple[Any, ...], together: int = 3, where: Callable[..., bool] = lambda *row: True
) -> list[tuple[Any, ...]]:
    """Return rows of the product of the options in which every choice of values for any ``together`` of them stands.

    Rows that ``where`` does not hold for, which takes a value of each option, are none.

    A mistake that shows only where particular values of that many options meet is in one of the rows. They come in the order of
    the product, the same each time: of the rows left, the one that brings the most that is new is taken first.
    """
    product = itertools.product(*(range(len(values)) for values in options))
    rows = [row for row in product if where(*(values[place] for values, place in zip(options, row, strict=True)))]
    positions = list(itertools.combinations(range(len(options)), min(together, len(options))))
    met = [{(places, tuple(row[position] for position in places)) for places in positions} for row in rows]
    missing = set().union(*met)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(met[index] & missing))
        missing -= met[best]
        chosen.append(best)
    return [tuple(values[place] for values, place in zip(options, rows[index], strict=True)) for index in sorted(chosen)]
