"""Files in float16 and bfloat16 train as files in float32 do, and are exported with the dtypes that they came with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper
from torch.nn import functional

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.reference import ReferenceEngine
from burnish.errors import ModelError
from oracles import small_networks
from oracles.combinations import diagonal, named
from oracles.sixteen_bit_files import BLOCKED, NETWORKS, UNIT, array_in, classifier, converted, single, weights_of
from oracles.standard_operators import STANDARD

HALF = onnx.TensorProto.FLOAT16
GENERATOR = np.random.default_rng(0)
ROWS = np.array([[0, 1, 1], [4, 1, 0], [0, 0, 0], [2, 3, 0]])


def dense() -> tuple[onnx.ModelProto, np.ndarray]:
    weights = {"weight": GENERATOR.standard_normal((4, 3)), "bias": np.zeros(3)}
    return classifier([helper.make_node("Gemm", ["x", *weights], ["y"])], weights, ["batch", 4]), GENERATOR.standard_normal(
        (8, 4)
    )


def max_pooled() -> tuple[onnx.ModelProto, np.ndarray]:
    """A weight is before the pooling, so that its gradient goes through it."""
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["scaled"]),
        helper.make_node("Relu", ["scaled"], ["positive"]),  # it makes a layer of the product
        helper.make_node("MaxPool", ["positive"], ["pooled"], kernel_shape=[3, 3], strides=[1, 1]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight"], ["y"]),
    ]
    weights = {"scale": GENERATOR.uniform(0.5, 1.5, (2, 1, 1)), "weight": GENERATOR.standard_normal((8, 3))}
    return classifier(nodes, weights, ["batch", 2, 4, 4]), GENERATOR.standard_normal((8, 2, 4, 4))


def gathered() -> tuple[onnx.ModelProto, np.ndarray]:
    """GatherElements takes the rows of its indices, as many as they are."""
    nodes = [
        helper.make_node("GatherElements", ["table", "indices"], ["rows"], axis=0),
        helper.make_node("Gemm", ["x", "rows"], ["y"]),
    ]
    proto = classifier(nodes, {"table": GENERATOR.standard_normal((5, 3))}, ["batch", 4])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(ROWS, "indices"))
    return proto, GENERATOR.standard_normal((8, 4))


ORACLES = {
    dense: lambda x, weight, bias: x @ weight + bias,
    max_pooled: lambda x, scale, weight: functional.max_pool2d((x * scale).relu(), 3, 1).flatten(1) @ weight,
    gathered: lambda x, table: x @ table.gather(0, torch.from_numpy(ROWS)),
}


@pytest.mark.parametrize("build", ORACLES)
def test_a_float16_classifier_takes_the_step_of_pytorch(build):
    source, x = build()
    x, labels = x.astype(np.float16), np.arange(8) % 3
    session = burnish.Session(burnish.compile(source, loss="cross_entropy", optimizer=burnish.optim.SGD(lr=0.5)), "onnxruntime")
    weights = {name: array for name, array in session.state().items() if name.startswith("param/")}
    exact = [torch.from_numpy(array).double().requires_grad_() for array in weights.values()]
    loss = functional.cross_entropy(ORACLES[build](torch.from_numpy(x).double(), *exact), torch.from_numpy(labels))
    loss.backward()
    assert session.step({"x": x, "labels": labels})["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, before in zip(weights, exact, strict=True):
        stepped = session.state()[name]
        assert stepped.dtype == np.float32
        np.testing.assert_allclose(stepped, (before - 0.5 * before.grad).detach(), rtol=1e-5, atol=1e-6)


ENGINES = ("onnxruntime", "torch")
DTYPES = ("float16", "bfloat16")


def trained(proto: onnx.ModelProto, engine: str, batch: dict[str, np.ndarray], steps: int, **options: Any) -> list[float]:
    session = burnish.Session(burnish.compile(proto, **options), engine)
    return [session.step(batch)["loss"] for _ in range(steps)]


@pytest.mark.slow
@diagonal(("engine", ENGINES), ("dtype", DTYPES), ("keep_io", named([False, True], ["own_io", "float32_io"])))
def test_the_loss_falls_as_in_float32_through_a_checkpoint(engine: str, dtype: str, keep_io: bool, tmp_path: Path) -> None:
    """Updates of 1e-4 of the gradient are below what sixteen bits hold beside the weights."""
    source = single("perceptron", dtype)
    batch, options = small_networks.batch_of(small_networks.perceptron()), {"optimizer": burnish.optim.sgd(lr=1e-4)}
    first, *_, last = trained(source, engine, batch, 300, **options)
    program = burnish.compile(converted(source, dtype, keep_io), **options)
    session = burnish.Session(program, engine)
    losses = [session.step(batch)["loss"] for _ in range(150)]
    session.save_checkpoint(tmp_path / "half.safetensors")
    uninterrupted = [session.step(batch)["loss"] for _ in range(150)]
    resumed = burnish.Session(program, engine)
    resumed.restore(tmp_path / "half.safetensors")
    losses += [resumed.step(batch)["loss"] for _ in range(150)]
    assert losses[150:] == uninterrupted
    assert first - last > 1e-3
    assert losses[0] - losses[-1] == pytest.approx(first - last, rel=0.05)


@pytest.mark.slow
@diagonal(("network", NETWORKS), ("dtype", DTYPES), ("form", ["own_io", "float32_io", "blocked"]))
def test_networks_take_the_steps_of_their_file_in_float32(network: str, dtype: str, form: str) -> None:
    source, batch = single(network, dtype), small_networks.batch_of(NETWORKS[network]())
    batch = {
        name: array_in(dtype, array).astype(np.float32) if array.dtype == np.float32 else array for name, array in batch.items()
    }
    options = {"optimizer": burnish.optim.adam(lr=1e-3), "norm": "train"}
    blocked = BLOCKED[network] if form == "blocked" else ()
    file = converted(source, dtype, form != "own_io", blocked)
    session = burnish.Session(burnish.compile(file, **options), "onnxruntime")
    expected = burnish.Session(burnish.compile(source, **options), "onnxruntime")
    for _ in range(3):
        # Constants of the file, such as epsilon and the factors of GELU, are rounded to the dtype.
        assert session.step(batch)["loss"] == pytest.approx(
            expected.step(batch)["loss"], rel=2e-2 if dtype == "bfloat16" else 2e-3
        )
    state = session.state()
    assert {array.dtype for name, array in state.items() if name.startswith(("param/", "stat/"))} == {np.dtype(np.float32)}


@pytest.mark.slow
@diagonal(("network", NETWORKS), ("dtype", DTYPES), ("engine", ENGINES))
def test_predictions_are_those_of_the_file(network: str, dtype: str, engine: str) -> None:
    """ONNX Runtime has no kernels of bfloat16: what the file says is computed in float32 there."""
    source, batch = single(network, dtype), small_networks.batch_of(NETWORKS[network]())
    (name, array), _ = batch.items()
    predicted = burnish.Session(burnish.compile(converted(source, dtype)), engine).predict({name: array})["logits"]
    assert predicted.dtype == array_in(dtype, np.zeros(1)).dtype
    (expected,) = onnxruntime.InferenceSession(source.SerializeToString()).run(None, {name: array})
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        predicted.astype(np.float32), expected, rtol=0, atol=scale * (5e-2 if dtype == "bfloat16" else 5e-3)
    )


@pytest.mark.slow
@diagonal(("dtype", DTYPES), ("engine", ENGINES))
def test_a_frozen_base_stays_in_the_dtype_of_the_file(dtype: str, engine: str, tmp_path: Path) -> None:
    source = single("transformer", dtype)
    file, batch = converted(source, dtype), small_networks.batch_of(small_networks.transformer())
    options = {"optimizer": burnish.optim.sgd(lr=1e-2), "trainable": ["head.*"]}
    session = burnish.Session(burnish.compile(file, **options), engine)
    before = session.state()
    losses = [session.step(batch)["loss"] for _ in range(20)]
    after = session.state()
    for name, array in after.items():
        if name.startswith("param/"):
            is_trained = name.startswith("param/head.")
            assert array.dtype == (np.float32 if is_trained else array_in(dtype, np.zeros(1)).dtype)
            assert (array.tobytes() != before[name].tobytes()) == is_trained
    expected = trained(source, engine, batch, 20, **options)
    assert losses[0] - losses[-1] == pytest.approx(expected[0] - expected[-1], rel=0.05)
    exported, given = weights_of(onnx.load(session.export(tmp_path / "tuned.onnx"))), weights_of(file)
    kept = [name for name in exported if name in given and not name.startswith("head.")]
    assert len(kept) > 5
    assert all(exported[name].tobytes() == given[name].tobytes() for name in kept)


def test_only_the_rows_of_a_frozen_table_that_are_read_become_float32() -> None:
    program = burnish.compile(converted(single("transformer", "float16"), "float16"), trainable=["head.*"])
    (table,) = (value for value in program.grad.graph.inputs if value.name == "param/embedding")
    assert table.dtype == ir.DataType.FLOAT16
    assert [node.op_type for node, _ in table.uses()] == ["Gather"]


@pytest.mark.slow
def test_running_statistics_move_by_less_than_sixteen_bits_hold() -> None:
    """Of a mean of 1000 float16 holds every half: updates of a thousandth of what the batch is off are lost in it."""
    source = single("mobile", "float16")
    batch = small_networks.batch_of(small_networks.mobile())
    for tensor in source.graph.initializer:
        if tensor.name == "stem.normalization.mean":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(8, 1000.0, np.float32), tensor.name))
    states = []
    for file in (source, converted(source, "float16")):
        session = burnish.Session(burnish.compile(file, norm="train:momentum=0.9999"), "onnxruntime")
        for _ in range(2):
            session.step(batch)
        states.append(session.state()["stat/stem.normalization.mean"])
    assert not np.array_equal(states[0], np.full(8, 1000.0))
    np.testing.assert_allclose(states[1], states[0], rtol=1e-6)


def test_gradients_below_the_smallest_float16_still_move_weights() -> None:
    """The scale of 1e-6 makes gradients of the weight that float16 has no number for."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Mul", ["product", "small"], ["y"]),
    ]
    source = classifier(nodes, {"weight": np.zeros((4, 3)), "small": np.full(1, 1e-6)}, ["batch", 4])
    session = burnish.Session(
        burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=1e6), trainable=["weight"]), "onnxruntime"
    )
    session.step({"x": GENERATOR.standard_normal((8, 4)), "targets": np.full((8, 3), 1e-3)})
    assert (session.state()["param/weight"] != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_precision_is_that_of_the_file_in_float32(dtype: str) -> None:
    source, batch = single("mobile", dtype), small_networks.batch_of(small_networks.mobile())
    options = {"optimizer": burnish.optim.sgd(lr=0.05), "precision": "float16", "norm": "train"}
    first, *_, last = trained(source, "onnxruntime", batch, 20, **options)
    session = burnish.Session(burnish.compile(converted(source, dtype), **options), "onnxruntime")
    reports = [session.step(batch) for _ in range(20)]
    assert reports[0]["loss_scale"] == 65536
    assert reports[0]["loss"] - reports[-1]["loss"] == pytest.approx(first - last, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_program_is_the_same_in_a_folder_and_in_one_file(dtype: str, tmp_path: Path) -> None:
    file, batch = converted(single("mobile", dtype), dtype), small_networks.batch_of(small_networks.mobile())
    program = burnish.compile(file, optimizer=burnish.optim.ema(burnish.optim.sgd(lr=0.05)), trainable=["head.*", "last.*"])
    session = burnish.Session(program, STANDARD)
    for _ in range(2):
        session.step(batch)
    state, loss = session.state(), session.step(batch)["loss"]
    average = weights_of(onnx.load(session.export(tmp_path / "average.onnx", parameters="average", fold_norm=False)))
    assert average["head.weight"].dtype == array_in(dtype, np.zeros(1)).dtype
    program.save(tmp_path / "program")
    for loaded, own in (
        (burnish.Program.load(tmp_path / "program"), state),
        ((one := burnish.Program.load(program.to_onnx(state))), one.saved_state),
    ):
        again = burnish.Session(loaded, STANDARD, state=own)
        assert again.step(batch)["loss"] == loss
        exported = weights_of(onnx.load(again.export(tmp_path / "tuned.onnx", fold_norm=False)))
        assert {array.dtype for array in exported.values()} == {array_in(dtype, np.zeros(1)).dtype}


@pytest.mark.slow
def test_a_program_in_one_file_predicts_on_a_bare_runtime() -> None:
    file, batch = converted(single("mobile", "float16"), "float16"), small_networks.batch_of(small_networks.mobile())
    program = burnish.compile(file)
    x = batch["x"].astype(np.float16)
    expected = burnish.Session(program, "onnxruntime").predict({"x": x})["logits"]
    (found,) = onnxruntime.InferenceSession(program.to_onnx().SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * UNIT["float16"] * np.abs(expected).max())


@pytest.mark.slow
def test_rows_are_held_and_the_optimizer_changes_as_in_float32() -> None:
    file, batch = converted(single("transformer", "float16"), "float16"), small_networks.batch_of(small_networks.transformer())
    program = burnish.compile(file, hold_rows={"embedding": [3]}, optimizer="adamw").with_optimizer(burnish.optim.adam(lr=0.1))
    session = burnish.Session(program, "onnxruntime")
    before = session.state()["param/embedding"]
    session.step(batch)
    after = session.state()["param/embedding"]
    np.testing.assert_array_equal(after[3], before[3])
    read = np.setdiff1d(batch["tokens"], [3])
    assert (after[read] != before[read]).any(axis=1).all()


@pytest.mark.parametrize("graph_dtype", ["float16", "float32"])
def test_a_loss_graph_reads_the_output_in_the_dtype_of_the_file_or_in_float32(graph_dtype: str) -> None:
    code = helper.np_dtype_to_tensor_dtype(np.dtype(graph_dtype))
    nodes = [
        helper.make_node("Sub", ["logits", "goal"], ["difference"]),
        helper.make_node("Mul", ["difference", "difference"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info(name, code, ["batch", 5]) for name in ("logits", "goal")]
    graph = helper.make_graph(nodes, "loss", inputs, [helper.make_tensor_value_info("loss", code, [])])
    loss = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    source = single("perceptron", "float16")
    batch = small_networks.batch_of(small_networks.perceptron())
    goal = np.eye(5, dtype=np.float16)[batch.pop("labels")]
    session = burnish.Session(burnish.compile(converted(source, "float16"), loss=loss), "onnxruntime")
    report = session.step({**batch, "goal": goal})
    (logits,) = onnxruntime.InferenceSession(source.SerializeToString()).run(None, batch)
    assert report["loss"] == pytest.approx(((logits - goal) ** 2).mean(), rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtype_of_the_file_and_are_computed_in_float32(dtype: str) -> None:
    source = single("perceptron", dtype)
    wrt = ["x", "first.weight", "head.bias"]
    x = array_in(dtype, small_networks.batch_of(small_networks.perceptron())["x"])
    cotangent = array_in(dtype, GENERATOR.standard_normal((8, 5)))
    own = burnish.grad(converted(source, dtype), wrt)
    assert {value.dtype for value in (*own.graph.inputs, *own.graph.outputs)} == {ir.DataType[dtype.upper()]}
    assert all(own.graph.initializers[name].dtype == ir.DataType[dtype.upper()] for name in wrt[1:])
    fed = {"x": x, "cotangent:logits": cotangent}
    found = ReferenceEngine().run(own, fed)
    exact = OnnxRuntimeEngine().run(burnish.grad(source, wrt), {name: array.astype(np.float32) for name, array in fed.items()})
    for name in wrt:
        gradient = found[f"grad:{name}"].astype(np.float32)
        np.testing.assert_allclose(gradient, exact[f"grad:{name}"], rtol=1.1 * UNIT[dtype], atol=1e-5)


def test_gradients_of_gradients_have_the_dtype_of_the_file() -> None:
    source = classifier(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])], {"w": np.eye(3)}, [1, 3]
    )
    first = burnish.grad(source, ["x"])
    second = burnish.grad(first, ["w"], of="grad:x")
    assert {value.dtype for value in (*second.graph.inputs, *second.graph.outputs)} == {ir.DataType.FLOAT16}
    x, cotangent = np.array([[0.5, -0.25, 1.0]], np.float16), np.ones((1, 3), np.float16)
    fed = {"x": x, "cotangent:y": cotangent, "cotangent:grad:x": cotangent}
    found = OnnxRuntimeEngine().run(second, fed)["grad:x:w"]
    weight = torch.eye(3, dtype=torch.float64, requires_grad=True)
    data = torch.from_numpy(x).double().requires_grad_()
    (inner,) = torch.autograd.grad(torch.tanh(data @ weight).sum(), data, create_graph=True)
    np.testing.assert_allclose(found, torch.autograd.grad(inner.sum(), weight)[0], rtol=2e-3, atol=2e-3)


def test_a_rounding_in_a_float32_file_stays_and_casts_that_a_converter_left_do_not() -> None:
    """The author's cast down and straight back of a float32 model is part of what it computes."""
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=HALF),
        helper.make_node("Cast", ["narrow"], ["rounded"], to=onnx.TensorProto.FLOAT),
        helper.make_node("MatMul", ["rounded", "weight"], ["y"]),
    ]
    weight = np.diag([1.0, 2.0, 4.0]).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "rounding",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    program = burnish.compile(source, loss="mse")
    casts = [ir.DataType(node.attributes["to"].as_int()) for node in program.evaluate.graph if node.op_type == "Cast"]
    assert casts[:2] == [ir.DataType.FLOAT16, ir.DataType.FLOAT]
    x = np.full((2, 3), 1.0003, np.float32)
    loss = burnish.Session(program, "reference").evaluate({"x": x, "targets": np.zeros((2, 3), np.float32)})["loss"]
    assert loss == pytest.approx(float(((x.astype(np.float16).astype(np.float64) @ weight) ** 2).mean()), rel=1e-6)
    half = burnish.compile(converted(single("perceptron", "float16"), "float16", True, ("Tanh", "MatMul", "Add", "Relu")))
    assert not any(value.dtype == ir.DataType.FLOAT16 for node in half.grad.graph for value in node.outputs)


