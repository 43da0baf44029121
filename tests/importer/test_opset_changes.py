"""Models of every opset give the same outputs on ONNX Runtime before and after they are made canonical."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs
from specs.opset_models import CASES, LAST, Case, Draft

PAIRS = [pytest.param(case, opset, id=f"{case.name}-{opset}") for case in CASES for opset in case.opsets]


def _input(case: Case) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(7).normal(size=case.shape).astype(np.float32)}


@pytest.mark.parametrize(("case", "opset"), PAIRS)
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


@pytest.mark.parametrize("opset", [7, 8])
def test_batch_normalization_per_position_is_a_named_error(opset: int) -> None:
    with pytest.raises(
        UnsupportedOperatorError, match=r"BatchNormalization 'norm' \(output 'y'\) has spatial=0.*no training form"
    ):
        load(_batch_normalization(opset, ["y"], ["y"], spatial=0))


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


def test_saved_statistics_that_are_read_are_a_named_error() -> None:
    source = _batch_normalization(9, ["y", "m", "v", "saved_mean", "saved_var"], ["y", "saved_mean"])
    with pytest.raises(UnsupportedOperatorError, match=r"BatchNormalization 'norm'.*saved mean or variance.*'saved_mean'"):
        load(source)


@pytest.mark.parametrize("opset", [7, 10, 11])
def test_dropout_stays_dropout_with_its_ratio(opset: int) -> None:
    d = Draft(opset)
    model = load(d.model(["batch", 3], [(d.node("Dropout", "x", ratio=0.25), TensorProto.FLOAT)]))
    node = next(node for node in model.graph if node.op_type == "Dropout")
    assert ir.convenience.get_const_tensor(node.inputs[1]).numpy() == np.float32(0.25)  # type: ignore[union-attr]
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
