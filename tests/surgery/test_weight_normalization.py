"""Weight normalization: unchanged outputs, PyTorch's gradients and training, initialization by data, export, errors."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import burnish
from burnish import engines
from burnish.errors import ConfigurationError, InputError
from burnish.files.export import export_inference
from burnish.rewriting.fold_weights import fold_weight_normalization
from oracles.onnxruntime_outputs import onnxruntime_outputs

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def build(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], outputs: tuple[str, ...] = ("y",), dtype: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, ["batch", 3, 6, 6])],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def weights_of_network() -> dict[str, np.ndarray]:
    return {
        "conv1.weight": random(4, 3, 3, 3),
        "conv1.bias": random(4),
        "conv2.weight": random(4, 2, 3, 3),
        "fc1.weight": random(7, 16),
        "fc1.bias": random(7),
        "fc2.weight": random(7, 6),
        "fc3.weight": random(6, 5),
        "fc3.bias": random(5),
    }


def network(weights: dict[str, np.ndarray] | None = None, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Convolutions with and without bias, grouped; dense layers as Gemm of both kinds and as MatMul and Add."""
    nodes = [
        helper.make_node("Conv", ["x", "conv1.weight", "conv1.bias"], ["c1"]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "conv2.weight"], ["c2"], group=2),
        helper.make_node("Tanh", ["c2"], ["r2"]),
        helper.make_node("Flatten", ["r2"], ["f"]),
        helper.make_node("Gemm", ["f", "fc1.weight", "fc1.bias"], ["h1"], transB=1, beta=0.5, alpha=1.5),
        helper.make_node("Tanh", ["h1"], ["t1"]),
        helper.make_node("Gemm", ["t1", "fc2.weight"], ["h2"]),
        helper.make_node("Tanh", ["h2"], ["t2"]),
        helper.make_node("MatMul", ["t2", "fc3.weight"], ["m"]),
        helper.make_node("Add", ["fc3.bias", "m"], ["y"]),
    ]
    return build(nodes, weights or weights_of_network(), dtype=dtype)


LAYERS = {"conv1": 0, "conv2": 0, "fc1": 0, "fc2": 1, "fc3": 1}
"""The axis of the output channels."""


def array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def batches() -> list[dict[str, np.ndarray]]:
    return [
        {"x": 1 + 2 * random(size, 3, 6, 6, seed=index), "labels": np.arange(size) % 5} for index, size in enumerate((20, 7, 33))
    ]