def test_the_loss_that_a_model_computes_itself_and_integer_outputs() -> None:
    proto = converted(single("perceptron", "float16"), "float16")
    proto.graph.node.extend(
        [
            helper.make_node("ReduceMean", ["logits"], ["loss"], keepdims=0),
            helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0),
        ]
    )
    proto.graph.output.extend(
        [
            helper.make_tensor_value_info("loss", HALF, []),
            helper.make_tensor_value_info("best", onnx.TensorProto.INT64, ["batch"]),
        ]
    )
    session = burnish.Session(burnish.compile(proto, output="loss"), "onnxruntime")
    x = {"x": small_networks.batch_of(small_networks.perceptron())["x"]}
    predicted = session.predict(x)
    assert {name: array.dtype.name for name, array in predicted.items()} == {
        "logits": "float16",
        "loss": "float16",
        "best": "int64",
    }
    np.testing.assert_array_equal(predicted["best"], predicted["logits"].argmax(1))
    assert session.step(x)["loss"] == pytest.approx(predicted["logits"].astype(np.float64).mean(), rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_of_a_bfloat16_file_are_recalibrated(engine: str) -> None:
    source, batch = single("mobile", "bfloat16"), small_networks.batch_of(small_networks.mobile())
    results = []
    for file in (source, converted(source, "bfloat16")):
        session = burnish.Session(burnish.compile(file), engine)
        results.append(burnish.surgery.recalibrate(session, [{"x": batch["x"]}]))
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=0.05, atol=0.02)


