"""What is exported of files in float16 and bfloat16: the dtypes that they came with, and the numbers of the session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

import burnish
from burnish.data import open_dataset
from burnish.errors import CheckpointError
from burnish.training.trained_model import open_model
from oracles import small_networks
from oracles.combinations import diagonal
from oracles.sixteen_bit_files import BLOCKED, NETWORKS, UNIT, array_in, classifier, converted, single, weights_of

HALF = onnx.TensorProto.FLOAT16
GENERATOR = np.random.default_rng(0)
ENGINES = ("onnxruntime", "torch")
DTYPES = ("float16", "bfloat16")


def operators(proto: onnx.ModelProto, form: str) -> list[str]:
    """In order; without what is merged where a value is cast, or a constant held, several times."""
    names = [node.op_type for node in proto.graph.node]
    return names if form != "blocked" else [name for name in names if name not in ("Cast", "Constant")]


@diagonal(
    ("network", ["perceptron", "mobile"]),
    ("dtype", DTYPES),
    ("form", ["own_io", "float32_io", "blocked"]),
    ("fold_norm", [False, True]),
)
def test_the_export_has_the_dtypes_of_the_file(network: str, dtype: str, form: str, fold_norm: bool, tmp_path: Path) -> None:
    source, batch = single(network, dtype), small_networks.batch_of(NETWORKS[network]())
    file = converted(source, dtype, form != "own_io", BLOCKED[network] if form == "blocked" else ())
    session = burnish.Session(burnish.compile(file, optimizer=burnish.optim.sgd(lr=0.01)), "onnxruntime")
    for _ in range(3):
        session.step(batch)
    path = session.export(tmp_path / "tuned.onnx", fold_norm=fold_norm)
    exported = onnx.load(path)
    # Exporters write convolutions of bfloat16 at opsets that do not have them yet, and the file keeps its opset.
    onnx.checker.check_model(exported, full_check=dtype == "float16" or network == "perceptron")
    for direction in ("input", "output"):
        before, after = (getattr(proto.graph, direction) for proto in (file, exported))
        assert [(v.name, v.type.tensor_type.elem_type) for v in before] == [(v.name, v.type.tensor_type.elem_type) for v in after]
    weights, given = weights_of(exported), weights_of(file)
    if not fold_norm:
        assert operators(exported, form) == operators(file, form)
        assert {name: (array.dtype, array.shape) for name, array in weights.items()} == {
            name: (array.dtype, array.shape) for name, array in given.items()
        }
        state = session.state()
        for name, array in weights.items():
            master = state[f"param/{name}"] if f"param/{name}" in state else state[f"stat/{name}"]
            np.testing.assert_array_equal(array, array_in(dtype, master))
    else:
        assert {array.dtype for array in weights.values()} == {array_in(dtype, np.zeros(1)).dtype}
    x = batch["x"]
    if dtype == "float16":
        fed = x.astype(np.float16) if form == "own_io" else x
        (found,) = onnxruntime.InferenceSession(path).run(None, {"x": fed})
        expected = session.predict({"x": x})["logits"]
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=10 * UNIT[dtype] * np.abs(expected).max())


def test_a_statistic_beyond_the_dtype_is_an_error_of_the_export_that_names_it(tmp_path: Path) -> None:
    session = burnish.Session(burnish.compile(converted(single("mobile", "float16"), "float16")), "onnxruntime")
    state = session.state()
    state["stat/last.normalization.variance"][3] = 70000.0
    session.load_state(state)
    with pytest.raises(CheckpointError, match=r"'last\.normalization\.variance' holds 70000, too large for float16"):
        session.export(tmp_path / "tuned.onnx")


def test_what_a_float32_file_computes_in_float16_is_trained_in_float32(tmp_path: Path) -> None:
    """As an export of a module under autocast has it: weights in float32, and products between casts."""
    nodes = [
        helper.make_node("Cast", ["x"], ["x16"], to=HALF),
        helper.make_node("Cast", ["weight"], ["w16"], to=HALF),
        helper.make_node("MatMul", ["x16", "w16"], ["y16"]),
        helper.make_node("Cast", ["y16"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "autocast",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "weight")],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=1.0)), "onnxruntime")
    assert not any(value.dtype == ir.DataType.FLOAT16 for node in session.program.grad.graph for value in node.outputs)
    session.step({"x": np.full((2, 3), 1e-4, np.float32), "targets": np.zeros((2, 3), np.float32)})
    exported = onnx.load(session.export(tmp_path / "tuned.onnx"))
    assert [node.op_type for node in exported.graph.node] == [node.op_type for node in nodes]
    assert weights_of(exported)["weight"].dtype == np.float32


@pytest.mark.slow
@diagonal(("dtype", DTYPES), ("engine", ENGINES))
def test_an_exported_file_is_evaluated_as_the_session_that_it_came_from(dtype: str, engine: str, tmp_path: Path) -> None:
    file, batch = converted(single("mobile", dtype), dtype), small_networks.batch_of(small_networks.mobile())
    session = burnish.Session(burnish.compile(file), engine)
    session.step(batch)
    np.savez(tmp_path / "data.npz", **batch)
    exported = open_model(session.export(tmp_path / "tuned.onnx", fold_norm=False), engine=engine)
    predicted = exported.predict(open_dataset(tmp_path / "data.npz", exported.to_predict))["logits"]
    expected = session.predict({"x": batch["x"]})["logits"]
    assert predicted.dtype == expected.dtype
    predicted, expected = predicted.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=10 * UNIT[dtype] * np.abs(expected).max())
    figures = exported.evaluate(open_dataset(tmp_path / "data.npz", exported.to_evaluate))
    assert figures["loss"] == pytest.approx(session.evaluate(batch)["loss"], rel=10 * UNIT[dtype])


@pytest.mark.slow
def test_recurrent_layers_stay_in_the_export(tmp_path: Path) -> None:
    """Written out, ONNX Runtime ends the process when it loads them in float16."""
    weights = {"w": GENERATOR.standard_normal((1, 12, 4)) / 2, "r": GENERATOR.standard_normal((1, 12, 3)) / 2}
    nodes = [
        helper.make_node("Transpose", ["x"], ["frames"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["frames", "w", "r"], ["", "last"], hidden_size=3),
        helper.make_node("Squeeze", ["last", "axes"], ["y"]),
    ]
    proto = classifier(nodes, weights, ["batch", 5, 4])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
    session = burnish.Session(burnish.compile(proto), "onnxruntime")
    x = GENERATOR.standard_normal((6, 5, 4)).astype(np.float16)
    session.step({"x": x, "labels": np.arange(6) % 3})
    path = session.export(tmp_path / "tuned.onnx")
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Transpose", "LSTM", "Squeeze"]
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(found, session.predict({"x": x})["y"], rtol=0, atol=4 * UNIT["float16"])
