"""Identity batch normalization put into models: unchanged outputs, calibrated statistics, names, training, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import burnish
from burnish import engines
from burnish.errors import ConfigurationError, EngineError, InputError
from burnish.files.export import export_inference
from oracles.combinations import diagonal
from oracles.onnxruntime_outputs import onnxruntime_outputs
from torch_models import ResNet, export_onnx

torch.set_num_threads(1)
PARTS = ("weight", "bias", "running_mean", "running_var")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def build(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def small_network() -> onnx.ModelProto:
    """One of each layer: convolution, grouped transposed convolution, dense with and without transB."""
    weights = {
        "conv.weight": random(4, 3, 3, 3),
        "conv.bias": random(4),
        "up.weight": random(4, 3, 2, 2),
        "fc1.weight": random(7, 6),
        "fc2.weight": random(7, 5),
    }
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("ConvTranspose", ["r", "up.weight"], ["u"], group=2),
        helper.make_node("GlobalAveragePool", ["u"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc1.weight"], ["h"], transB=1),
        helper.make_node("Gemm", ["h", "fc2.weight"], ["y"]),
    ]
    return build(nodes, weights)


def array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def batches(sizes: tuple[int, ...] = (5, 2, 9)) -> list[dict[str, np.ndarray]]:
    return [
        {"x": 3 + 2 * random(size, 3, 8, 8, seed=index), "labels": np.zeros(size, np.int64)} for index, size in enumerate(sizes)
    ]


@diagonal(("after", ["Conv", "ConvTranspose", "Gemm", "*", ["conv", "fc?"]]), ("calibrated", [False, True]))
def test_outputs_stay(after: str | list[str], calibrated: bool) -> None:
    proto = small_network()
    x = batches()[0]["x"]
    before = onnxruntime_outputs(proto, {"x": x})["y"]
    model = burnish.surgery.insert(proto, after, batches() if calibrated else None)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    behind = onnxruntime_outputs(model, {"x": x})["y"]
    assert np.abs(behind - before).max() <= 1e-6 * np.abs(before).max()


def test_weights_of_all_channels_get_one_length() -> None:
    """Outputs stay, and each channel's weights are 1/sqrt(3) long; a channel without weights keeps none."""
    proto = small_network()
    proto.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(
            random(4, 3, 3, 3) * np.array([1, 40, 0, 0.1])[:, None, None, None].astype(np.float32), "conv.weight"
        )
    )
    x = batches()[0]["x"]
    before = onnxruntime_outputs(proto, {"x": x})["y"]
    model = burnish.surgery.insert(proto, "*", batches(), rescale=True)
    after = onnxruntime_outputs(model, {"x": x})["y"]
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()
    lengths = np.linalg.norm(array(model, "conv.weight").reshape(4, -1), axis=1)
    np.testing.assert_allclose(lengths, np.sqrt(1 / 3) * np.array([1, 1, 0, 1]), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(array(model, "fc1.weight"), axis=1), np.sqrt(1 / 3), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(array(model, "fc2.weight"), axis=0), np.sqrt(1 / 3), rtol=1e-5)
    # Four inputs and six outputs in two groups: the first three outputs read the first two inputs.
    up = array(model, "up.weight").reshape(2, 2, 3, 4)
    np.testing.assert_allclose(np.linalg.norm(up, axis=(1, 3)), np.sqrt(1 / 3), rtol=1e-5)


