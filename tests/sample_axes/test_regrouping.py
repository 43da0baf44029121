"""The axes of a Reshape, from the factors of its operand's: they are cut where the numbers of the target say."""

from __future__ import annotations

import pytest

from burnish.operators.extents import Factor, Kind, Number, broadcast, has, regrouped

N, T, U = Factor("n", Kind.SAMPLES), Factor("t", Kind.FIXED), Factor("u", Kind.FIXED)
TWO = Factor("two", Kind.SAMPLES, extent=2)
LOST = Factor("lost", Kind.LOST, reason="Sort mixes samples")
REST = None


def number(*factors: int | Factor) -> Number:
    return Number.of(factors)


@pytest.mark.parametrize(
    ("axes", "target", "expected"),
    [
        ([(N,), (T,), (6,)], [number(N), REST], [(N,), (T, 6)]),
        ([(N,), (T,), (6,)], [REST, number(6)], [(N, T), (6,)]),
        ([(T,), (N,), (6,)], [REST, number(6)], [(T, N), (6,)]),
        ([(T, N), (6,)], [number(T), number(N), number(6)], [(T,), (N,), (6,)]),
        ([(N,), (T,), (6,)], [number(N), number(T), number(2), number(3)], [(N,), (T,), (2,), (3,)]),
        ([(N,), (T,), (2,), (3,)], [number(N), number(T), number(6)], [(N,), (T,), (6,)]),
        ([(N,), (8,), (8,), (7,), (7,), (5,)], [REST, number(49), number(5)], [(N, 64), (49,), (5,)]),
        ([(N, T), (6,)], [number(N, T), number(6)], [(N, T), (6,)]),
        ([(N,), (U,), (6,)], [number(N), number(T), number(6)], [(N,), (U,), (6,)]),
        ([(N,), (U,), (6,)], [number(N), number(T), number(4), REST], [(N,), (T,), (4,), None]),
        ([(TWO,), (3,), (4,)], [number(6), number(4)], [(TWO, 3), (4,)]),
        ([(N,), (6,)], [REST], [(N, 6)]),
        ([(), (N,)], [number(1), REST, number(1)], [(), (N,), ()]),
    ],
)
def test_places_that_are_told(axes, target, expected):
    result = regrouped(tuple(axes), target, "node", "lost")
    assert len(result) == len(expected)
    for axis, wanted in zip(result, expected, strict=True):
        if wanted is None:
            assert not has(axis, Kind.SAMPLES)
            assert not has(axis, Kind.LOST)
        else:
            assert axis == wanted


@pytest.mark.parametrize(
    ("axes", "target"),
    [
        ([(N,), (6,)], [REST, number(4)]),
        ([(N,), (U,), (6,)], [number(T), REST, number(6)]),
        ([(LOST,), (6,)], [number(N), REST]),
        ([(TWO,), (3,), (4,)], [number(4), REST]),
    ],
)
def test_places_that_are_lost(axes, target):
    result = regrouped(tuple(axes), target, "node", "Reshape mixes samples")
    assert any(has(axis, Kind.LOST) or (has(axis, Kind.SAMPLES) and len(axis) > 1) for axis in result)


def test_one_sample_that_the_model_fixes_stays_among_the_places():
    one = Factor("one", Kind.SAMPLES, extent=1)
    assert regrouped(((one,), (5,), (4,)), [number(5), number(4)], "node", "") == ((one, 5), (4,))
    assert regrouped(((5,), (one,)), [number(5)], "node", "") == ((5, one),)


UNIFORM = Factor("n", Kind.SAMPLES, is_uniform=True)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((N,), (), (N,)),
        ((N,), (N,), (N,)),
        ((N,), (U,), (N,)),
        ((N,), (LOST,), (N,)),
        ((5,), (LOST,), (5,)),
        ((T,), (LOST,), (LOST,)),
        ((UNIFORM,), (LOST,), (LOST,)),
        ((5,), (T,), (5,)),
        ((TWO,), (2,), (TWO,)),
    ],
)
def test_axes_that_are_broadcast(one, other, expected):
    assert broadcast(one, other, "node", "lost") == expected
    assert broadcast(other, one, "node", "lost") == expected


def test_axes_whose_symbols_are_called_differently():
    assert broadcast((N, T), (N, U), "node", "lost") == (N, T)
    assert broadcast((T,), (U,), "node", "lost") == (Factor("node", Kind.FIXED),)


def test_axes_in_which_samples_stand_elsewhere():
    assert has(broadcast((N, T), (T, N), "node", "Add mixes samples"), Kind.LOST)
    assert not broadcast((UNIFORM,), (N,), "node", "")[0].is_uniform
