"""Names of open dimensions behind a Reshape, in files whose names look as if inference had made them up."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from burnish.importer.reshaped_dimensions import name_reshaped_dimensions


def test_a_dimension_that_comes_back_under_its_own_name_stays():
    """tf2onnx writes such names itself."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[unk__0, 64] x, int64[1] flat, int64[2] back) => (float[unk__0, 64] y) <float[unk__1] rows> {
            rows = Reshape(x, flat) y = Reshape(rows, back)
        }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    name_reshaped_dimensions(model)
    rows, y = (node.outputs[0].shape for node in model.graph)
    assert [str(dim) for dim in rows] == ["64*unk__0"]
    assert [str(dim) for dim in y] == ["unk__0", "64"]
