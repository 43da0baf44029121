"""An index that the graph computes, and that a table has no row of: each engine names the table, the index and its rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest

import burnish
from burnish import optim
from burnish.errors import EngineError
from oracles.combinations import diagonal

ROWS = 7
ROWS_IN = {"reference": "axis 0 with size 7", "onnxruntime": "inclusive range [-7,6]", "torch": "there are 7 rows"}


@cache
def program(sparse: str | None) -> burnish.Program:
    text = f"""
        <ir_version: 10, opset_import: ["": 18]> tokens (int64[N, 2] x) => (float[N, 2] logits)
        <float[{ROWS}, 2] embedding = {{{", ".join("1" * 2 * ROWS)}}}, float[2, 2] head = {{1, 2, 3, 4}}, int64[1] axis = {{1}},
         int64 shift = {{3}}> {{
            places = Add (x, shift)
            embedded = Gather (embedding, places)
            mean = ReduceMean <keepdims = 0> (embedded, axis)
            logits = MatMul (mean, head)
        }}"""
    return burnish.compile(onnx.parser.parse_model(text), optimizer=optim.rowwise_adagrad(lr=0.1), sparse=sparse)


@diagonal(
    (("given", "computed"), [(4, 7), (-11, -8)]),
    ("sparse", [None, "auto"]),
    ("engine", ["reference", "onnxruntime", "torch"]),
    test=5,
)
def test_the_error_names_table_index_and_rows(engine: str, sparse: str | None, given: int, computed: int) -> None:
    session = burnish.Session(program(sparse), engine=engine)
    session.step({"x": np.array([[1, 2]]), "labels": np.array([1])})
    before = session.state()
    batch = {"x": np.array([[0, 1], [2, given]]), "labels": np.array([1, 0])}
    table = r"Gather.*, which looks up rows of 'param/embedding': .*"
    for act in (session.step, session.evaluate, lambda batch: session.predict({"x": batch["x"]})):
        with pytest.raises(EngineError, match=rf"{table}[ =]{computed}\b.*No state has changed") as raised:
            act(batch)
        assert ROWS_IN[engine] in str(raised.value)
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, before[name])
    session.step({"x": np.array([[1, 2]]), "labels": np.array([1])})
