"""If, Loop and Scan on PyTorch: bodies that read the graph around them, run as often as the data say."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import fx

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.translate.translation import translate

BRANCH = """
agraph (float[n, 3] x, bool flag) => (float[n, 3] y, float[n, 3] z) {
    two = Constant <value = float {2.0}> ()
    scaled = Mul(x, two)
    y, z = If (flag) <
        then_branch = then () => (float[n, 3] a, float[n, 3] b) { a = Add(scaled, x)  b = Identity(scaled) },
        else_branch = otherwise () => (float[n, 3] c, float[n, 3] d) { c = Neg(x)  d = Mul(scaled, scaled) }
    >
}
"""
NESTED = """
agraph (float[n] x, bool outer, bool inner) => (float[n] y) {
    doubled = Add(x, x)
    y = If (outer) <
        then_branch = first () => (float[n] a) {
            a = If (inner) <
                then_branch = deep () => (float[n] b) { b = Mul(doubled, x) },
                else_branch = shallow () => (float[n] c) { c = Neg(doubled) }
            >
        },
        else_branch = last () => (float[n] d) { d = Identity(x) }
    >
}
"""
LOOP = """
agraph (float[3] x, int64 limit, bool start, float step) => (float[3] last, float[k, 3] all) {
    last, all = Loop (limit, start, x) <
        body = turn (int64 i, bool going, float[3] state) => (bool again, float[3] next, float[3] seen) {
            next = Add(state, step)
            seen = Mul(next, next)
            total = ReduceSum <keepdims = 0> (next)
            bound = Constant <value = float {9.0}> ()
            again = Less(total, bound)
        }
    >
}
"""
SCAN = """
agraph (float[2] start, float[n, 2] rows) => (float[2] last, float[n, 2] sums) {
    last, sums = Scan <num_scan_inputs = 1, DIRECTIONS
        body = add (float[2] state, float[2] row) => (float[2] next, float[2] seen) {
            next = Add(state, row)
            seen = Tanh(next)
        }
    > (start, rows)
}
"""


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text.strip()}'))


def both(model: ir.Model, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Run on both engines; they agree."""
    expected, actual = (engine.run(model, inputs) for engine in (OnnxRuntimeEngine(), TorchEngine()))
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-6, err_msg=name)
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
    return actual


@pytest.mark.parametrize("flag", [True, False])
def test_one_branch_is_taken(flag: bool) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    results = both(parsed(BRANCH), x=x, flag=np.array(flag))
    np.testing.assert_allclose(results["y"], 3 * x if flag else -x, rtol=1e-6)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_bodies_inside_bodies_read_the_outermost_graph(outer: bool, inner: bool) -> None:
    both(parsed(NESTED), x=np.float32([1, -2, 3]), outer=np.array(outer), inner=np.array(inner))


@pytest.mark.parametrize(("limit", "start", "turns"), [(2, True, 2), (100, True, 6), (0, True, 0), (3, False, 0)])
def test_a_loop_ends_by_its_count_or_its_condition(limit: int, start: bool, turns: int) -> None:
    inputs = {"x": np.zeros(3, np.float32), "limit": np.array(limit), "start": np.array(start), "step": np.array(0.5, np.float32)}
    results = both(parsed(LOOP), **inputs)
    assert results["all"].shape == (turns, 3)
    np.testing.assert_allclose(results["last"], 0.5 * turns)


@pytest.mark.parametrize("directions", ["", "scan_input_directions = [1],", "scan_output_directions = [1],"])
def test_a_scan_sweeps_in_either_direction(directions: str) -> None:
    rows = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)
    model = parsed(SCAN.replace("DIRECTIONS", directions))
    results = both(model, start=np.zeros(2, np.float32), rows=rows)
    np.testing.assert_allclose(results["last"], rows.sum(0), rtol=1e-5)


def test_bodies_are_translated_once_when_the_graph_is_loaded() -> None:
    module = translate(parsed(LOOP), torch.device("cpu"))
    assert [type(part).__name__ for part in module.children()] == ["Repetition"]
    (repetition,) = module.children()
    assert isinstance(repetition.body, fx.GraphModule)
