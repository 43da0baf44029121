"""Updates of small tensors, joined: fewer nodes, the same bits, and the names, dtypes and shapes of the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.models import residual_network
from burnish.rewriting.join_updates import MOST_ELEMENTS, join_updates
from burnish.targets import TARGETS
from oracles.rewritten import rewritten

COUNT = 8


def shapes_of(extents: Iterable[object]) -> list[str]:
    return [f"[{extent}]" for extent in extents]


def updates(template: str, shapes: list[str], outputs: str = "v p", dtype: str = "float") -> onnx.ModelProto:
    """A model with the same update of several parameters, each of its own shape; ``#`` stands for its number."""
    inputs = ", ".join(f"{dtype}{shape} {name}{i}" for i, shape in enumerate(shapes) for name in ("w", "m", "g"))
    results = ", ".join(f"{dtype}{shape} {name}{i}" for i, shape in enumerate(shapes) for name in outputs.split())
    body = " ".join(template.replace("#", str(i)) for i in range(len(shapes)))
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float lr, {inputs}) => ({results}) {{ {body} }}'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


def joined(proto: onnx.ModelProto) -> ir.Model:
    """A model after the pass, checked to give the same bits as before it, under the same names."""
    engine, random = OnnxRuntimeEngine(kernels=False), np.random.default_rng(0)
    arrays = {
        value.name: random.standard_normal([extent.dim_value for extent in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in proto.graph.input
    }
    arrays["lr"] = np.array(0.3, np.float32)
    model = rewritten(join_updates, ir.from_proto(proto))
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert [*after.graph.output] == [*proto.graph.output]
    expected = engine.run(ir.from_proto(proto), arrays)
    for name, array in engine.run(model, arrays).items():
        np.testing.assert_array_equal(array, expected[name])
    return model


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph if node.op_type != "Constant")


MOMENTUM = "c# = Constant<value = float {0.9}>() a# = Mul(m#, c#) v# = Add(a#, g#) s# = Mul(v#, lr) p# = Sub(w#, s#)"
ONCE = {"Concat": 3, "Mul": 2, "Add": 1, "Sub": 1, "Split": 2}


def test_equal_updates_are_one():
    assert operators(joined(updates(MOMENTUM, shapes_of(range(2, 2 + COUNT))))) == ONCE


def test_tensors_of_several_axes_are_joined_along_the_first():
    model = joined(updates(MOMENTUM, shapes_of(f"{extent}, 1, 3" for extent in range(1, 1 + COUNT))))
    assert operators(model) == ONCE


def test_what_differs_in_other_axes_is_joined_apart():
    shapes = shapes_of(f"{extent}, {rest}" for rest in (2, 3) for extent in range(1, 1 + COUNT))
    assert operators(joined(updates(MOMENTUM, shapes))) == {name: 2 * number for name, number in ONCE.items()}


def test_constants_that_differ_are_one_for_each_row():
    different = MOMENTUM.replace("0.9", "0.#1")
    for shapes in (shapes_of(range(2, 2 + COUNT)), shapes_of(f"{extent}, 2" for extent in range(1, 1 + COUNT))):
        assert operators(joined(updates(different, shapes))) == ONCE


def test_bounds_that_differ_stay_apart():
    clipped = "c# = Constant<value = float {{0.#}}>() a# = Clip(g#, , c#) b# = Mul(a#, a#) d# = Add(b#, m#) p# = Sub(w#, d#)"
    one, own = (clipped.replace("{{0.#}}", bound) for bound in ("{0.5}", "{0.#}"))
    shapes = shapes_of(range(2, 2 + COUNT))
    assert operators(joined(updates(one, shapes, "p")))["Clip"] == 1
    assert operators(joined(updates(own, shapes, "p")))["Clip"] == COUNT


def test_what_is_read_elsewhere_is_not_part_of_an_update():
    read = MOMENTUM + " n# = ReduceSum<keepdims = 0>(a#)"
    proto = updates(read, shapes_of(range(2, 2 + COUNT)), "v p")
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(f"n{i}", onnx.TensorProto.FLOAT, []) for i in range(COUNT))
    counted = operators(joined(proto))
    assert counted == {"ReduceSum": COUNT, "Mul": COUNT + 1, "Concat": 3, "Add": 1, "Sub": 1, "Split": 2}


@pytest.mark.slow
def test_a_sum_of_several_is_no_update_of_each():
    text = MOMENTUM.replace("Add(a#, g#)", "Add(a#, g0)")
    model = joined(updates(text, ["[3]"] * COUNT))
    assert operators(model) == ONCE | {"Concat": 3}


@pytest.mark.parametrize(
    "shapes",
    [shapes_of([3, 4]), shapes_of(range(MOST_ELEMENTS + 1, MOST_ELEMENTS + 1 + COUNT)), ["[1]"] * COUNT, [""] * COUNT],
    ids=["few", "large", "single elements", "scalars"],
)
def test_others_stay(shapes):
    counted = operators(joined(updates(MOMENTUM, shapes)))
    assert counted == {"Mul": 2 * len(shapes), "Add": len(shapes), "Sub": len(shapes)}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "webgpu"])
def test_updates_of_a_program_are_joined_where_the_target_takes_them(target):
    program = burnish.compile(residual_network(), loss="cross_entropy", optimizer=burnish.optim.adamw(), target=target)
    for graph in (program.step.graph, program.apply.graph):
        pieces = {value.name for node in graph if node.op_type == "Split" for value in node.outputs}
        scales = {
            name for name in (value.name for value in graph.outputs) if name and "norm" in name and name.startswith("next:param")
        }
        assert scales
        assert (scales <= pieces) == (target == "onnxruntime")
    assert TARGETS[target].joins_updates == (target == "onnxruntime")
