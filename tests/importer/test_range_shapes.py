"""Ranges along an open axis have its extent, so that the masks made of them are known to fit."""

from __future__ import annotations

import onnx
import pytest

import burnish
from burnish.operators.attention import ATTENTION
from burnish.rewriting.recognize_attention import recognize_attention
from oracles.rewritten import rewritten
from oracles.runtime_operators import Case, cases

MASKED = [case for case in cases() if case.op_type == "Attention" and case.name in ("unidirectional", "keys_causal", "ends")]


@pytest.mark.parametrize(
    ("length", "extent"),
    [
        ("n = Gather (s, one)", "M"),
        ("v = Slice (s, at, behind)\n n = Squeeze (v)", "M"),
        ("t = Shape <start = 1, end = 2> (x)\n i = Cast <to = 7> (t)\n n = Reshape (i, none)", "M"),
        ("g = Gather (s, one)\n n = Add (g, one)", None),
        ("n = ReduceProd <keepdims = 0> (s)", None),
    ],
    ids=["gather", "slice", "shape", "longer", "product"],
)
def test_what_counts_along_an_axis_has_its_extent(length: str, extent: str | None) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, M] x) => (int64[K] y, int64[L] z)
    <int64 zero = {{0}}, int64 one = {{1}}, int64[1] at = {{1}}, int64[1] behind = {{2}}, int64[0] none = {{}}> {{
        s = Shape (x)
        {length}
        counted = Range (zero, n, one)
        later = Range (one, n, one)
        y = Neg (counted)
        z = Neg (later)
    }}""")
    graph = burnish.load(model).graph
    made = {output.name: output.shape for node in graph for output in node.outputs}
    assert (str(made["counted"]) == "[M]") == (extent is not None)
    assert str(made["later"]) != "[M]"


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_attention_with_an_open_length_is_recognized(case: Case) -> None:
    file = case.model(symbolic=True)
    file.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    model = rewritten(recognize_attention, burnish.load(file))
    assert any(ATTENTION.is_of(node) for node in model.graph)