def test_a_bias_with_an_axis_for_the_samples_is_multiplied_along_the_channels() -> None:
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width]) for name, width in (("x", 3), ("y", 4)))
    weights = [numpy_helper.from_array(random(*shape), name) for name, shape in (("w", (4, 3)), ("b", (1, 4)))]
    graph = helper.make_graph([helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)], "linear", [x], [y], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    data = [{"x": random(6, 3)}]
    model = burnish.surgery.insert(proto, "*", data, rescale=True)
    assert array(model, "b").shape == (1, 4)
    expected = onnxruntime_outputs(proto, data[0])["y"]
    np.testing.assert_allclose(onnxruntime_outputs(model, data[0])["y"], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_names_and_places() -> None:
    model = burnish.surgery.insert(small_network(), "*")
    kinds = [node.op_type for node in model.graph]
    normalized = [kinds[index + 1] for index, kind in enumerate(kinds) if kind in ("Conv", "ConvTranspose", "Gemm")]
    assert normalized == ["BatchNormalization"] * 4
    added = set(model.graph.initializers) - set(burnish.load(small_network()).graph.initializers)
    assert added == {f"{layer}.norm.{part}" for layer in ("conv", "up", "fc1", "fc2") for part in PARTS}
    assert array(model, "up.norm.weight").shape == (6,)
    assert array(model, "fc1.norm.weight").shape == (7,)
    assert array(model, "fc2.norm.weight").shape == (5,)
    assert model.graph.outputs[0].name == "y"


def test_statistics_are_those_of_the_place() -> None:
    """Over batches of different sizes together, by numpy in float64."""
    data = batches()
    model = burnish.surgery.insert(small_network(), "*", data)
    proto = small_network()
    everything = np.concatenate([batch["x"] for batch in data])
    for layer, value in (("conv", "c"), ("up", "u"), ("fc1", "h")):
        proto.graph.output[0].name = value
        values = onnxruntime_outputs(proto, {"x": everything})[value].astype(np.float64)
        axes = (0, *range(2, values.ndim))
        np.testing.assert_allclose(array(model, f"{layer}.norm.running_mean"), values.mean(axes), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(array(model, f"{layer}.norm.running_var"), values.var(axes), rtol=1e-5)
        np.testing.assert_array_equal(array(model, f"{layer}.norm.bias"), array(model, f"{layer}.norm.running_mean"))
        deviation = np.sqrt(array(model, f"{layer}.norm.running_var").astype(np.float64) + 1e-5)
        np.testing.assert_allclose(array(model, f"{layer}.norm.weight"), deviation, rtol=1e-7)


def test_a_large_mean_keeps_the_digits_of_the_variance() -> None:
    weights = {"conv.weight": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)}
    proto = build([helper.make_node("Conv", ["x", "conv.weight"], ["y"])], weights)
    data = [{"x": (5000 + random(size, 3, 8, 8, seed=size)).astype(np.float32)} for size in (4, 11)]
    model = burnish.surgery.insert(proto, data=data)
    everything = np.concatenate([batch["x"] for batch in data]).astype(np.float64)
    np.testing.assert_allclose(array(model, "conv.norm.running_mean"), everything.mean((0, 2, 3)), rtol=1e-7)
    np.testing.assert_allclose(array(model, "conv.norm.running_var"), everything.var((0, 2, 3)), rtol=1e-6)


def test_without_data_nothing_is_known() -> None:
    model = burnish.surgery.insert(small_network(), epsilon=0.5, momentum=0.75)
    np.testing.assert_array_equal(array(model, "conv.norm.running_mean"), np.zeros(4))
    np.testing.assert_array_equal(array(model, "conv.norm.running_var"), np.ones(4))
    np.testing.assert_allclose(array(model, "conv.norm.weight"), np.full(4, np.sqrt(1.5)), rtol=1e-7)
    node = next(node for node in model.graph if node.op_type == "BatchNormalization")
    assert node.attributes["epsilon"].as_float() == 0.5
    assert node.attributes["momentum"].as_float() == 0.75


def test_a_layer_that_others_read_and_that_is_an_output() -> None:
    weights = {"conv.weight": random(3, 3, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Add", ["c", "r"], ["y"]),
    ]
    proto = build(nodes, weights, ("y", "c"))
    x = batches()[0]["x"]
    before = onnxruntime_outputs(proto, {"x": x})
    model = burnish.surgery.insert(proto, data=batches())
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [value.name for value in model.graph.outputs] == ["y", "c"]
    after = onnxruntime_outputs(model, {"x": x})
    for name, wanted in before.items():
        assert np.abs(after[name] - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_weights_that_an_exporter_named_by_number() -> None:
    """Folding by an exporter leaves weights without a layer's name; then the node gives it. A shared weight is no clash."""
    weights = {"onnx::Conv_12": random(3, 3, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "onnx::Conv_12"], ["a"], name="/stem/Conv"),
        helper.make_node("Conv", ["a", "onnx::Conv_12"], ["y"], name="/body/Conv"),
    ]
    model = burnish.surgery.insert(build(nodes, weights))
    assert {"/stem/Conv.norm.weight", "/body/Conv.norm.weight"} <= set(model.graph.initializers)


@pytest.mark.slow
def test_a_folded_network_trains_again() -> None:
    """The way round: fold, insert with data, train; the statistics then move by the program's rule."""
    torch.manual_seed(0)
    module = ResNet((1,), 8, 5)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    program = burnish.compile(export_onnx(module, torch.zeros(2, 3, 32, 32)))
    session = burnish.Session(program)
    folded = export_inference(program, session.state())
    assert not any(node.op_type == "BatchNormalization" for node in folded.graph)
    data = [{"x": random(6, 3, 32, 32, seed=seed)} for seed in range(2)]
    model = burnish.surgery.insert(folded, data=data)
    x = data[0]["x"]
    before, after = (onnxruntime_outputs(each, {"x": x})["logits"] for each in (folded, model))
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()
    tuned = burnish.Session(burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.01)))
    earlier = tuned.state()
    # Calibrated on these very batches: training on them starts from the outputs of inference.
    labels = np.arange(6) % 5
    evaluated = tuned.evaluate({"x": x, "labels": labels})["loss"]
    assert tuned.step({"x": x, "labels": labels})["loss"] == pytest.approx(evaluated, rel=0.05)
    assert not np.array_equal(tuned.state()["stat/conv1.norm.running_mean"], earlier["stat/conv1.norm.running_mean"])


