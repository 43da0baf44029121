"""Models of any size in one direction: deep, wide, with many inputs, outputs, functions, branches. Each is small to write down.

Every builder takes the size ``n`` and gives a model that trains: the input ``x`` is [batch, 4] (images [batch, 4, 4, 4]), the
output ``y`` [batch, 4].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 4
OPSET = 18
DOMAIN = "local"


class _Model:
    """What a model is added up from; weights are drawn from one seed."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []

    def weight(self, name: str, *shape: int, constant: float | None = None) -> str:
        values = self.random.normal(0, 0.5, shape) if constant is None else np.full(shape, constant)
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def proto(
        self, inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("y",), shape: Sequence[Any] = ()
    ) -> onnx.ModelProto:
        def values(names: Sequence[str], extents: Sequence[Any]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *extents]) for name in names]

        graph = helper.make_graph(self.nodes, "scaling", values(inputs, shape or [WIDTH]), values(outputs, [WIDTH]), self.weights)
        imports = [helper.make_opsetid("", OPSET)]
        if self.functions:
            imports.append(helper.make_opsetid(DOMAIN, 1))
        return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=self.functions)


def elementwise_chain(n: int) -> onnx.ModelProto:
    """``n`` elementwise nodes one after the other, and one weight at the start."""
    model = _Model()
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    for index in range(n):
        value = model.node(("Tanh", "Sigmoid", "Neg")[index % 3], [value], f"v{index}")
    model.node("Identity", [value], "y")
    return model.proto()


def dense_layers(n: int) -> onnx.ModelProto:
    """``n`` layers of MatMul, Add and Relu, each with its own weight and bias."""
    model = _Model()
    value = "x"
    for index in range(n):
        product = model.node("MatMul", [value, model.weight(f"w{index}", WIDTH, WIDTH)], f"p{index}")
        total = model.node("Add", [product, model.weight(f"b{index}", WIDTH)], f"s{index}")
        value = model.node("Relu", [total], f"v{index}")
    model.node("Identity", [value], "y")
    return model.proto()


def convolution_layers(n: int) -> onnx.ModelProto:
    """``n`` layers of Conv, BatchNormalization and Relu."""
    model = _Model()
    value = "x"
    for index in range(n):
        kernel = model.weight(f"w{index}", WIDTH, WIDTH, 3, 3)
        value = model.node("Conv", [value, kernel], f"c{index}", pads=[1, 1, 1, 1])
        named = {"scale": 1.0, "bias": 0.0, "mean": 0.0, "variance": 1.0}
        operands = [model.weight(f"{name}{index}", WIDTH, constant=constant) for name, constant in named.items()]
        value = model.node("BatchNormalization", [value, *operands], f"n{index}")
        value = model.node("Relu", [value], f"v{index}")
    pooled = model.node("GlobalAveragePool", [value], "pooled")
    model.node("Flatten", [pooled], "y")
    return model.proto(shape=[WIDTH, 4, 4])


def inputs(n: int) -> onnx.ModelProto:
    """``n`` inputs, added up one by one."""
    model = _Model()
    names = ["x", *(f"x{index}" for index in range(1, n))]
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    for name in names[1:]:
        value = model.node("Add", [value, name], f"with_{name}")
    model.node("Identity", [value], "y")
    return model.proto(inputs=names)


def outputs(n: int) -> onnx.ModelProto:
    """``n`` outputs beside ``y``, of one value."""
    model = _Model()
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    names = [model.node("Neg", [value], f"y{index}") for index in range(n)]
    model.node("Identity", [value], "y")
    return model.proto(outputs=["y", *names])


def consumers(n: int) -> onnx.ModelProto:
    """One value that ``n`` nodes read, with a scale each, and one sum of them all."""
    model = _Model()
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    branches = [model.node("Mul", [value, model.weight(f"w{index}", WIDTH)], f"v{index}") for index in range(n)]
    model.node("Sum", branches, "y")
    return model.proto()


def selections(n: int) -> onnx.ModelProto:
    """``n`` nodes one after the other, and beside each the choice of one column, which are added up."""
    model = _Model()
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    model.weights.append(numpy_helper.from_array(np.array([2], np.int64), "column"))
    columns = []
    for index in range(n):
        value = model.node("Tanh", [value], f"v{index}")
        columns.append(model.node("Gather", [value, "column"], f"c{index}", axis=1))
    model.node("Sum", [value, *columns], "y")
    return model.proto()


def functions(n: int) -> onnx.ModelProto:
    """``n`` functions, each called once."""
    model = _Model()
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    for index in range(n):
        body = [helper.make_node("Tanh", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["c"])]
        model.functions.append(helper.make_function(DOMAIN, f"F{index}", ["a"], ["c"], body, [helper.make_opsetid("", OPSET)]))
        value = model.node(f"F{index}", [value], f"v{index}", domain=DOMAIN)
    model.node("Identity", [value], "y")
    return model.proto()


def nested_functions(n: int) -> onnx.ModelProto:
    """``n`` functions, each of which calls the next."""
    model = _Model()
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    for index in range(n):
        called = helper.make_node("Neg", ["b"], ["c"])
        if index + 1 < n:
            called = helper.make_node(f"F{index + 1}", ["b"], ["c"], domain=DOMAIN)
        body = [helper.make_node("Tanh", ["a"], ["b"]), called]
        model.functions.append(helper.make_function(DOMAIN, f"F{index}", ["a"], ["c"], body, imports))
    value = model.node("Mul", ["x", model.weight("scale", WIDTH)], "scaled")
    model.node("F0", [value], "y", domain=DOMAIN)
    return model.proto()


def branches(n: int) -> onnx.ModelProto:
    """``n`` If nodes one after the other, whose condition is known only when the model runs; the weight comes after them."""
    model = _Model()
    value = "x"
    total = model.node("ReduceSum", ["x"], "total", keepdims=0)
    zero = model.weight("zero", constant=0.0)
    condition = model.node("Greater", [total, zero], "condition")
    for index in range(n):
        then, other = (
            helper.make_graph(
                [helper.make_node(op_type, [value], [f"{name}{index}"])],
                f"{name}_graph{index}",
                [],
                [helper.make_tensor_value_info(f"{name}{index}", TensorProto.FLOAT, ["batch", WIDTH])],
            )
            for name, op_type in (("then", "Tanh"), ("else", "Neg"))
        )
        value = model.node("If", [condition], f"v{index}", then_branch=then, else_branch=other)
    model.node("Mul", [value, model.weight("scale", WIDTH)], "y")
    return model.proto()


SHAPES: dict[str, Callable[[int], onnx.ModelProto]] = {
    "elementwise-chain": elementwise_chain,
    "dense-layers": dense_layers,
    "convolution-layers": convolution_layers,
    "inputs": inputs,
    "outputs": outputs,
    "consumers": consumers,
    "selections": selections,
    "functions": functions,
    "nested-functions": nested_functions,
    "branches": branches,
}


def batch_of(model: onnx.ModelProto, size: int = 2) -> dict[str, np.ndarray]:
    """Return a batch that fits: every input, and ``targets`` for the output ``y``."""
    random = np.random.default_rng(1)
    batch = {}
    for value in (*model.graph.input, model.graph.output[0]):
        extents = [dim.dim_value or size for dim in value.type.tensor_type.shape.dim]
        batch[value.name] = random.normal(size=extents).astype(np.float32)
    batch["targets"] = batch.pop(model.graph.output[0].name)
    return batch
