"""The runtimes of phones and browsers as targets: what WebGPU lacks is computed in other ways, or refused by name."""

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli import application
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.rewriting.change_dtypes import compute_without_float64
from burnish.rewriting.further_outputs import compute_further_outputs
from burnish.targets import (
    TARGETS,
    Support,
    Target,
    check_allowed,
    target_from_dict,
    target_to_dict,
)
from oracles.combinations import spread
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.rewritten import rewritten
from oracles.small_graphs import SmallGraph
from oracles.small_networks import batch_of, mobile, perceptron

WEBGPU = TARGETS["webgpu"]


def pooled(shape, attributes):
    """A maximum pool with its indices, as a model of its own."""
    small = SmallGraph({"x": ("float32", shape)})
    y, indices = small.builder.op("MaxPool", small["x"], outputs=2, **attributes)
    indices.value.type = ir.TensorType(ir.DataType.INT64)
    small.output("y", y)
    small.output("indices", indices)
    return ir.Model(small.graph, ir_version=10)


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        (["batch", 2, 7, 6], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
        ([2, 3, 8, 8], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        (["batch", 2, 9, 9], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "dilations": [2, 1]}),
        (["batch", 2, 11], {"kernel_shape": [3], "auto_pad": "SAME_UPPER"}),
        (["batch", 1, 4, 5, 4], {"kernel_shape": [2, 2, 2], "strides": [1, 2, 2]}),
    ],
)
def test_the_indices_of_a_pool_are_computed_beside_it(shape, attributes):
    model = pooled(shape, attributes)
    if any(output.shape is None for output in model.graph.node(0).outputs[:1]):
        pytest.fail("the pool's shape is not inferred")
    drawn = np.random.default_rng(0).integers(-3, 3, [3 if isinstance(extent, str) else extent for extent in shape])
    x = drawn.astype(np.float32)  # few values, so that maxima occur several times
    expected = onnxruntime_outputs(model, {"x": x})
    compute_further_outputs(model, WEBGPU.output_limits)
    check_allowed(model, WEBGPU)
    actual = onnxruntime_outputs(model, {"x": x})
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_batch_normalization_in_training_is_computed_in_its_place(momentum):
    small = SmallGraph({"x": ("float32", ["batch", 3, 5, 5]), **{name: ("float32", [3]) for name in ("s", "b", "m", "v")}})
    operands = [small[name] for name in ("x", "s", "b", "m", "v")]
    results = small.builder.op(
        "BatchNormalization", *operands, outputs=3, like=operands[0], training_mode=1, momentum=momentum, epsilon=1e-3
    )
    for name, result in zip(("y", "mean", "variance"), results, strict=True):
        if name != "y":
            result.value.shape = ir.Shape([3])
        small.output(name, result)
    model = ir.Model(small.graph, ir_version=10)
    generator = np.random.default_rng(1)
    feeds = {"x": generator.normal(2, 3, (4, 3, 5, 5)).astype(np.float32)}
    feeds |= {name: generator.uniform(0.5, 1.5, 3).astype(np.float32) for name in ("s", "b", "m", "v")}
    copies = {name: array.copy() for name, array in feeds.items()}  # ONNX Runtime writes over the running statistics
    expected = onnxruntime_outputs(model, copies)
    compute_further_outputs(model, WEBGPU.output_limits)
    check_allowed(model, WEBGPU)
    for name, array in onnxruntime_outputs(model, feeds).items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-6, atol=2e-6, err_msg=name)


def test_float64_is_computed_in_float32_and_nothing_becomes_zero():
    small = SmallGraph({"x": ("float32", [2]), "w": ("float64", [2])})
    builder = small.builder
    wide = builder.cast(small["x"], ir.DataType.DOUBLE) * builder.constant(np.array([1e-300, -1e300])) + small["w"]
    small.output("wide", wide)
    small.output("narrow", builder.cast(wide, ir.DataType.FLOAT))
    model = rewritten(compute_without_float64, ir.Model(small.graph, ir_version=10))
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    assert {value.dtype for value in values} == {ir.DataType.FLOAT}
    outputs = onnxruntime_outputs(model, {"x": np.array([2, 0.5], np.float32), "w": np.zeros(2, np.float32)})
    limits = np.finfo(np.float32)
    np.testing.assert_array_equal(outputs["narrow"], np.array([2 * limits.tiny, -limits.max / 2], np.float32))


