"""What the numbers of a first batch tell: rows counted from the end of a table, and labels that are the inputs themselves."""

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


def next_tokens(labels: np.ndarray, ids: np.ndarray) -> burnish.Session:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (int64[n, t] ids) => (float[n, t, 8] y)
            <float[8, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8},
             float[2, 8] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}> { x = Gather(table, ids) y = MatMul(x, w) }"""
    )
    session = burnish.Session(burnish.compile(model, loss="cross_entropy:class_axis=-1"))
    session.step({"ids": ids, "labels": labels})
    return session


@pytest.mark.slow
def test_labels_that_are_the_tokens_themselves_are_warned_of_once() -> None:
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 0]])
    with pytest.warns(ObjectiveWarning, match=r"the model learns to copy: .*\(labels\[:, :-1\] = ids\[:, 1:\]\) and -100 for"):
        session = next_tokens(ids, ids)
    padded = np.where(ids == 0, -100, ids)
    with pytest.warns(ObjectiveWarning, match="learns to copy"):
        next_tokens(padded, ids)
    shifted = np.concatenate([ids[:, 1:], np.full((2, 1), -100)], axis=1)
    masked = np.where(ids == 3, 0, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        session.step({"ids": ids, "labels": ids})
        next_tokens(shifted, ids)
        next_tokens(ids, masked)
