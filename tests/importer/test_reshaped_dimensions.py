"""Open dimensions behind a Reshape: which are known to be the batch, or a multiple of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.importer.dimensions import name_reshaped_dimensions

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'


def loaded(graph: str):
    return burnish.load(onnx.parser.parse_model(f"{HEADER}{graph}"))


def shapes(model) -> dict[str, list]:
    values = (output for node in model.graph for output in node.outputs)
    return {value.name: [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims] for value in values}


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("[batch, 6, 4]", "-1, 4", ["6*batch", 4]),
        ("[batch, 6, 4]", "-1, 24", ["batch", 24]),
        ("[batch, 6, 4]", "-1, 48", ["1/2*batch", 48]),
        ("[batch, 6, 4]", "4, -1, 3", [4, "2*batch", 3]),
    ],
)
def test_a_reshape_keeps_the_number_of_elements(source, target, expected):
    model = loaded(f"g (float{source} x) => (float y) <int64[{target.count(',') + 1}] s = {{{target}}}> {{ y = Reshape (x, s) }}")
    assert shapes(model)["y"] == expected


def test_rows_are_put_back_to_the_batch_and_added():
    model = loaded("""
    g (float[batch, 6, 4] x) => (float y) <int64[2] rows = {-1, 4}, int64[3] back = {-1, 6, 4}> {
        r = Reshape (x, rows)
        a = Relu (r)
        b = Reshape (a, back)
        y = Add (x, b)
    }""")
    found = shapes(model)
    assert found["r"] == found["a"] == ["6*batch", 4]
    assert found["b"] == found["y"] == ["batch", 6, 4]


@pytest.mark.parametrize(
    ("source", "target"),
    [("[batch, length, 4]", "-1, 4"), ("[batch, 6, 4]", "-1, 0, 4")],
    ids=["two names", "an extent that is copied"],
)
def test_what_does_not_follow_keeps_a_name_of_its_own(source, target):
    model = loaded(f"g (float{source} x) => (float y) <int64[{target.count(',') + 1}] s = {{{target}}}> {{ y = Reshape (x, s) }}")
    first = shapes(model)["y"][0]
    assert first == "batch" if target == "-1, 0, 4" else first.startswith("unk__")


def test_the_gradient_of_a_residual_around_rows_looks_for_no_shape_at_run_time():
    """As of GPT-2, whose dense layers take the rows of all sequences: what is added has one shape, and nothing is summed back."""
    numbers = ", ".join(f"{value:.2f}" for value in np.linspace(-1, 1, 16))
    source = onnx.parser.parse_model(f"""{HEADER}
    g (float[batch, 3, 4] x) => (float[batch, 3, 4] logits)
      <float[4, 4] w = {{{numbers}}}, float[3, 4] places = {{{"0.5, " * 11}0.5}},
       int64[2] rows = {{-1, 4}}, int64[3] back = {{-1, 3, 4}}>
    {{
        placed = Add (x, places)
        r = Reshape (placed, rows)
        product = MatMul (r, w)
        b = Reshape (product, back)
        logits = Add (placed, b)
    }}""")
    program = burnish.compile(source, loss="cross_entropy:class_axis=-1", optimizer="sgd", metrics=())
    kinds = {node.op_type for node in program.step.graph}
    assert "NonZero" not in kinds
    batch = {"x": np.ones((2, 3, 4), np.float32), "labels": np.ones((2, 3), np.int64)}
    with burnish.Session(program, engine="reference") as session:
        first = session.step(batch)["loss"]
        assert session.step(batch)["loss"] < first


def test_a_dimension_that_comes_back_under_its_own_name_stays():
    """Exporters write names such as unk__0 themselves, which look made up."""
    graph = "g (float[unk__0, 64] x, int64[1] flat, int64[2] back) => (float[unk__0, 64] y)"
    model = onnx.parser.parse_model(f"{HEADER}{graph} <float[unk__1] r> {{ r = Reshape (x, flat) y = Reshape (r, back) }}")
    read = ir.from_proto(model)
    name_reshaped_dimensions(read)
    assert shapes(read) == {"r": ["64*unk__0"], "y": ["unk__0", 64]}
