"""Fewer cases than there are: some of a list, the diagonal of a product, rows in which each few options still meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def spread(
    names: str | Sequence[str],
    cases: Iterable[Any],
    *,
    test: int | None = None,
    test_all: int | None = None,
    ids: Iterable[Any] | Callable[[Any], Any] | None = None,
) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` with marks that say which command runs which case.

    Args:
        names: of the parameters.
        cases: values, or tuples of one for each name, or what ``pytest.param`` returns.
        test: how many cases ``make test`` runs, spread evenly over those of ``make test-all``; None for all of these.
        test_all: how many ``make test-all`` runs, spread evenly; None for all. The others are left to ``make test-campaign``.
        ids: as ``pytest.mark.parametrize`` takes them.
    """
    names = _listed(names)
    rows = [_row(names, case) for case in cases]
    regular = _evenly(range(len(rows)), test_all)
    quick = _evenly(regular, test)
    for index in range(len(rows)):
        if index not in regular:
            rows[index] = _marked(rows[index], pytest.mark.campaign)
        elif index not in quick:
            rows[index] = _marked(rows[index], pytest.mark.slow)
    return pytest.mark.parametrize(names if len(names) > 1 else names[0], rows, ids=ids)


def diagonal(*axes: tuple[str | Sequence[str], Iterable[Any]], test: int | None = None) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` for a product, of which every command but the campaign runs the diagonal.

    The diagonal has as many rows as the longest axis has values, and every value of every axis stands in it. ``make test`` runs
    ``test`` of these rows, or all; ``make test-all`` runs them all, and ``make test-campaign`` the rest of the product.

    Args:
        axes: the names of parameters and their values, as ``pytest.mark.parametrize`` takes them.
        test: how many rows ``make test`` runs, spread evenly.
    """
    names = [_listed(of_axis) for of_axis, _ in axes]
    values = [[_row(of_axis, case) for case in cases] for of_axis, (_, cases) in zip(names, axes, strict=True)]
    length = max(len(of_axis) for of_axis in values)
    first = [tuple(index % len(of_axis) for of_axis in values) for index in range(length)]
    rest = [places for places in itertools.product(*(range(len(of_axis)) for of_axis in values)) if places not in first]
    rows = [_joined([of_axis[place] for of_axis, place in zip(values, places, strict=True)]) for places in first + rest]
    quick = _evenly(range(length), test)
    for index in range(len(rows)):
        if index >= length:
            rows[index] = _marked(rows[index], pytest.mark.campaign)
        elif index not in quick:
            rows[index] = _marked(rows[index], pytest.mark.slow)
    return pytest.mark.parametrize([name for of_axis in names for name in of_axis], rows)


def named(values: Iterable[Any], ids: Iterable[Any] | Callable[[Any], Any]) -> list[Any]:
    """Return the values of one parameter with the names that tests have for them, for an axis of ``diagonal``."""
    listed = list(values)
    names = [ids(value) for value in listed] if callable(ids) else list(ids)
    return [pytest.param(value, id=str(name)) for value, name in zip(listed, names, strict=True)]


def _listed(names: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _evenly(places: Sequence[int], count: int | None) -> list[int]:
    """Return so many of the places, the first and the last among them."""
    if count is None or count >= len(places):
        return list(places)
    return [places[round(step * (len(places) - 1) / max(count - 1, 1))] for step in range(count)]


def _row(names: Sequence[str], case: Any) -> Any:
    """Return a case as ``pytest.param`` does."""
    if not hasattr(case, "marks"):
        return pytest.param(*case) if len(names) > 1 else pytest.param(case)
    values = case.values[0] if len(names) > 1 and len(case.values) == 1 else case.values  # of ``named``, a tuple is one value
    return pytest.param(*values, id=case.id, marks=case.marks)


def _marked(row: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*row.values, id=row.id, marks=[*row.marks, mark])


def _joined(rows: Sequence[Any]) -> Any:
    """Return one row of the values, the names and the marks of several."""
    values = [value for row in rows for value in row.values]
    ids = [row.id or "-".join(getattr(value, "__name__", None) or str(value) for value in row.values) for row in rows]
    return pytest.param(*values, id="-".join(ids), marks=[mark for row in rows for mark in row.marks])


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
