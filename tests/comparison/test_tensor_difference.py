"""How far arrays are apart."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from burnish.comparison.tensor_difference import Difference, Tolerance, difference
from burnish.errors import ConfigurationError


def test_floating_point_values_by_norm_and_by_largest_entry():
    found = difference(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    assert found.by_norm == pytest.approx(0.5 / math.hypot(3, 4.5))
    assert found.by_max == pytest.approx(0.5 / 4.5)
    assert found.absolute == 0.5
    assert found.relative == found.by_max


def test_a_scale_measures_what_cancels():
    found = difference(np.array([1e-8]), np.array([-1e-8]), np.array([2.0]))
    assert found.relative == pytest.approx(1e-8)


def test_values_of_sixteen_bits_and_of_the_ends_of_the_range():
    tiny, huge = np.array([1e-300, 2e-300]), np.array([1e300, 2e300])
    assert difference(tiny, 2 * tiny).by_norm == pytest.approx(0.5)
    assert difference(huge, 2 * huge).by_norm == pytest.approx(0.5)
    one, two = np.array([1], ml_dtypes.bfloat16), np.array([2], ml_dtypes.bfloat16)
    assert difference(one, two) == Difference(0.5, 0.5, 1.0)


def test_integers_must_be_equal():
    found = difference(np.array([1, 2, 3, 9]), np.array([1, 2, 3, 4]))
    assert found == Difference(0.25, 1.0, 5.0)
    assert difference(np.array([True]), np.array([True])).relative == 0
    assert not Tolerance(rtol=0.5).allows(found, np.dtype(np.int64))
    assert Tolerance(atol=5).allows(found, np.dtype(np.int64))


@pytest.mark.parametrize(("first", "second"), [([math.nan, 1], [1, 1]), ([math.inf, 1], [-math.inf, 1]), ([1, 2, 3], [1, 2])])
def test_what_cannot_be_measured_is_infinitely_far(first, second):
    assert difference(np.array(first, float), np.array(second, float)).relative == math.inf


def test_the_same_nans_agree_and_so_do_empty_arrays():
    assert difference(np.array([math.nan, -math.inf, 2.0]), np.array([math.nan, -math.inf, 2.0])).relative == 0
    assert difference(np.empty((0, 2)), np.empty((0, 2))).relative == 0
    assert difference(np.array([math.nan, 1.0]), np.array([math.nan, 2.0])).relative == 0.5


def test_tolerances_follow_the_dtype():
    tolerance = Tolerance()
    assert tolerance.relative(np.dtype(np.float32)) == pytest.approx(1.19e-4, rel=1e-2)
    assert tolerance.relative(np.dtype(np.float64)) == pytest.approx(2.2e-13, rel=1e-2)
    assert tolerance.relative(np.dtype(np.float16)) == pytest.approx(1.56e-2, rel=1e-2)
    assert tolerance.relative(np.dtype(ml_dtypes.bfloat16)) == 0.125
    assert Tolerance(rtol=1e-3).relative(np.dtype(np.float64)) == 1e-3


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_tolerance_is_a_finite_number(value):
    with pytest.raises(ConfigurationError, match=r"atol=.*: give a finite number that is not negative"):
        Tolerance(atol=value)
