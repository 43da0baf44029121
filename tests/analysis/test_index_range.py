"""The range of inputs that select rows: in every graph's signature, checked before anything runs, drawn from at random."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.data.random_data import random_batches
from burnish.errors import InputError, ModelError
from burnish.program import Role

MODEL = """<ir_version: 8, opset_import: ["": 18]>
g (int64[N, 3] ids, int64[N, 3] seen, float[N, 3] scale, int64[N] kept) => (float[N, 2] y)
<float[7, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14},
 float[3, 5] other = {1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5},
 int64[1] flat = {-1}, int64[3] back = {-1, 3, 2}, int64[1] axis = {1}> {
    small = Cast <to = 6> (ids)
    line = Reshape (small, flat)
    rows = Gather (table, line)
    shaped = Reshape (rows, back)
    columns = Gather <axis = 1> (other, kept)
    turned = Transpose (columns)
    rest = ReduceSum <keepdims = 1> (turned, axis)
    positive = Relu (scale)
    wide = Unsqueeze (positive, axis)
    mixed = MatMul (wide, shaped)
    row = Squeeze (mixed, axis)
    counted = Cast <to = 1> (seen)
    count = ReduceSum <keepdims = 1> (counted, axis)
    moved = Add (row, count)
    y = Add (moved, rest)
}"""
RANGES = {"ids": (-7, 6), "seen": (None, None), "scale": (None, None), "kept": (-5, 4)}


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(onnx.parser.parse_model(MODEL))


def batch(**changes: np.ndarray) -> dict[str, np.ndarray]:
    ids = np.array([[0, 6, -7], [1, 2, 3]])
    values = {"ids": ids, "seen": ids * 1000, "scale": np.ones((2, 3), np.float32), "kept": np.array([4, -5])}
    return values | {"labels": np.array([0, 1])} | changes


@pytest.mark.parametrize("graph", ["step", "grad", "evaluate", "predict"])
def test_every_graph_knows_the_range(program, graph, tmp_path):
    program.save(tmp_path / "saved")
    for each in (program, burnish.Program.load(tmp_path / "saved")):
        inputs = each.signature[graph].inputs_of(Role.DATA)
        assert {entry.name: (entry.minimum, entry.maximum) for entry in inputs} == RANGES


@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
def test_an_index_beyond_the_rows_is_an_error_that_names_it(program, engine):
    session = burnish.Session(program, engine=engine)
    session.step(batch())
    before = session.state()
    wrong = batch(ids=np.array([[0, 1, 2], [3, 7, 4]]))
    message = r"'ids' holds 7 at \[1, 1\], out of range: valid are -7\.\.6\. Number them as the model was made to read them"
    for call in (
        session.step,
        session.evaluate,
        lambda given: session.predict({k: v for k, v in given.items() if k != "labels"}),
    ):
        with pytest.raises(InputError, match=message):
            call(wrong)
    with pytest.raises(InputError, match=r"'kept' holds -6 at \[0\], out of range: valid are -5\.\.4"):
        session.step(batch(kept=np.array([-6, 0])))
    assert all(np.array_equal(value, before[name]) for name, value in session.state().items())


def test_random_batches_are_of_rows_that_there_are(program):
    drawn = next(random_batches(program, batch_size=64))
    assert set(np.unique(drawn["ids"])) == set(range(7))
    assert set(np.unique(drawn["kept"])) == set(range(5))


def test_a_gather_along_an_axis_that_there_is_not() -> None:
    """The standard's inference does not see that an axis so far below zero is none."""
    model = ir.from_proto(onnx.parser.parse_model(MODEL))
    gather = next(node for node in model.graph if node.op_type == "Gather")
    gather.attributes["axis"] = ir.AttrInt64("axis", -(1 << 63))
    with pytest.raises(ModelError, match=r"Gather .* gathers along axis -9223372036854775808 of '.*table', which has 2 axes"):
        burnish.compile(model)
