"""Whether two states are the same, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def assert_same_state(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].shape == array.shape, name
        assert actual[name].tobytes() == array.tobytes(), name