@spread("optimizer", ["adamw", "nadam"], test=1)
def test_a_program_for_webgpu_trains_as_another_without_what_it_lacks(optimizer, tmp_path):
    model = mobile()
    schedule = burnish.optim.schedules.cosine(1e-3, 50)
    options = {"optimizer": getattr(burnish.optim, optimizer)(lr=schedule), "metrics": ("accuracy",)}
    own = burnish.compile(model, **options, target="webgpu")
    for name, graph in own.graphs.items():
        values = [value for node in graph.graph.all_nodes() for value in (*node.inputs, *node.outputs) if value is not None]
        assert ir.DataType.DOUBLE not in {value.dtype for value in values}, name
        check_allowed(graph, WEBGPU)
        entries = (*own.signature[name].inputs, *own.signature[name].outputs)
        assert ir.DataType.DOUBLE not in {entry.dtype for entry in entries}, name
    own.save(tmp_path / "program")
    loaded = burnish.Program.load(tmp_path / "program")
    assert loaded.target is WEBGPU
    batch = batch_of(model)
    losses = []
    for program in (burnish.compile(model, **options), loaded):
        with burnish.Session(program, engine="onnxruntime", threads=1) as session:
            losses.append([session.step(batch)["loss"] for _ in range(10)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["web", "mobile", "ort-minimal"])
def test_other_clients_run_what_onnxruntime_does(name):
    options = {"optimizer": "sgd:lr=0.1", "metrics": ()}
    own, plain = (burnish.compile(perceptron(), **options, target=target) for target in (name, "onnxruntime"))
    assert own.options["target"] == name
    assert [node.op_type for node in own.step.graph] == [node.op_type for node in plain.step.graph]


def test_what_cannot_be_lowered_is_refused_by_name():
    small = SmallGraph({"x": ("float64", ["batch", 4])})
    y = small.builder.op("MatMul", small["x"], small.builder.constant(np.ones((4, 2))))
    small.output("y", y)
    with pytest.raises(UnsupportedOperatorError, match="'x' of the model is float64, which webgpu has not: convert the model"):
        burnish.compile(ir.Model(small.graph, ir_version=10), loss="mse", optimizer="sgd", target="webgpu")
    model = pooled(["batch", 1, "height", 8], {"kernel_shape": [2, 2]})
    compute_further_outputs(model, WEBGPU.output_limits)
    message = r"^MaxPool .* is read from its output '.*', and webgpu gives 1 of the outputs of MaxPool: give .* fixed sizes"
    with pytest.raises(UnsupportedOperatorError, match=message):
        check_allowed(model, WEBGPU)
    text = SmallGraph({"x": ("float32", [2])})
    text.output("y", text.builder.cast(text["x"], ir.DataType.DOUBLE))
    with pytest.raises(UnsupportedOperatorError, match=r"^Cast .* float64, which webgpu has not"):
        check_allowed(ir.Model(text.graph, ir_version=10), WEBGPU)


def test_a_file_says_what_a_target_lacks():
    assert target_from_dict(target_to_dict(WEBGPU)) == WEBGPU
    values = {"name": "x", "opset": 18, "ir_version": 10, "operators": [{"name": "MaxPool", "outputs": 1}], "float64": False}
    target = target_from_dict(values)
    assert target == Target("x", 18, 10, operators={"MaxPool": Support(outputs=1)}, float64=False)
    assert not target.covers(WEBGPU)
    assert TARGETS["onnxruntime"].covers(TARGETS["web"])
    with pytest.raises(ConfigurationError, match="float64 is 'no'; give true or false"):
        target_from_dict({**values, "float64": "no"})


def test_the_command_compiles_for_a_target(tmp_path):
    ir.save(perceptron(), tmp_path / "model.onnx")
    arguments = ["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "program"), "--target", "webgpu"]
    finished = CliRunner().invoke(application.app, arguments)
    assert finished.exit_code == 0, finished.output
    assert burnish.Program.load(tmp_path / "program").options["target"] == "webgpu"
