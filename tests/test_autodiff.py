"""The reverse pass itself: accumulation, paths, what carries gradients, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.autodiff import differentiate
from burnish.errors import GradientError
from burnish.graph import Builder, Tensor
from burnish.operators import gradient, registry
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.gradient_harness import Evaluator
from oracles.rewritten import rewritten

X = np.array([[0.5, -1.25, 2.0]])
DY = np.array([[1.5, -0.75, 0.25]])


def float64_input(builder: Builder, name: str, shape: list | None = None) -> Tensor:
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(shape or [1, 3]))
    builder.graph.inputs.append(value)
    return builder.tensor(value)


def new_builder() -> Builder:
    return Builder(ir.Graph([], [], nodes=[], name="graph", opset_imports={"": 18}))


def run(builder: Builder, results: list[Tensor], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run the graph; a tensor that is an input leaves it through an Identity."""
    outputs = [builder.op("Identity", tensor).value for tensor in results]
    builder.graph.outputs.extend(outputs)
    values = Evaluator(rewritten(lower_semantic_operators, ir.Model(builder.graph, ir_version=10)))(feeds)
    return [values[str(output.name)] for output in outputs]


def test_gradients_of_a_value_used_several_times_add_up() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    y = builder.op("Exp", x) + builder.op("Sin", x) + x
    dy = float64_input(builder, "dy")
    dx = differentiate(builder, {y.value: dy}, [x.value])[x.value]
    (result,) = run(builder, [dx], {"x": X, "dy": DY})
    np.testing.assert_allclose(result, DY * (np.exp(X) + np.cos(X) + 1), rtol=1e-14)


def test_a_value_used_twice_by_one_node() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    y, dy = x * x, float64_input(builder, "dy")
    (result,) = run(builder, [differentiate(builder, {y.value: dy}, [x.value])[x.value]], {"x": X, "dy": DY})
    np.testing.assert_allclose(result, 2 * X * DY, rtol=1e-14)


def test_several_outputs_with_cotangents() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    hidden = builder.op("Exp", x)
    y, z = hidden * 2, builder.op("Neg", hidden)
    dy, dz = float64_input(builder, "dy"), float64_input(builder, "dz")
    dx = differentiate(builder, {y.value: dy, z.value: dz}, [x.value])[x.value]
    (result,) = run(builder, [dx], {"x": X, "dy": DY, "dz": X})
    np.testing.assert_allclose(result, (2 * DY - X) * np.exp(X), rtol=1e-14)


def test_an_output_that_feeds_another_output() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    y = builder.op("Exp", x)
    z = y * y
    dy, dz = float64_input(builder, "dy"), float64_input(builder, "dz")
    dx = differentiate(builder, {y.value: dy, z.value: dz}, [x.value])[x.value]
    (result,) = run(builder, [dx], {"x": X, "dy": DY, "dz": X})
    np.testing.assert_allclose(result, DY * np.exp(X) + 2 * X * np.exp(2 * X), rtol=1e-14)


def test_with_respect_to_an_intermediate_value() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    hidden = builder.op("Sin", x)
    y, dy = builder.op("Exp", hidden), float64_input(builder, "dy")
    gradients = differentiate(builder, {y.value: dy}, [hidden.value])
    assert list(gradients) == [hidden.value]
    assert "Cos" not in {node.op_type for node in builder.graph}, "nothing is differentiated beyond what was asked for"
    (result,) = run(builder, [gradients[hidden.value]], {"x": X, "dy": DY})
    np.testing.assert_allclose(result, DY * np.exp(np.sin(X)), rtol=1e-14)


def test_both_an_intermediate_value_and_what_it_comes_from() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    hidden = builder.op("Sin", x)
    y, dy = builder.op("Exp", hidden), float64_input(builder, "dy")
    gradients = differentiate(builder, {y.value: dy}, [hidden.value, x.value])
    results = run(builder, [gradients[hidden.value], gradients[x.value]], {"x": X, "dy": DY})
    np.testing.assert_allclose(results[0], DY * np.exp(np.sin(X)), rtol=1e-14)
    np.testing.assert_allclose(results[1], DY * np.exp(np.sin(X)) * np.cos(X), rtol=1e-14)


def test_a_value_no_output_depends_on_has_no_gradient() -> None:
    builder = new_builder()
    x, unused = float64_input(builder, "x"), float64_input(builder, "unused")
    builder.op("Exp", unused)
    y, dy = builder.op("Exp", x), float64_input(builder, "dy")
    gradients = differentiate(builder, {y.value: dy}, [x.value, unused.value])
    assert gradients[unused.value] is None
    assert gradients[x.value] is not None


def test_an_output_that_is_its_input_passes_the_cotangent() -> None:
    builder = new_builder()
    x, dy = float64_input(builder, "x"), float64_input(builder, "dy")
    assert differentiate(builder, {x.value: dy}, [x.value])[x.value] is dy


def test_no_cotangent_no_gradient() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    builder.op("Exp", x)
    before = len(builder.graph)
    assert differentiate(builder, {}, [x.value]) == {x.value: None}
    assert len(builder.graph) == before