@pytest.mark.slow
def test_layers_that_are_normalized_already_are_left_out() -> None:
    proto = export_onnx(ResNet((1,), 8, 5), torch.zeros(2, 3, 32, 32))
    with pytest.raises(ConfigurationError, match=r"follows all of the chosen layers already .*'conv1'"):
        burnish.surgery.insert(proto)
    model = burnish.surgery.insert(proto, ["Conv", "fc"])
    assert {name for name in model.graph.initializers if ".norm." in name} == {f"fc.norm.{part}" for part in PARTS}
    again = burnish.surgery.insert(proto, "conv1")
    assert "conv1.norm.weight" in again.graph.initializers


def test_the_model_is_loaded_once_however_many_batches_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(onnxruntime.InferenceSession):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    burnish.surgery.insert(small_network(), data=batches((5, 2, 9)))
    assert len(made) == 1


def test_another_engine_measures_the_same() -> None:
    data = batches()
    expected = burnish.surgery.insert(small_network(), data=data)
    measured = burnish.surgery.insert(small_network(), data=data, engine=engines.get("reference"))
    for part in ("running_mean", "running_var"):
        np.testing.assert_allclose(
            array(measured, f"conv.norm.{part}"), array(expected, f"conv.norm.{part}"), rtol=1e-4, atol=1e-5
        )


def test_dropout_is_off_and_normalization_at_inference_while_measuring() -> None:
    weights = {"conv.weight": random(4, 3, 1, 1), "ratio": np.float32(0.5), "training": np.asarray(True)} | {
        name: np.full(3, number, np.float32) for name, number in zip("sbmv", (1, 0, 2, 4), strict=True)
    }
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n"], epsilon=0.0, training_mode=1),
        helper.make_node("Dropout", ["n", "ratio", "training"], ["d"]),
        helper.make_node("Conv", ["d", "conv.weight"], ["y"]),
    ]
    nodes[0].output.extend(["nm", "nv"])
    data = batches()
    model = burnish.surgery.insert(build(nodes, weights), data=data)
    x = (np.concatenate([batch["x"] for batch in data]).astype(np.float64) - 2) / 2
    values = np.einsum("oi,nihw->nohw", weights["conv.weight"][:, :, 0, 0].astype(np.float64), x)
    np.testing.assert_allclose(array(model, "conv.norm.running_var"), values.var((0, 2, 3)), rtol=1e-5)


