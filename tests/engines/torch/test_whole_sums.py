"""Rows that a lowering sums block by block are one reduction on a GPU."""

from __future__ import annotations

import onnx
import pytest
import torch

import burnish
from burnish.engines.torch.fusion import sum_whole_rows
from burnish.engines.torch.translate.translation import run, translate

CPU = torch.device("cpu")


def model_of(stages: str, source: str = "[batch, 48]", split: str = "0, 4, 12", result: str = "[batch, 1]"):
    count = split.count(",") + 1
    return burnish.load(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float{source} x) => (float{result} y) <int64[{count}] s = {{{split}}}, int64[1] last = {{-1}}, int64[1] first = {{1}}>
        {{
            blocks = Reshape (x, s)
            {stages}
        }}""")
    )


TWO = "part = ReduceSum <keepdims = 0> (blocks, last)\n y = ReduceSum <keepdims = 1> (part, last)"
FORMS = {
    "two stages": {"stages": TWO},
    "squares": {"stages": TWO.replace("ReduceSum <keepdims = 0>", "ReduceSumSquare <keepdims = 0>")},
    "three stages of two axes": {
        "stages": "more = ReduceSum <keepdims = 0> (blocks, last)\n" + TWO.replace("(blocks", "(more"),
        "source": "[batch, 6, 8]",
        "split": "0, 4, 2, 6",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_stages_become_one_reduction_of_the_same_sum(form):
    model = model_of(**FORMS[form])
    extents = [3 if extent == "batch" else int(extent) for extent in FORMS[form].get("source", "[batch, 48]")[1:-1].split(", ")]
    x = torch.randn(extents, generator=torch.Generator().manual_seed(0))
    expected = run(translate(model, CPU), model, {"x": x})["y"]
    sum_whole_rows(model.graph)
    kinds = [node.op_type for node in model.graph if node.op_type != "Constant"]
    assert sum(kind.startswith("ReduceSum") for kind in kinds) == 1
    torch.testing.assert_close(run(translate(model, CPU), model, {"x": x})["y"], expected)


@pytest.mark.parametrize(
    "form",
    [
        {"stages": TWO.replace("(blocks, last)", "(blocks, first)")},
        {"stages": TWO, "source": "[4, 48]", "split": "2, 8, 12", "result": "[2, 1]"},
        {"stages": TWO.replace("keepdims = 1", "keepdims = 0"), "result": "[batch]"},
        {"stages": "y = ReduceSum <keepdims = 1> (blocks, last)", "result": "[batch, 4, 1]"},
    ],
    ids=["another axis", "rows that are joined", "an axis that goes", "one stage"],
)
def test_what_has_another_form_stays(form):
    model = model_of(**form)
    before = [node.op_type for node in model.graph]
    sum_whole_rows(model.graph)
    assert [node.op_type for node in model.graph] == before