def test_broadcast_is_undone_without_the_rule_knowing() -> None:
    builder = new_builder()
    x, bias = float64_input(builder, "x", ["batch", 3]), float64_input(builder, "bias", [3])
    y = builder.op("Tanh", x) + bias
    dy = float64_input(builder, "dy", ["batch", 3])
    gradient = differentiate(builder, {y.value: dy}, [bias.value])[bias.value]
    assert "Tanh" not in {node.op_type for node in list(builder.graph)[2:]}
    (result,) = run(builder, [gradient], {"x": np.tile(X, (4, 1)), "bias": X[0], "dy": np.tile(DY, (4, 1))})
    np.testing.assert_allclose(result, 4 * DY[0], rtol=1e-14)


def test_integer_and_boolean_paths_stop() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    whole = builder.cast(builder.cast(x, ir.DataType.INT64), ir.DataType.DOUBLE)
    positive = builder.cast(builder.op("Greater", x, 0), ir.DataType.DOUBLE)
    size = builder.cast(builder.op("Shape", x), ir.DataType.DOUBLE)
    y = x * whole * positive + builder.op("ReduceSum", size)
    dy = float64_input(builder, "dy")
    (result,) = run(builder, [differentiate(builder, {y.value: dy}, [x.value])[x.value]], {"x": X, "dy": DY})
    np.testing.assert_allclose(result, DY * np.trunc(X) * (X > 0), rtol=1e-14)


def test_an_operator_without_a_rule_on_the_path_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.records(), ("", "Det"))
    builder = new_builder()
    x = float64_input(builder, "x", [3, 3])
    node = ir.node("Volume", [x.value], domain="example", name="volume")
    builder.graph.append(node)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "det", ir.TensorType(ir.DataType.DOUBLE), ir.Shape([])
    dy = float64_input(builder, "dy", [])
    message = (
        r"example\.Volume 'volume' \(output 'det'\) has no gradient rule, and 'x' is differentiated through it\. "
        r"Differentiate only what comes after it, .*burnish\.operators\.gradient"
    )
    with pytest.raises(GradientError, match=message):
        differentiate(builder, {node.outputs[0]: dy}, [x.value])


