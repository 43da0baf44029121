"""Models of every opset give the same outputs on ONNX Runtime before and after they are made canonical."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.engines.reference import ReferenceEngine
from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.importer import load
from oracles.combinations import diagonal, spread
from oracles.onnxruntime_outputs import onnxruntime_outputs
from specs.opset_models import CASES, LAST, Case, Draft, opsets_of_versions

# Where no operator has a new version, the newest opset tells of the others, which come through the same conversions.
PAIRS = [
    pytest.param(case, opset, id=f"{case.name}-{opset}", marks=() if opset in quick else pytest.mark.slow)
    for case in CASES
    for quick in [{*opsets_of_versions(case), case.opsets[-1]}]
    for opset in case.opsets
]


def _input(case: Case) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(7).normal(size=case.shape).astype(np.float32)}


@spread(("case", "opset"), PAIRS, test=51)
def test_canonical_model_computes_the_same(case: Case, opset: int) -> None:
    source = case.make(opset)
    canonical = load(source)
    assert canonical.opset_imports[""] == max(18, opset)
    proto = ir.to_proto(canonical)
    onnx.checker.check_model(proto, full_check=True)
    expected, found = onnxruntime_outputs(source, _input(case)), onnxruntime_outputs(proto, _input(case))
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


CONVERTED = ("convolutional_classifier", "clip_both", "slice_axes", "squeeze_unsqueeze", "reducesum", "reducemean", "split_sizes")


@pytest.mark.parametrize("opset", [8, 9, 11, 13])
@pytest.mark.parametrize("name", CONVERTED)
def test_agrees_with_the_converter_of_onnx(name: str, opset: int) -> None:
    case = next(case for case in CASES if case.name == name)
    source = case.make(opset)
    converted = onnx.version_converter.convert_version(source, 18)
    expected, found = onnxruntime_outputs(converted, _input(case)), onnxruntime_outputs(load(source), _input(case))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("opset", range(LAST + 1, onnx.defs.onnx_opset_version() + 1))
def test_opsets_newer_than_the_runtime_load(opset: int) -> None:
    for case in CASES:
        if opset in range(case.since, case.until + 3):
            assert load(case.make(opset)).opset_imports[""] == opset


def _batch_normalization(opset: int, outputs: list[str], graph_outputs: list[str], **attributes: object) -> onnx.ModelProto:
    d = Draft(opset)
    operands = [d.weight(np.ones(3, np.float32), name) for name in ("scale", "bias", "mean", "var")]
    d.nodes.append(helper.make_node("BatchNormalization", ["x", *operands], outputs, name="norm", **attributes))
    return d.model(["batch", 3, 4, 4], [(name, TensorProto.FLOAT) for name in graph_outputs])


def _per_position(opset: int, outputs: list[str], returned: list[str]) -> onnx.ModelProto:
    """Batch normalization with a scale, bias, mean and variance of their own for each position of each channel."""
    d, rng = Draft(opset), np.random.default_rng(3)
    arrays = [rng.uniform(0.5, 2, (3, 4, 4)).astype(np.float32) for _ in range(4)]
    operands = [d.weight(array, name) for array, name in zip(arrays, ("scale", "bias", "mean", "var"), strict=True)]
    d.nodes.append(helper.make_node("BatchNormalization", ["x", *operands], outputs, name="norm", spatial=0))
    return d.model(["batch", 3, 4, 4], [(name, TensorProto.FLOAT) for name in returned])


@pytest.mark.parametrize("opset", [7, 8])
def test_batch_normalization_per_position_is_frozen_and_trained(opset: int) -> None:
    """Each position is a channel of its own: in inference by the running statistics, in training by those of the batch."""
    source = _per_position(opset, ["y"], ["y"])
    scale, bias, mean, variance = (numpy_helper.to_array(tensor).astype(float) for tensor in source.graph.initializer)
    x = np.random.default_rng(4).normal(size=(5, 3, 4, 4)).astype(np.float32)
    frozen = (x - mean) / np.sqrt(variance + 1e-5) * scale + bias
    trained = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) * scale + bias
    for norm, expected in (("frozen", frozen), ("train", trained)):
        program = burnish.compile(source, loss="mse", norm=norm)
        assert set(program.signature["step"].updates) >= {"param/scale", "param/bias"}
        with burnish.Session(program, threads=1) as session:
            np.testing.assert_allclose(session.predict({"x": x})["y"], frozen, rtol=1e-4, atol=1e-5)
            loss = session.step({"x": x, "targets": np.zeros_like(x)})["loss"]
        assert loss == pytest.approx(np.mean(expected**2), rel=1e-5)
    lowered = burnish.lower(source)
    np.testing.assert_allclose(onnxruntime_outputs(lowered, {"x": x})["y"], frozen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [7, 8])
def test_statistics_for_every_position_that_are_read_are_a_named_error(opset: int) -> None:
    message = r"BatchNormalization 'norm' \(output 'y'\) has spatial=0.*the model reads the statistics.*remove these outputs"
    with pytest.raises(UnsupportedOperatorError, match=message):
        load(_per_position(opset, SAVED, ["y", "m"]))


@pytest.mark.parametrize("opset", [7, 8])
def test_batch_normalization_per_channel_loses_the_attribute(opset: int) -> None:
    node = next(iter(load(_batch_normalization(opset, ["y"], ["y"], spatial=1)).graph))
    assert "spatial" not in node.attributes
    assert "training_mode" not in node.attributes
    assert len(node.outputs) == 1


@pytest.mark.parametrize("opset", [7, 9, 13])
def test_batch_normalization_with_five_outputs_was_in_training_mode(opset: int) -> None:
    source = _batch_normalization(opset, ["y", "m", "v", "saved_mean", "saved_var"], ["y", "m"], momentum=0.8)
    node = next(iter(load(source).graph))
    assert node.attributes["training_mode"].as_int() == 1
    assert node.attributes["momentum"].as_float() == pytest.approx(0.8)
    assert [output.name for output in node.outputs] == ["y", "m", "v"]


SAVED = ["y", "m", "v", "saved_mean", "saved_var"]


def _double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float64."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    return model


@diagonal(
    ("names", [SAVED, ["y", "", "", "saved_mean", "saved_var"], ["y", "", "", "", "saved_var"]]), ("opset", [7, 8, 9, 13]), test=7
)
def test_saved_statistics_have_the_values_and_gradients_of_pytorch(opset: int, names: list[str]) -> None:
    """A mean of a thousand deviations costs their gradients no digits either."""
    wanted = [name for name in names if name]
    source = _double(_batch_normalization(opset, names, wanted, momentum=0.75, epsilon=2**-10))
    random = np.random.default_rng(opset)
    x = torch.tensor(random.normal(1000.0, 1.0, size=(2, 3, 4, 4)), requires_grad=True)
    mean = x.mean((0, 2, 3))
    variance = (x - mean[:, None, None]).square().mean((0, 2, 3))
    y = torch.nn.functional.batch_norm(x, None, None, torch.ones(3).double(), torch.ones(3).double(), training=True, eps=2**-10)
    expected = dict(zip(SAVED, (y, 0.75 + 0.25 * mean, 0.75 + 0.25 * variance, mean, variance), strict=True))
    for name in wanted:
        cotangent = random.normal(size=tuple(expected[name].shape))
        (gradient,) = torch.autograd.grad(expected[name], x, torch.tensor(cotangent), retain_graph=True)
        found = ReferenceEngine().run(
            burnish.grad(source, wrt=["x"], of=name), {"x": x.detach().numpy(), f"cotangent:{name}": cotangent}
        )
        for other in wanted:
            np.testing.assert_allclose(found[other], expected[other].detach().numpy(), rtol=1e-10, atol=1e-12, err_msg=other)
        np.testing.assert_allclose(found["grad:x"], gradient.numpy(), rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_loss_over_saved_statistics_trains(dtype: type) -> None:
    """x @ w, normalized; the loss reads the variance that was saved, whose slope in w is known."""
    d = Draft(9)
    d.weight(np.array([[1.0, -2.0], [0.5, 3.0]], dtype), "w")
    d.nodes.append(helper.make_node("MatMul", ["x", "w"], ["h"]))
    operands = [d.weight(np.full(2, number, dtype), name) for name, number in (("s", 1), ("b", 0), ("mean", 0), ("var", 1))]
    d.nodes.append(helper.make_node("BatchNormalization", ["h", *operands], SAVED, name="norm"))
    elements = TensorProto.FLOAT16 if dtype is np.float16 else TensorProto.FLOAT
    proto = d.model(["batch", 2], [("y", elements), ("saved_var", elements)])
    for value in proto.graph.input:
        value.type.tensor_type.elem_type = elements
    program = burnish.compile(proto, loss="mse", outputs="saved_var", trainable=["w"], optimizer="sgd:lr=0.01")
    x = np.random.default_rng(0).normal(size=(6, 2)).astype(dtype)
    w = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64, requires_grad=True)
    h = torch.tensor(x.astype(np.float64)) @ w
    loss = (h.var(0, unbiased=False) - 1).square().mean()
    (slope,) = torch.autograd.grad(loss, w)
    tolerance = 1e-5 if dtype is np.float32 else 5e-3
    for engine in ("onnxruntime", "torch"):
        session = burnish.Session(program, engine)
        stepped = session.step({"x": x, "targets": np.ones(2, dtype)})
        assert stepped["loss"] == pytest.approx(loss.item(), rel=tolerance)
        moved = session.state()["param/w"]
        np.testing.assert_allclose(moved, w.detach().numpy() - 0.01 * slope.numpy(), rtol=tolerance, atol=tolerance)


def test_saved_statistics_of_a_value_of_unknown_rank_are_a_named_error() -> None:
    source = _batch_normalization(9, SAVED, ["y", "saved_mean"])
    source.graph.node[0].input[0] = "z"
    source.graph.node.insert(0, helper.make_node("Reshape", ["x", "target"], ["z"]))
    source.graph.input.append(helper.make_tensor_value_info("target", TensorProto.INT64, ["rank"]))
    message = r"BatchNormalization 'norm'.*saved mean or variance.*rank of its input 'z'"
    with pytest.raises(UnsupportedOperatorError, match=message):
        load(source)


@pytest.mark.parametrize(
    ("opset", "attributes", "ratio"), [(7, {"ratio": 0.25}, 0.25), (10, {"ratio": 0.75}, 0.75), (11, {}, 0.5)]
)
def test_dropout_stays_dropout_with_its_ratio(opset: int, attributes: dict[str, float], ratio: float) -> None:
    d = Draft(opset)
    model = load(d.model(["batch", 3], [(d.node("Dropout", "x", **attributes), TensorProto.FLOAT)]))
    node = next(node for node in model.graph if node.op_type == "Dropout")
    assert ir.convenience.get_const_tensor(node.inputs[1]).numpy() == np.float32(ratio)  # type: ignore[union-attr]
    assert len(node.inputs) == 2


def test_mask_of_an_old_dropout_keeps_its_dtype() -> None:
    d = Draft(7)
    output, mask = d.node("Dropout", "x", ratio=0.25, outputs=2).split(",")
    y = d.node("Mul", output, mask)
    model = load(d.model(["batch", 3], [(y, TensorProto.FLOAT), (mask, TensorProto.FLOAT)]))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {value.name: value.dtype for value in model.graph.outputs}[mask] == ir.DataType.FLOAT


def test_scan_with_a_batch_axis_is_a_named_error() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("s", "e")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("t", "o")],
    )
    d = Draft(8)
    initial = d.weight(np.zeros((1, 2), np.float32))
    d.nodes.append(helper.make_node("Scan", ["", initial, "x"], ["last", "all"], body=body, num_scan_inputs=1))
    with pytest.raises(UnsupportedOperatorError, match="Scan of opset 8"):
        load(d.model([1, 3, 2], [("last", TensorProto.FLOAT)]))


def test_resize_coordinates_without_an_equivalent_are_a_named_error() -> None:
    d = Draft(11)
    roi, scales = d.weight(np.zeros(0, np.float32)), d.weight(np.asarray([1, 1, 2, 2], np.float32))
    attributes = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "ceil"}
    y = d.node("Resize", "x", roi, scales, mode="nearest", **attributes)
    with pytest.raises(UnsupportedOperatorError, match="tf_half_pixel_for_nn"):
        load(d.model([1, 1, 4, 4], [(y, TensorProto.FLOAT)]))


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_rows_of_one_element_where_the_axis_is_the_rank(op_type: str) -> None:
    """Split behind its last axis the input is a column; ONNX Runtime does not take it."""
    d = Draft(7)
    model = load(_single_output(d, d.node(op_type, "x", axis=1), [4]))
    x = {"x": np.array([0.5, -1, 2, 0], np.float32)}
    expected = np.zeros(4) if op_type == "LogSoftmax" else np.ones(4)
    (found,) = onnxruntime_outputs(model, x).values()
    np.testing.assert_array_equal(found, expected)


def _single_output(draft: Draft, output: str, shape: list[int | str]) -> onnx.ModelProto:
    return draft.model(shape, [(output, TensorProto.FLOAT)])


@pytest.mark.parametrize("opset", [1, 6])
def test_opset_before_7_is_refused(opset: int) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=3,
    )
    with pytest.raises(ModelError, match=rf"of opset {opset}, and burnish reads 7 to"):
        load(model)


def test_opset_newer_than_onnx_is_refused() -> None:
    model = CASES[1].make(18)
    model.opset_import[0].version = onnx.defs.onnx_opset_version() + 1
    with pytest.raises(ModelError, match=r"(?s)update onnx"):
        load(model)
