"""Which next values may be written over the present ones: where every reader of these has run by then, whatever the order."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from burnish.analysis.memory_plan import written_in_place

UPDATES = {"p": "next"}


def entries(body: str, inputs: str = "float[4] p, float[4] g", outputs: str = "float[4] next") -> frozenset[str]:
    text = f'<ir_version: 8, opset_import: ["": 18, "burnish": 1]> apply ({inputs}) => ({outputs}) {{ {body} }}'
    return written_in_place(ir.from_proto(onnx.parser.parse_model(text)).graph, UPDATES, ["Fused"])


@pytest.mark.parametrize(
    "body",
    [
        "next = Sub(p, g)",
        "a = Mul(p, g) next = Add(g, a)",
        "a = Mul(p, g) next = Sub(p, a)",
        "next = Identity(p)",
        "next = burnish.Fused(p, g)",
        # Joined updates: nothing reads the memory of the present value when the parts are written.
        "a = Concat<axis = 0>(p, g) b = Sub(a, a) next, rest = Split<axis = 0, num_outputs = 2>(b)",
    ],
)
def test_what_is_written_after_all_reading_is_in_place(body: str) -> None:
    assert entries(body) == {"p"}


@pytest.mark.parametrize(
    "body",
    [
        # It counts up, and what else reads it may run later.
        "next = Add(p, g) other = Mul(p, g)",
        # A matrix product reads rows after it has written others.
        "next = MatMul(p, g)",
        "next = burnish.Other(p, g)",
        # What reads a view reads the same memory.
        "shape = Constant<value_ints = [2, 2]>() v = Reshape(p, shape) next = Add(p, g) other = Mul(v, v)",
        # A branch reads what is around it.
        "c = Constant<value = bool {1}>() next = If(c) <then_branch = t () => (float[4] a) { a = Mul(p, g) }, "
        "else_branch = e () => (float[4] b) { b = Neg(p) }>",
    ],
)
def test_what_may_still_be_read_when_it_is_written_is_not(body: str) -> None:
    outputs = "float[4] next, float[4] other" if "other" in body else "float[4] next"
    assert entries(body, outputs=outputs) == frozenset()


def test_an_output_that_is_an_input_is_not_written_at_all() -> None:
    graph = ir.from_proto(
        onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> apply (float[4] p) => (float[4] p) { q = Neg(p) }')
    ).graph
    assert written_in_place(graph, {"p": "p"}) == frozenset()