def rule_returning(result: object, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """A graph ``y = Fmod (x, w)`` whose operator has a rule that returns ``result`` of the cotangent."""
    monkeypatch.setitem(registry.records(), ("", "Mod"), [])

    @gradient("Mod")
    def remainder(op, dy):
        return result(dy) if callable(result) else result

    builder = new_builder()
    node = ir.node("Mod", [float64_input(builder, name).value for name in "xw"], {"fmod": 1}, name="rest")
    builder.graph.append(node)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", ir.TensorType(ir.DataType.DOUBLE), ir.Shape([1, 3])
    return builder


def gradients_by(builder: Builder, *names: str) -> dict[ir.Value, Tensor | None]:
    inputs = {value.name: value for value in builder.graph.inputs}
    (node,) = builder.graph
    return differentiate(builder, {node.outputs[0]: float64_input(builder, "dy")}, [inputs[name] for name in names])


@pytest.mark.parametrize("result", [lambda dy: dy, lambda dy: (dy,), lambda dy: ()])
def test_a_rule_that_returns_too_few_gradients(result, monkeypatch) -> None:
    message = (
        r"^the gradient rule of Mod 'rest' \(output 'y'\) returned [01] of 2 gradients, and none for its input 1, 'w', which is "
        r"differentiated: let the rule \(.*remainder, registered with burnish\.operators\.gradient\) return one for each input, "
        r"None where there is none$"
    )
    with pytest.raises(GradientError, match=message):
        gradients_by(rule_returning(result, monkeypatch), "w")


def test_a_rule_that_returns_too_many_gradients(monkeypatch) -> None:
    message = (
        r"^the gradient rule of Mod 'rest' \(output 'y'\) returned 3 gradients, and the node has 2 inputs: let the rule "
        r"\(.*remainder, registered with burnish\.operators\.gradient\) return one for each input$"
    )
    with pytest.raises(GradientError, match=message):
        gradients_by(rule_returning(lambda dy: (dy, dy, dy), monkeypatch), "w")


def test_a_rule_may_leave_out_inputs_that_nobody_asks_for(monkeypatch) -> None:
    (gradient_of_x,) = gradients_by(rule_returning(lambda dy: dy, monkeypatch), "x").values()
    assert gradient_of_x is not None


@pytest.mark.parametrize("result", [None, (None, None), (None, None, None)])
def test_a_rule_that_says_that_there_is_no_gradient(result, monkeypatch) -> None:
    assert list(gradients_by(rule_returning(result, monkeypatch), "x", "w").values()) == [None, None]


@pytest.mark.parametrize("result", [0.0, [None, None], lambda dy: [dy, dy], lambda dy: (dy, 1.0)])
def test_a_rule_that_returns_no_tensors(result, monkeypatch) -> None:
    message = r"^the gradient rule of Mod 'rest' \(output 'y'\) returned .*: let it .* return a tensor, or a tuple with"
    with pytest.raises(GradientError, match=message):
        gradients_by(rule_returning(result, monkeypatch), "x", "w")


@pytest.mark.parametrize("where", ["before the wanted value", "beside the output", "behind the output"])
def test_an_operator_without_a_rule_off_the_path_is_not_looked_at(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.records(), ("", "Det"))
    builder = new_builder()
    x, w = float64_input(builder, "x", [3, 3]), float64_input(builder, "w", [3, 3])
    if where == "before the wanted value":
        y = builder.op("Det", x, like=x, shape=[]) * w
    else:
        y = x * w
        builder.op("Det", y if where == "behind the output" else w, shape=[])
    dy = float64_input(builder, "dy", [3, 3])
    assert differentiate(builder, {y.value: dy}, [w.value])[w.value] is not None


def test_a_path_only_through_an_operator_with_zero_gradient_has_none() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    y, dy = builder.op("Floor", builder.op("Exp", x)), float64_input(builder, "dy")
    assert differentiate(builder, {y.value: dy}, [x.value]) == {x.value: None}


@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_only_a_branch_reads_has_its_gradient(nested: bool) -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    hidden = builder.op("Tanh", x)
    y = branch_on_a_condition(builder, "Exp", hidden, nested)
    gradient = differentiate(builder, {y.value: float64_input(builder, "dy")}, [x.value])[x.value]
    (result,) = run(builder, [gradient], {"x": X, "dy": DY})
    np.testing.assert_allclose(result, DY * np.exp(np.tanh(X)) * (1 - np.tanh(X) ** 2), rtol=1e-13)


def test_a_branch_that_reads_only_the_shape_of_a_value_stops_its_gradient() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    y = branch_on_a_condition(builder, "Shape", x, nested=False)
    assert differentiate(builder, {y.value: float64_input(builder, "dy")}, [x.value]) == {x.value: None}


def branch_on_a_condition(builder: Builder, operator: str, operand: Tensor, nested: bool) -> Tensor:
    """An If whose branches apply an operator to a value around them and make it float64, or hold such an If themselves."""

    def branch() -> ir.Graph:
        inner = Builder(ir.Graph([], [], nodes=[], name="branch", opset_imports={"": 18}))
        read = inner.op(operator, inner.tensor(operand.value))
        inner.graph.outputs.append(inner.cast(read, ir.DataType.DOUBLE).value)
        return inner.graph

    def choice(then_branch: ir.Graph, else_branch: ir.Graph, name: str, output: str) -> ir.Node:
        branches = {"then_branch": then_branch, "else_branch": else_branch}
        result = ir.Value(name=output, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape([2, 3]))
        return ir.node("If", [condition.value], branches, name=name, outputs=[result])

    condition = builder.constant(np.asarray(True))
    node = choice(branch(), branch(), "choice", "y")
    if nested:
        inside = choice(branch(), branch(), "inner", "inner_y")
        outer = ir.Graph([], inside.outputs, nodes=[inside], name="outer", opset_imports={"": 18})
        node = choice(outer, branch(), "choice", "y")
    builder.graph.append(node)
    return builder.tensor(node.outputs[0])


def test_an_initializer_is_differentiated_like_an_input() -> None:
    builder = new_builder()
    x = float64_input(builder, "x")
    weight = ir.Value(name="w", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape([3]), const_value=ir.tensor(X[0]))
    builder.graph.initializers.add(weight)
    y, dy = x * builder.tensor(weight), float64_input(builder, "dy")
    (result,) = run(builder, [differentiate(builder, {y.value: dy}, [weight])[weight]], {"x": X, "dy": DY})
    np.testing.assert_allclose(result, (DY * X)[0], rtol=1e-14)


def test_the_reverse_pass_of_a_reverse_pass() -> None:
    """Second derivatives: the emitted nodes are ordinary nodes."""
    builder = new_builder()
    x = float64_input(builder, "x")
    y, dy = builder.op("Exp", x * x), float64_input(builder, "dy")
    first = differentiate(builder, {y.value: dy}, [x.value])[x.value]
    ddx = float64_input(builder, "ddx")
    second = differentiate(builder, {first.value: ddx}, [x.value])[x.value]
    (result,) = run(builder, [second], {"x": X, "dy": DY, "ddx": np.ones_like(X)})
    np.testing.assert_allclose(result, DY * np.exp(X * X) * (2 + 4 * X * X), rtol=1e-13)


def test_pads_beyond_every_extent_are_named() -> None:
    text = """<ir_version: 10, opset_import: ["": 18]>
    graph (float[n, 4] x) => (float[n, m] y) { pads = Constant <value_ints = [0, 1, -9223372036854775808, 0]> ()
    [far] y = Pad (x, pads) }"""
    with pytest.raises(
        GradientError, match=r"Pad 'far' .*pads by \[0, 1, -9223372036854775808, 0\], and no tensor has such an extent"
    ):
        burnish.grad(ir.from_onnx_text(text), wrt="x")
