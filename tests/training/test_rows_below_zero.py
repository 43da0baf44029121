"""Numbers below 0 for rows of a table, which the standard counts from its end."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import ObjectiveWarning


def test_numbers_below_0_for_rows_of_a_table_are_warned_of():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (int64[N, T] x) => (float[N, 2] y)
        <float[3, 2] table = {1, 2, 3, 4, 5, 6}, int64[1] axis = {1}> {
            e = Gather (table, x)
            y = ReduceMean <keepdims = 0> (e, axis)
        }"""
    )
    program = burnish.compile(model, optimizer="sgd:lr=0.1")
    labels = np.array([0, 1])
    with burnish.Session(program) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        session.step({"x": np.array([[0, 2], [1, 1]]), "labels": labels})
    with burnish.Session(program) as session:
        with pytest.warns(
            ObjectiveWarning, match=r"'x' holds -1, .* rows from the end of its table, here row 2: where -1 stands"
        ):
            session.step({"x": np.array([[0, -1], [1, 1]]), "labels": labels})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once in a session
            session.step({"x": np.array([[0, -1], [1, 1]]), "labels": labels})
