"""GroupNormalization of opset 18 to 20, which the check of ONNX refuses, loads, computes the same, and trains."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper

import burnish
from burnish.errors import ModelError
from burnish.importer import load
from burnish.importer.weights import InitializerKind, classify_initializers
from burnish.rewriting.stages import RECOGNIZED, RECOGNIZED_TO_TRAIN
from oracles.onnxruntime_outputs import onnxruntime_outputs

GROUPS, EPSILON = 3, 2.0**-10
RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, size=(2, 6, 4, 5))
SCALE, BIAS = RNG.normal(size=GROUPS), RNG.normal(size=GROUPS)
TOLERANCE = {np.float16: 2e-3, np.float32: 2e-6, np.float64: 1e-13}


def model(
    dtype: type = np.float32,
    opset: int = 18,
    shape: tuple[str | int, ...] = ("n", 6, 4, 5),
    scale: np.ndarray = SCALE,
    bias: np.ndarray = BIAS,
    **attributes: object,
) -> onnx.ModelProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    given = {"num_groups": GROUPS, "epsilon": EPSILON, **attributes}
    node = helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], name="norm", **given)
    values = [helper.make_tensor_value_info(name, element, shape) for name in "xy"]
    weights = [numpy_helper.from_array(array.astype(dtype), name) for name, array in (("scale", scale), ("bias", bias))]
    graph = helper.make_graph([node], "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def closed_form(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    grouped = x.astype(np.float64).reshape(len(x), GROUPS, -1)
    centered = grouped - grouped.mean(axis=2, keepdims=True)
    normalized = centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + EPSILON)
    return (normalized * scale[:, None] + bias[:, None]).reshape(x.shape)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def test_the_check_refuses_it() -> None:
    with pytest.raises(onnx.checker.ValidationError, match="deprecated"):
        onnx.checker.check_model(model())


@pytest.mark.parametrize("opset", [18, 19, 20])
@pytest.mark.parametrize("form", ["proto", "bytes", "ir"])
def test_loads_as_a_valid_model_of_its_opset(form: str, opset: int) -> None:
    proto = model(opset=opset)
    source = {"proto": proto, "bytes": proto.SerializeToString(), "ir": ir.from_proto(proto)}[form]
    loaded = load(source)
    onnx.checker.check_model(ir.to_proto(loaded), full_check=True)
    assert loaded.opset_imports[""] == opset
    assert classify_initializers(loaded) == {"scale": InitializerKind.WEIGHT, "bias": InitializerKind.WEIGHT}
    assert proto == model(opset=opset)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_inference(rank: int, dtype: type) -> None:
    x = X[(..., *[0] * (4 - rank))].astype(dtype)
    scale, bias = SCALE.astype(dtype), BIAS.astype(dtype)
    y = onnxruntime_outputs(load(model(dtype, shape=("n", *x.shape[1:]))), {"x": x})["y"]
    assert y.dtype == dtype
    assert_close(y, closed_form(x, scale.astype(np.float64), bias.astype(np.float64)), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [("n", 6, "h", "w"), ("n", "c", "h", "w"), ("n", "c", 4, 5)])
def test_shapes_known_at_run_time(shape: tuple[str | int, ...]) -> None:
    y = onnxruntime_outputs(load(model(shape=shape)), {"x": X.astype(np.float32)})["y"]
    assert_close(y, closed_form(X, SCALE, BIAS), TOLERANCE[np.float32])


def test_keeps_the_digits_that_the_function_of_the_standard_loses() -> None:
    far = (X + 1000).astype(np.float32)
    expected = closed_form(far, SCALE, BIAS)
    assert_close(onnxruntime_outputs(load(model()), {"x": far})["y"], expected, 3e-5)
    direct = onnxruntime_outputs(model(), {"x": far})["y"]
    assert np.linalg.norm(direct - expected) > 1e-3 * np.linalg.norm(expected)


def torch_gradients(x: np.ndarray, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Of PyTorch's layer in float64, whose scale and bias of the channels are repeated from those of the groups."""
    operands = {name: torch.tensor(array.astype(np.float64)) for name, array in (("x", x), ("scale", SCALE), ("bias", BIAS))}
    data, scale, bias = (operand.requires_grad_() for operand in operands.values())
    repeats = x.shape[1] // GROUPS
    weight, shift = scale.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    torch.nn.functional.group_norm(data, GROUPS, weight, shift, EPSILON).backward(torch.from_numpy(cotangent))
    return {name: operand.grad.numpy() for name, operand in operands.items() if operand.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [("n", 6, 4, 5), ("n", 6, "h", "w"), ("n", "c", 4, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients(dtype: type, shape: tuple[str | int, ...]) -> None:
    cotangent = np.random.default_rng(1).normal(size=X.shape)
    gradients = burnish.grad(model(dtype, shape=shape), ["x", "scale", "bias"])
    actual = onnxruntime_outputs(gradients, {"x": X.astype(dtype), "cotangent:y": cotangent.astype(dtype)})
    for name, expected in torch_gradients(X, cotangent).items():
        assert_close(actual[f"grad:{name}"], expected, TOLERANCE[dtype])


def test_training_graph_has_the_layer() -> None:
    loaded = load(model())
    RECOGNIZED.run(loaded, None)
    RECOGNIZED_TO_TRAIN.run(loaded, None)
    assert "GroupNormalization" in {node.op_type for node in loaded.graph}
    assert "LayerNormalization" not in {node.op_type for node in loaded.graph}


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "bias"), [(np.ones(GROUPS), np.zeros(GROUPS)), (SCALE, BIAS)])
def test_trains_and_exports_under_its_names(tmp_path, scale: np.ndarray, bias: np.ndarray) -> None:
    """Also from the ones and zeros that a layer starts with, which look like no scale and no bias."""
    program = burnish.compile(model(scale=scale, bias=bias), loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    session = burnish.Session(program)
    batch = {"x": X.astype(np.float32), "targets": closed_form(X, SCALE * 2, BIAS + 1).astype(np.float32)}
    before = session.step(batch)["loss"]
    for _ in range(20):
        loss = session.step(batch)["loss"]
    assert loss < before / 2
    state = session.state()
    assert {name: array.shape for name, array in state.items() if name.startswith("param/")} == {
        "param/scale": (GROUPS,),
        "param/bias": (GROUPS,),
    }
    exported = session.export(tmp_path / "tuned.onnx")
    y = onnxruntime_outputs(onnx.load(exported), {"x": batch["x"]})["y"]
    assert_close(y, closed_form(X, state["param/scale"].astype(float), state["param/bias"].astype(float)), TOLERANCE[np.float32])
    assert set(classify_initializers(load(exported))) == {"scale", "bias"}


def test_in_functions_and_branches() -> None:
    operator = "GroupNormalization<num_groups=3, epsilon=0.0009765625>"
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        g (float[n,6,4,5] x, bool c) => (float[n,6,4,5] y) {{
            y = If (c) <
                then_branch = t () => (float[n,6,4,5] u) {{ u = own.Norm(x, scale, bias) }},
                else_branch = e () => (float[n,6,4,5] v) {{ v = {operator}(x, scale, bias) }}
            >
        }}
        <domain: "own", opset_import: ["": 18]> Norm (a, s, b) => (z) {{ z = {operator}(a, s, b) }}""")
    for name, array in (("scale", SCALE), ("bias", BIAS)):
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    loaded = load(proto)
    for condition in (True, False):
        y = onnxruntime_outputs(loaded, {"x": X.astype(np.float32), "c": np.array(condition)})["y"]
        assert_close(y, closed_form(X, SCALE, BIAS), TOLERANCE[np.float32])


def test_a_function_of_another_opset_is_refused() -> None:
    """In opset 21 the same node has a scale for each channel."""
    text = """<ir_version: 8, opset_import: ["": 21, "own": 1]>
        g (float[n,6,4,5] x, float[3] s, float[3] b) => (float[n,6,4,5] y) { y = own.Norm(x, s, b) }
        <domain: "own", opset_import: ["": 18]> Norm (a, s, b) => (z) { z = GroupNormalization<num_groups=3>(a, s, b) }"""
    with pytest.raises(ModelError, match="not valid ONNX"):
        load(onnx.parser.parse_model(text))


REFUSED = {
    "scale of the channels": ({"scale": np.ones(6)}, r"'norm'.*'scale' has the shape \[6\].*one number for each of its 3 groups"),
    "bias of the channels": ({"bias": np.ones(6)}, r"'norm'.*'bias' has the shape \[6\].*or export the model with opset 21"),
    "scale of rank 2": ({"scale": np.ones((3, 1))}, r"'scale' has the shape \[3,1\]"),
    "groups that do not divide": ({"num_groups": 4}, r"'norm'.*num_groups = 4 does not divide the 6 channels.*choose a divisor"),
    "no groups": ({"num_groups": 0}, r"num_groups = 0 does not divide"),
    "an attribute of opset 21": ({"stash_type": 1}, r"'norm' does not have the form of opset 18 to 20.*Export the model again"),
    "groups that are no integer": ({"num_groups": 3.0}, r"'norm' does not have the form.*the integer attribute num_groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        load(model(**arguments))


def test_missing_inputs_are_refused() -> None:
    proto = model()
    del proto.graph.node[0].input[2]
    with pytest.raises(ModelError, match="the inputs X, scale and bias"):
        load(proto)
    proto = model()
    proto.graph.node[0].input[2] = ""
    with pytest.raises(ModelError):
        load(proto)


def test_opset_21_stays_as_it_is() -> None:
    proto = model(opset=21, scale=np.ones(6), bias=np.zeros(6))
    assert [node.op_type for node in load(proto).graph] == ["GroupNormalization"]