def test_outputs_names_and_shapes() -> None:
    proto = network()
    x = batches()[0]["x"]
    model = burnish.surgery.weight_normalize(proto)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    before, after = (onnxruntime_outputs(each, {"x": x})["y"] for each in (proto, model))
    assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max()
    weights = weights_of_network()
    for layer, axis in LAYERS.items():
        weight = weights[f"{layer}.weight"]
        others = tuple(index for index in range(weight.ndim) if index != axis)
        np.testing.assert_array_equal(array(model, f"{layer}.weight_v"), weight)
        np.testing.assert_allclose(array(model, f"{layer}.weight_g"), np.sqrt((weight**2).sum(others, keepdims=True)), rtol=1e-6)
        assert f"{layer}.weight" not in model.graph.initializers
    biases = {name for name in weights if name.endswith("bias")}
    assert set(model.graph.initializers) == biases | {f"{layer}.weight_{part}" for layer in LAYERS for part in "gv"}


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same network in PyTorch, under its own weight normalization; dense weights are [out, in] there."""
    weights = weights_of_network()
    net = nn.Sequential()
    net.conv1, net.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=2, bias=False)
    net.fc1, net.fc2, net.fc3 = nn.Linear(16, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 5)
    for name, layer in list(net.named_children()):
        weight = weights[f"{name}.weight"]
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight if LAYERS[name] == 0 else weight.T.copy()))
            if layer.bias is not None:
                layer.bias.copy_(torch.from_numpy(weights[f"{name}.bias"]))
        weight_norm(layer.to(dtype))
    return net


def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(net.conv2(torch.relu(net.conv1(x)))).flatten(1)
    y = torch.tanh(1.5 * functional.linear(y, net.fc1.weight) + 0.5 * net.fc1.bias)
    return net.fc3(torch.tanh(net.fc2(y)))


def test_gradients_are_pytorchs_and_the_closed_form() -> None:
    """dg = dw·v / ‖v‖ and dv = (g / ‖v‖) dw - (g dg / ‖v‖²) v, in float64, of a random cotangent."""
    double = {name: value.astype(np.float64) for name, value in weights_of_network().items()}
    x = batches()[0]["x"].astype(np.float64)
    cotangent = np.random.default_rng(3).normal(size=(20, 5))
    plain = burnish.grad(network(double, TensorProto.DOUBLE), [f"{layer}.weight" for layer in LAYERS])
    model = burnish.surgery.weight_normalize(network(double, TensorProto.DOUBLE))
    parts = [f"{layer}.weight_{part}" for layer in LAYERS for part in "gv"]
    reference = engines.get("reference")
    gradients = reference.run(burnish.grad(model, parts), {"x": x, "cotangent:y": cotangent})
    of_weights = reference.run(plain, {"x": x, "cotangent:y": cotangent})
    net = module(torch.float64)
    forward(net, torch.from_numpy(x)).backward(torch.from_numpy(cotangent))
    for layer, axis in LAYERS.items():
        v, g = array(model, f"{layer}.weight_v"), array(model, f"{layer}.weight_g")
        others = tuple(index for index in range(v.ndim) if index != axis)
        norm = np.sqrt((v**2).sum(others, keepdims=True))
        dw = of_weights[f"grad:{layer}.weight"]
        dg = (dw * v).sum(others, keepdims=True) / norm
        dv = g / norm * dw - g * dg / norm**2 * v
        parameters = getattr(net, layer).parametrizations.weight
        turned = (lambda gradient: gradient.numpy().T) if axis else (lambda gradient: gradient.numpy())
        for part, closed, pytorch in (("g", dg, parameters.original0.grad), ("v", dv, parameters.original1.grad)):
            ours = gradients[f"grad:{layer}.weight_{part}"]
            for wanted in (closed, turned(pytorch)):
                assert np.linalg.norm(ours - wanted) <= 1e-11 * np.linalg.norm(wanted), (layer, part)


def trained_by_both(dtype: type, engine: str, losses: float) -> tuple[burnish.Session, nn.Module]:
    """Three steps of burnish's and of PyTorch's, whose losses differ by no more than a relative ``losses``."""
    weights = {name: value.astype(dtype) for name, value in weights_of_network().items()}
    proto = network(weights, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    lr = float(np.float32(0.1))
    session = burnish.Session(
        burnish.compile(burnish.surgery.weight_normalize(proto), optimizer=burnish.optim.sgd(lr=lr)), engine
    )
    net = module(torch.from_numpy(np.zeros(1, dtype)).dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for batch in batches():
        x = batch["x"].astype(dtype)
        loss = functional.cross_entropy(forward(net, torch.from_numpy(x)), torch.from_numpy(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step({**batch, "x": x})["loss"] == pytest.approx(loss.item(), rel=losses)
    return session, net


# What is computed is told by float64. In float32 rounding alone moves the weights by up to 1e-4 of their norm, in PyTorch by
# 3e-5, where it takes a value across the kink of the ReLU (twelve seeds, against float64).
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "engine", "losses", "weights"), [(np.float32, "onnxruntime", 1e-5, 1e-4), (np.float64, "reference", 1e-12, 1e-11)]
)
def test_training_is_pytorchs(dtype: type, engine: str, losses: float, weights: float) -> None:
    session, net = trained_by_both(dtype, engine, losses)
    exported = export_inference(session.program, session.state())
    for layer, axis in LAYERS.items():
        wanted = getattr(net, layer).weight.detach().numpy()
        ours = array(exported, f"{layer}.weight")
        assert ours.dtype == dtype
        # Against the norm of all: what rounding does to a weight near zero says nothing.
        assert np.linalg.norm((ours.T if axis else ours) - wanted) <= weights * np.linalg.norm(wanted), layer


@pytest.mark.slow
def test_export_gives_the_weights_back() -> None:
    session, _ = trained_by_both(np.float32, "onnxruntime", 1e-5)
    state = session.state()
    exported = export_inference(session.program, state)
    assert set(exported.graph.initializers) == set(weights_of_network())
    assert not {"ReduceL2", "Div", "Mul"} & {node.op_type for node in exported.graph}
    onnx.checker.check_model(ir.to_proto(exported), full_check=True)
    x = batches()[0]["x"]
    predicted = session.predict({"x": x})["y"]
    for fold in (True, False):
        again = onnxruntime_outputs(export_inference(session.program, state, fold_norm=fold), {"x": x})["y"]
        assert np.abs(again - predicted).max() <= 1e-5 * np.abs(predicted).max()
    kept = export_inference(session.program, state, fold_norm=False).graph.initializers
    assert {"conv1.weight_g", "conv1.weight_v"} <= set(kept)


def test_weight_normalization_and_batch_normalization_fold_together() -> None:
    weights = {"conv.weight": random(4, 3, 3, 3)} | {f"bn.{name}": 1 + random(4, seed=7) ** 2 for name in "sbmv"}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "bn.s", "bn.b", "bn.m", "bn.v"], ["y"]),
    ]
    proto = build(nodes, weights)
    program = burnish.compile(burnish.surgery.weight_normalize(proto), loss="mse")
    exported = export_inference(program, program.initial_state())
    assert [node.op_type for node in exported.graph] == ["Conv"]
    assert set(exported.graph.initializers) == {"conv.weight", "conv.bias"}
    x = batches()[0]["x"]
    before, after = (onnxruntime_outputs(each, {"x": x})["y"] for each in (proto, exported))
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()


@pytest.mark.slow
def test_initialization_by_data() -> None:
    """Every layer's output, before its nonlinearity, has mean 0 and variance 1 per channel over all batches together."""
    data = batches()
    model = burnish.surgery.weight_normalize(network(), data=data)
    added = {f"{layer}.bias" for layer in LAYERS} | {f"{layer}.weight_{part}" for layer in LAYERS for part in "gv"}
    assert set(model.graph.initializers) == added
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    everything = np.concatenate([batch["x"] for batch in data])
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("c1", "c2", "h1", "h2"))
    outputs = onnxruntime_outputs(proto, {"x": everything})
    assert len(outputs) == 5
    for name, values in outputs.items():
        axes = (0, *range(2, values.ndim))
        np.testing.assert_allclose(values.astype(np.float64).mean(axes), 0, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(values.astype(np.float64).var(axes), 1, rtol=1e-5, err_msg=name)
    for layer in LAYERS:
        np.testing.assert_array_equal(array(model, f"{layer}.weight_v"), weights_of_network()[f"{layer}.weight"])


def test_initialization_of_some_layers_by_a_generator() -> None:
    model = burnish.surgery.weight_normalize(network(), ["fc2"], (batch for batch in batches()))
    names = set(model.graph.initializers)
    assert {"fc2.weight_g", "fc2.weight_v", "fc2.bias", "fc1.weight"} <= names
    assert "conv2.bias" not in names
    np.testing.assert_array_equal(array(model, "fc1.bias"), weights_of_network()["fc1.bias"])


def test_a_product_without_bias_over_several_axes() -> None:
    """MatMul of [batch, 3, 6, 6] has its channels last; its bias becomes a node of its own, also where it is an output."""
    proto = build([helper.make_node("MatMul", ["x", "proj.weight"], ["y"])], {"proj.weight": random(6, 5)})
    data = batches()
    model = burnish.surgery.weight_normalize(proto, data=data)
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert "proj.bias" in model.graph.initializers
    y = onnxruntime_outputs(model, {"x": np.concatenate([batch["x"] for batch in data])})["y"].reshape(-1, 5).astype(np.float64)
    np.testing.assert_allclose(y.mean(0), 0, atol=2e-6)
    np.testing.assert_allclose(y.var(0), 1, rtol=1e-5)


def test_a_shared_weight_stays_shared() -> None:
    weights = {"conv.weight": random(3, 3, 1, 1)}
    nodes = [helper.make_node("Conv", ["x", "conv.weight"], ["a"]), helper.make_node("Conv", ["a", "conv.weight"], ["y"])]
    proto = build(nodes, weights)
    model = burnish.surgery.weight_normalize(proto)
    assert set(model.graph.initializers) == {"conv.weight_g", "conv.weight_v"}
    x = batches()[0]["x"]
    before, after = (onnxruntime_outputs(each, {"x": x})["y"] for each in (proto, model))
    assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max()
    with pytest.raises(ConfigurationError, match=r"'conv\.weight' is shared by Conv .*, Conv .*leave data out"):
        burnish.surgery.weight_normalize(proto, data=batches())


def test_a_shared_bias_is_copied() -> None:
    weights = {"a.weight": random(3, 3, 1, 1), "b.weight": random(3, 3, 1, 1, seed=2), "bias": random(3)}
    nodes = [
        helper.make_node("Conv", ["x", "a.weight", "bias"], ["a"]),
        helper.make_node("Conv", ["a", "b.weight", "bias"], ["y"]),
    ]
    model = burnish.surgery.weight_normalize(build(nodes, weights), data=batches())
    y = onnxruntime_outputs(model, {"x": np.concatenate([batch["x"] for batch in batches()])})["y"].astype(np.float64)
    np.testing.assert_allclose(y.mean((0, 2, 3)), 0, atol=2e-6)
    assert "a.bias" in model.graph.initializers


def test_the_pass_leaves_other_products_alone() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 18]>
    g (float[2] x) => (float[2] y, float[2] z)
    <float[2] v = {0, 0}, float[2] g = {1, 2}, float[2] u = {3, 4}, int64[1] axes = {0}> {
        a = ReduceL2 <keepdims = 1> (v, axes)
        b = Div (g, a)
        c = Mul (v, b)
        y = Add (x, c)
        d = ReduceL2 <keepdims = 1> (x, axes)
        e = Div (g, d)
        z = Mul (u, e)
    }
    """
    model = burnish.load(onnx.parser.parse_model(text))
    before = [node.op_type for node in model.graph]
    assert not fold_weight_normalization(model)
    assert [node.op_type for node in model.graph] == before


def test_layers_without_a_match() -> None:
    with pytest.raises(
        ConfigurationError, match=r"layers: 'head' matches no Conv, Gemm or MatMul layer; .* 'conv1', 'conv2', 'fc1'"
    ):
        burnish.surgery.weight_normalize(network(), "head")
    proto = build([helper.make_node("Relu", ["x"], ["y"])], {})
    with pytest.raises(ConfigurationError, match=r"no Conv, Gemm or MatMul whose weight is a floating-point initializer"):
        burnish.surgery.weight_normalize(proto)


def test_a_channel_without_direction() -> None:
    weights = weights_of_network()
    weights["conv2.weight"][2] = 0
    with pytest.raises(ConfigurationError, match=r"channel 2 of the weight 'conv2\.weight' has length 0\.0, and so no direction"):
        burnish.surgery.weight_normalize(network(weights))
    assert "conv1.weight_g" in burnish.surgery.weight_normalize(network(weights), ["conv1", "fc?"]).graph.initializers


def test_a_weight_that_is_an_output() -> None:
    proto = network()
    proto.graph.output.append(helper.make_tensor_value_info("fc2.weight", TensorProto.FLOAT, [7, 6]))
    with pytest.raises(ConfigurationError, match=r"'fc2\.weight' is an output of the model; remove that output"):
        burnish.surgery.weight_normalize(proto)


def test_a_channel_that_is_constant_over_the_data() -> None:
    data = [{"x": np.ones((4, 3, 6, 6), np.float32)}]
    with pytest.raises(InputError, match=r"Channel 0 of the layer 'conv1' is constant over the data \(4 of 4 channels are\)"):
        burnish.surgery.weight_normalize(network(), data=data)


def test_a_bias_that_is_not_per_channel() -> None:
    weights = {"fc.weight": random(6, 5), "table": random(3, 6, 5)}
    nodes = [helper.make_node("ReduceMean", ["x"], ["p"], keepdims=0), helper.make_node("Gemm", ["f", "fc.weight", "f2"], ["y"])]
    weights["axes"] = np.asarray([1], np.int64)
    weights["shape"] = np.asarray([-1, 6], np.int64)
    nodes[0].input.append("axes")
    nodes.insert(1, helper.make_node("Reshape", ["p", "shape"], ["f"]))
    nodes.insert(2, helper.make_node("MatMul", ["f", "fc.weight"], ["f2"]))
    del weights["table"]
    with pytest.raises(ConfigurationError, match=r"bias 'f2' of Gemm .* is not one constant per channel.*leave data out"):
        burnish.surgery.weight_normalize(build(nodes, weights | {"other.weight": random(6, 5)}), "Gemm*", batches())


def test_data_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="lacks the input 'x'"):
        burnish.surgery.weight_normalize(network(), data=[{}])
    with pytest.raises(InputError, match="data must be an iterable of batches"):
        burnish.surgery.weight_normalize(network(), data=batches()[0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no batch to measure"):
        burnish.surgery.weight_normalize(network(), data=[])