def test_an_operand_of_bfloat16_that_no_version_of_an_operator_takes_is_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("Shrink", ["x"], ["y"])],
        "refused",
        [helper.make_tensor_value_info("x", onnx.TensorProto.BFLOAT16, [2, 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.BFLOAT16, [2, 2])],
    )
    with pytest.raises(ModelError, match=r"Shrink.*takes 'x' of type tensor\(bfloat16\)"):
        burnish.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def test_the_gradient_of_a_model_that_gives_out_a_weight() -> None:
    # The text holds the bits of 1, 2 and 3.
    text = """<ir_version: 10, opset_import: ["": 18]>
    graph (float16[n, 3] x) => (float16[n, 3] y, float16[3] w) <float16[3] w = {15360, 16384, 16896}> { y = Mul (x, w) }"""
    model = burnish.grad(ir.from_onnx_text(text), wrt="x", of="y")
    feeds = {"x": np.ones((2, 3), np.float16), "cotangent:y": np.full((2, 3), 2, np.float16)}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))
    assert {name: array.dtype for name, array in outputs.items()} == dict.fromkeys(("y", "w", "grad:x"), np.dtype(np.float16))
    np.testing.assert_array_equal(outputs["grad:x"], np.full((2, 3), 2) * np.array([1, 2, 3]))
    np.testing.assert_array_equal(outputs["w"], [1, 2, 3])