def test_unfold_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be recovered.*burnish\.surgery\.insert"):
        burnish.surgery.unfold(small_network())


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("head.*", r"after: 'head\.\*' matches no Conv or ConvTranspose or Gemm layer; the model's layers are: 'conv', 'up'"),
        (["Conv", "head"], "after: 'head' matches no"),
        (3, "after must be a name or pattern of layers"),
        ([], "after must be a name or pattern of layers"),
    ],
)
def test_nothing_to_put_it_behind(after: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        burnish.surgery.insert(small_network(), after)  # type: ignore[arg-type]


def test_no_such_operator_in_the_model() -> None:
    proto = build([helper.make_node("Conv", ["x", "conv.weight"], ["y"])], {"conv.weight": random(3, 3, 1, 1)})
    with pytest.raises(ConfigurationError, match=r"no Gemm layer; its layers are: 'conv'.*'Conv', 'ConvTranspose', 'Gemm'"):
        burnish.surgery.insert(proto, "Gemm")


def test_weights_of_unknown_size() -> None:
    proto = build([helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[1, 1])], {})
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["channels", 3, 1, 1]))
    with pytest.raises(ConfigurationError, match=r"channels that Conv .* returns is not known.*choose other layers"):
        burnish.surgery.insert(proto)


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 0.0},
        {"epsilon": float("nan")},
        {"epsilon": "small"},
        {"momentum": 1.5},
        {"momentum": -0.1},
        {"momentum": None},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="epsilon must be positive and finite, and momentum between 0 and 1"):
        burnish.surgery.insert(small_network(), **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no batch to measure: the data set is empty"),
        ({"x": random(1, 3, 8, 8)}, r"data must be an iterable of batches.*not a dict: give \[batch\]"),
        (random(1, 3, 8, 8), "data must be an iterable of batches"),
        ([random(1, 3, 8, 8)], r"A batch is a dict of arrays.*not a ndarray: give \{'x': \.\.\.\}"),
        ([{"image": random(1, 3, 8, 8)}], r"lacks the input 'x' \(FLOAT of shape \[batch, 3, 8, 8\]\); it has 'image'"),
        ([{"x": random(1, 3, 8)}], r"'x' has shape \[1, 3, 8\], and the model takes FLOAT of shape \[batch, 3, 8, 8\]"),
        ([{"x": random(1, 4, 8, 8)}], r"'x' has shape \[1, 4, 8, 8\]"),
        ([{"x": random(0, 3, 8, 8)}], r"'x' is empty .*leave empty batches out"),
        ([{"x": np.zeros((1, 3, 8, 8), np.int64)}], r"'x' has dtype int64, expected float32: convert it with \.astype"),
        ([{"x": np.full((1, 3, 8, 8), np.nan, np.float32)}], "values at the layer 'conv' are not finite.*look for NaN"),
    ],
)
def test_data_that_does_not_fit(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        burnish.surgery.insert(small_network(), data=data)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_run() -> None:
    weights = {"conv.weight": random(4, 3, 3, 3), "shape": np.asarray([7, -1], np.int64)}
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Reshape", ["r", "back"], ["b"]),
        helper.make_node("Conv", ["b", "conv.weight"], ["y"]),
    ]
    weights["back"] = np.asarray([-1, 3, 8, 8], np.int64)
    with pytest.raises(
        EngineError,
        match=r"Batch 1 cannot be measured; check the shapes of its arrays\. ONNX Runtime .* failed in the model graph",
    ):
        burnish.surgery.insert(build(nodes, weights), data=[{"x": random(1, 3, 8, 8)}])


def test_half_precision_that_cannot_hold_the_variance() -> None:
    proto = build([helper.make_node("Conv", ["x", "conv.weight"], ["y"])], {"conv.weight": random(3, 3, 1, 1).astype(np.float16)})
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    x = random(4, 3, 8, 8).astype(np.float16)
    model = burnish.surgery.insert(proto, data=[{"x": x}])
    assert array(model, "conv.norm.running_var").dtype == np.float16
    with pytest.raises(ConfigurationError, match=r"statistics behind Conv .* are too large for FLOAT16"):
        burnish.surgery.insert(proto, data=[{"x": 1000 * x}])
