"""The commands that look at a model before anything is trained: what would train, and what lacks a gradient."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

from burnish.errors import ObjectiveWarning
from burnish.operators import registry
from oracles import classical_files, decoder_files, exporter_styles, sixteen_bit_files
from oracles.combinations import spread


def test_inspect_prints_what_would_train(run):
    text = run("inspect", "model.onnx").stdout
    assert "input   x  float [batch, 1, 4, 4]" in text
    assert "the loss reads logits" in text
    assert re.search(r"parameters, which train: \d+ in 11 tensors", text)
    assert re.search(r"stem\.convolution\.weight +\[2, 1, 3, 3\] +18  float", text)
    assert re.search(r"running statistics, which training updates: \d+ in 6 tensors", text)
    assert re.search(r"3  BatchNormalization\n", text)
    assert "Every operator between a parameter and the loss has a gradient." in text


def test_inspect_as_json(run):
    summary = json.loads(run("inspect", "model.onnx", "--json").stdout)
    assert summary["prediction"] == "logits"
    assert summary["lacking"] == []
    assert {entry["name"] for entry in summary["statistics"]} == {
        f"{layer}.normalization.{statistic}"
        for layer in ("stem", "stage1.block1.first", "stage1.block1.second")
        for statistic in ("running_mean", "running_variance")
    }
    assert {"operator": "Conv", "count": 3, "lacks_gradient": False} in summary["operators"]


def test_inspect_says_why_nothing_would_train(run, folder):
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8), "relu.onnx")
    text = run("inspect", "relu.onnx").stdout
    assert "Nothing would train: the model has no weights, that is floating-point initializers" in text
    assert "has a gradient" not in text
    assert "no weights" in json.loads(run("inspect", "relu.onnx", "--json").stdout)["nothing_trains"]


@pytest.mark.slow
def test_inspect_names_vectors_that_an_exporter_may_have_merged(run, folder):
    model = """<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y)
<float[2] ones = {1, 1}, float[2] zeros = {0, 0}, float[2] shared = {1, 2}, float[2, 2] w = {1, 1, 1, 1}> {
    a = LayerNormalization (x, ones, zeros)
    b = MatMul (a, w)
    c = LayerNormalization (b, ones, shared)
    d = LayerNormalization (c, ones, shared)
    y = MatMul (d, w)
}"""
    onnx.save(onnx.parser.parse_model(model), folder / "merged.onnx")
    printed = run("inspect", "merged.onnx").stdout
    assert "  of one value, read by several layers, and trained as one: ones (3 layers)\n" in printed
    assert "torch.onnx.export(..., dynamo=True, optimize=False)" in printed
    assert json.loads(run("inspect", "merged.onnx", "--json").stdout)["perhaps_merged"] == {"ones": 3}
    assert "trained as one" not in run("inspect", "model.onnx").stdout


@pytest.mark.slow
def test_inspect_lists_what_was_a_buffer_when_the_model_was_exported(run, folder):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y)
<float[2, 2] w = {1, 1, 1, 1}, float[2] shift = {1, 2}> { a = MatMul (x, w) y = Add (a, shift) }""")
    for name, kind in (("w", "PARAMETER"), ("shift", "BUFFER")):
        value = model.graph.value_info.add(name=name)
        value.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
    onnx.save(model, folder / "buffer.onnx")
    printed = run("inspect", "buffer.onnx").stdout
    assert "parameters, which train: 4 in 1 tensor" in printed
    assert "buffers of the exported module, which train only where trainable names them: 2 in 1 tensor\n  shift  [2]" in printed
    assert [value["name"] for value in json.loads(run("inspect", "buffer.onnx", "--json").stdout)["buffers"]] == ["shift"]
    assert "buffers" not in run("inspect", "model.onnx").stdout


@pytest.mark.slow
def test_inspect_says_what_a_file_in_float16_is_trained_in(run, folder):
    model = """<ir_version: 10, opset_import: ["": 18]> g (float16[N, 2] x) => (float16[N, 2] y)
<float16[2, 2] w = {1, 1, 1, 1}> { y = MatMul (x, w) }"""
    onnx.save(onnx.parser.parse_model(model), folder / "half.onnx")
    line = "  weights in float16 train in float32, which all is computed in; an export rounds them to float16 again\n"
    assert line in run("inspect", "half.onnx").stdout
    assert json.loads(run("inspect", "half.onnx", "--json").stdout)["rounded"] == ["float16"]
    assert "rounds them" not in run("inspect", "model.onnx").stdout


def test_inspect_knows_operators_that_are_differentiated_by_their_function(run, folder):
    model = """<ir_version: 11, opset_import: ["": 28]> g (float[N, 2] x) => (float[N, 2] y)
<float[2, 2] w = {1, 1, 1, 1}> { a = MatMul (x, w) y = SwiGLU (a, x) }"""
    onnx.save(onnx.parser.parse_model(model), folder / "gated.onnx")
    summary = json.loads(run("inspect", "gated.onnx", "--json").stdout)
    assert summary["lacking"] == []
    assert {"operator": "SwiGLU", "count": 1, "lacks_gradient": False} in summary["operators"]


@pytest.mark.slow
def test_inspect_counts_no_fillers_of_group_normalization(run, folder):
    """An exporter fills in the affine part of each group with ones and zeros, which compile keeps as constants."""
    model = """<ir_version: 8, opset_import: ["": 18]> g (float[N, 4, 6] x) => (float[N, 4, 6] y)
<int64[3] groups = {0, 2, -1}, int64[3] channels = {0, 4, 6}, float[2] ones = {1, 1}, float[2] zeros = {0, 0},
 float[4, 1] scale = {1, 2, 3, 4}, float[4, 1] bias = {1, 2, 3, 4}> {
    grouped = Reshape (x, groups)
    normalized = InstanceNormalization (grouped, ones, zeros)
    restored = Reshape (normalized, channels)
    scaled = Mul (restored, scale)
    y = Add (scaled, bias)
}"""
    onnx.save(onnx.parser.parse_model(model), folder / "groups.onnx")
    summary = json.loads(run("inspect", "groups.onnx", "--json").stdout)
    assert [entry["name"] for entry in summary["parameters"]] == ["scale", "bias"]
    assert "8 parameters in 2 tensors train" in run("check", "groups.onnx").stdout


@pytest.mark.slow
def test_inspect_names_the_scalars_that_do_not_train(run, folder):
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in "xy")
    values = {"weight": np.ones((2, 2)), "temperature": np.array(2.0), "bound": np.array(-1.0)}
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "weight"], ["scores"]),
        onnx.helper.make_node("Div", ["scores", "temperature"], ["scaled"]),
        onnx.helper.make_node("Clip", ["scaled", "bound"], ["y"]),
    ]
    weights = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in values.items()]
    graph = onnx.helper.make_graph(nodes, "graph", [x], [y], weights)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8), "scaled.onnx")
    printed = run("inspect", "scaled.onnx").stdout
    assert "  scalars do not train unless trainable names them, these among them: temperature\n" in printed
    assert json.loads(run("inspect", "scaled.onnx", "--json").stdout)["scalars"] == ["temperature"]
    assert "scalars" not in run("inspect", "model.onnx").stdout


ROUNDED = """<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z)
<float[2, 2] w = {1, 2, 3, 4}, float[2, 2] head = {1, 2, 3, 4}, float[2, 2] other = {1, 2, 3, 4}, float[3] idle = {1, 2, 3},
 float scale = {0.1}, float zero = {0}> {
    h = MatMul (x, w)
    q = Round (h)
    m = Mul (q, scale)
    d = Add (m, zero)
    y = MatMul (d, head)
    z = MatMul (d, other)
}"""


@pytest.mark.slow
def test_weights_that_no_gradient_reaches_are_listed(run, folder):
    onnx.save(onnx.parser.parse_model(ROUNDED), folder / "rounded.onnx")
    text = run("inspect", "rounded.onnx").stdout
    assert "parameters, which train: 8 in 2 tensors" in text
    assert "weights that no gradient reaches, and that stay as they are: 7 in 2 tensors" in text
    assert re.search(r"\n  w +\[2, 2\] +4  float  Round '\w+' \(output 'q'\) lets no gradient through\n", text)
    assert re.search(r"\n  idle +\[3\] +3  float  no operator reads it\n", text)
    assert "constants, which stay as they are: 2 tensors\n" in text
    assert "weights that no gradient reaches" not in run("inspect", "model.onnx").stdout

    text = run("inspect", "rounded.onnx", "--outputs", "y").stdout
    assert "  the loss reads y\n" in text
    assert re.search(r"\n  other .* nothing that leads to 'y' reads it\n", text)
    summary = json.loads(run("inspect", "rounded.onnx", "--json", "--outputs", "y").stdout)
    assert [entry["name"] for entry in summary["parameters"]] == ["head"]
    assert [entry["name"] for entry in summary["unreached"]] == ["w", "other", "idle"]
    assert [entry["name"] for entry in summary["constants"]] == ["scale", "zero"]
    both = json.loads(run("inspect", "rounded.onnx", "--json", "--outputs", "y,z").stdout)
    assert both["predictions"] == [
        {"output": name, "reads": name, "stepped_over": None, "bounded_by": None} for name in ("y", "z")
    ]
    assert [entry["name"] for entry in both["parameters"]] == ["head", "other"]
    assert "the model has no output 'k'; it has 'y', 'z'" in run("inspect", "rounded.onnx", "--outputs", "k", code=1).stderr


@pytest.mark.slow
def test_commands_warn_of_weights_that_no_gradient_reaches(run, folder):
    onnx.save(onnx.parser.parse_model(ROUNDED), folder / "rounded.onnx")
    options = ("--loss", "mse", "--outputs", "y")
    for command in (("check", "rounded.onnx"), ("compile", "rounded.onnx", "-o", "program")):
        printed = run(*command, *options).stderr
        assert "warning: 3 weights stay as they are: no gradient reaches them. 'w': Round" in printed
        assert printed.endswith("(--trainable says what trains, --outputs what the loss reads)\n")
        assert "=" not in printed
        assert run(*command, *options, "--trainable", "head").stderr == ""


def test_inspect_lists_integers_and_what_a_dead_branch_reads(run, folder):
    model = """<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y)
<int8[2, 2] integers = {1, 2, 3, 4}, float step = {0.1}, float[2, 2] w = {1, 2, 3, 4}, float[2, 2] head = {1, 2, 3, 4},
 bool no = {0}> {
    i = DequantizeLinear (integers, step)
    h = MatMul (x, i)
    d = If (no) <then_branch = a () => (float[N, 2] e) { e = MatMul (h, w) },
                 else_branch = b () => (float[N, 2] f) { f = Relu (h) }>
    y = MatMul (d, head)
}"""
    onnx.save(onnx.parser.parse_model(model), folder / "dead.onnx")
    text = run("inspect", "dead.onnx").stdout
    assert "weights that no gradient reaches, and that stay as they are: 8 in 2 tensors" in text
    assert re.search(r"\n  integers +\[2, 2\] +4  int8  integers, as the model is quantized", text)
    assert re.search(r"\n  w +\[2, 2\] +4  float  If '\S+' \(output 'd'\) never takes the branch that reads it\n", text)


@pytest.mark.slow
def test_inspect_takes_no_outputs_for_a_program(run, folder):
    run("compile", "model.onnx", "-o", "program")
    assert "--outputs is for a model, and 'program' is a program" in run("inspect", "program", "--outputs", "y", code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", ["program", "run"])
def test_inspect_of_a_program(run, folder, source):
    run("compile", "model.onnx", "-o", "run/program", "--trainable", "classifier.bias")
    text = run("inspect", "run" if source == "run" else "run/program").stdout
    assert "run/program: a training program; 3 parameters in 1 tensor train, 10 tensors stay as they are" in text
    assert re.search(r"optimizer +\{\"name\": \"sgd\", \"lr\": 0\.1, \"momentum\": 0\.9", text)
    assert re.search(r"label +labels  int64 \[batch\]", text)
    assert re.search(r"step\.onnx +\d+ nodes", text)
    assert json.loads(run("inspect", "run", "--json").stdout)["options"]["norm"] == "auto"


def write_model_without_gradient(path: Path, off_the_path: bool) -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 2])
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "first"], ["hidden"]),
        onnx.helper.make_node("Det", ["square"], ["determinant"], name="the_determinant"),
        onnx.helper.make_node("Mul", ["hidden", "determinant"], ["scaled"]),
        onnx.helper.make_node("MatMul", ["scaled", "second"], ["values"]),
        onnx.helper.make_node("Softmax", ["values"], ["probabilities"], axis=1),
    ]
    weights = {name: np.eye(2, dtype=np.float32) for name in ("first", "second", "square")}
    if off_the_path:
        nodes[2] = onnx.helper.make_node("Identity", ["hidden"], ["scaled"])
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [x],
        [onnx.helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["batch", 2])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8), path)


@pytest.mark.slow
def test_inspect_of_a_program_in_one_file(run):
    run("compile", "model.onnx", "-o", "whole.onnx", "--optimizer", "lion")
    text = run("inspect", "whole.onnx").stdout
    assert text.startswith("whole.onnx: a training program; ")
    assert '"name": "lion"' in text


@pytest.mark.slow
def test_inspect_and_check_name_what_lacks_a_gradient(run, folder, monkeypatch):
    monkeypatch.delitem(registry.records(), ("", "Det"))
    write_model_without_gradient(folder / "det.onnx", off_the_path=False)
    text = run("inspect", "det.onnx").stdout
    assert "the loss reads values, before Softmax" in text
    assert re.search(r"1  Det  lacks a gradient", text)
    assert "Det 'the_determinant' (output 'determinant')" in text
    result = run("check", "det.onnx", code=1)
    assert "error: Det 'the_determinant' (output 'determinant') has no gradient rule" in result.stderr
    for failed in (result, run("compile", "det.onnx", "-o", "program", code=1)):
        assert "(--trainable says what trains, --outputs what the loss reads)" in failed.stderr
        assert "=" not in failed.stderr
    run("check", "det.onnx", "--trainable", "second")


@pytest.mark.slow
def test_an_operator_off_the_path_needs_no_gradient(run, folder, monkeypatch):
    monkeypatch.delitem(registry.records(), ("", "Det"))
    write_model_without_gradient(folder / "det.onnx", off_the_path=True)
    assert "Every operator between a parameter and the loss has a gradient." in run("inspect", "det.onnx").stdout
    run("check", "det.onnx")


@pytest.mark.slow
def test_check_says_what_trains(run):
    run("check", "model.onnx", "--outputs", "logits")
    text = run("check", "model.onnx").stdout
    assert re.search(r"model\.onnx can be trained: \d+ parameters in 11 tensors train", text)
    text = run("check", "model.onnx", "--trainable", "classifier.bias").stdout
    assert "3 parameters in 1 tensor train, 10 tensors stay as they are" in text


def refused_models() -> dict[str, onnx.ModelProto]:
    """Models that look trainable, and that compile refuses for what the graph alone does not tell."""
    texts = {
        "two outputs": "(float[n, 2] x) => (float[n, 3] y, float[n, 3] z) {s} {{ y = MatMul(x, w) z = Relu(y) }}",
        "one class": "(float[n, 2] x) => (float[n, 1] z) {s} {{ y = MatMul(x, w) z = ReduceSum <keepdims = 1> (y, axis) }}",
        "no axis of classes": "(float[n, 2] x) => (float[n] z) {s} {{ y = MatMul(x, w) z = ReduceSum <keepdims = 0> (y, axis) }}",
        "no gradient": "(float[n, 2] x) => (float[n, 3] z) {s} {{ y = MatMul(x, w) z = Sign(y) }}",
        "whole numbers": "(float[n, 2] x) => (int64[n, 1] z) {s} {{ y = MatMul(x, w) z = ArgMax <axis = 1> (y) }}",
        "labels": "(float[n, 2] x, float[n, 3] labels) => (float[n, 3] z) {s} {{ y = MatMul(x, w) z = Add(y, labels) }}",
    }
    weights = "<float[2, 3] w = {1, 2, 3, 4, 5, 6}, int64[1] axis = {1}>"
    heading = '<ir_version: 10, opset_import: ["": 21]> g '
    return {name: onnx.parser.parse_model(heading + text.format(s=weights)) for name, text in texts.items()}


MODELS = {
    **refused_models(),
    **{style.__name__: style() for style in (exporter_styles.tensorflow, exporter_styles.keras, exporter_styles.paddle)},
    **{
        f"{name} in {dtype}": sixteen_bit_files.single(name, dtype)
        for name in ("mobile", "transformer")
        for dtype in ("float16",)
    },
    "logistic regression": classical_files.logistic_regression([0, 1]),
    "regression": classical_files.linear_regression(),
    "columns": classical_files.of_columns(),
    "quantized decoder": decoder_files.decoder(),
}


@pytest.mark.slow
@spread("name", MODELS, test_all=6)
def test_inspect_check_and_compile_give_one_verdict(run, folder, name):
    onnx.save(MODELS[name], folder / "file.onnx")
    verdict = json.loads(run("inspect", "file.onnx", "--json").stdout)["refused"]
    said = run("inspect", "file.onnx").stdout
    compiled = run("compile", "file.onnx", "-o", "program", code=int(verdict is not None))
    checked = run("check", "file.onnx", "--no-gradients", code=int(verdict is not None))
    assert (verdict is not None) == (name in {*refused_models(), "regression", "quantized decoder"})
    approves = "Every operator between a parameter and the loss has a gradient." in said
    assert approves == (verdict is None)
    if verdict is not None:
        for refused in (compiled, checked):  # in lines of its own, what follows the first sentence
            assert f"error: {' '.join(verdict.split())}" in " ".join(refused.stderr.split())


def with_mean_image(mode: int = 0) -> onnx.ModelProto:
    """A mean image, a convolution, batch normalization in a mode with statistics that were never updated, and a head."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
g (float[batch, 3, 6, 6] x) => (float[batch, 2] y) <float[4] scale = {{1, 1.2, 0.8, 1}}, float[4] bias = {{0.1, 0, 0, -0.1}},
  float[4] mean = {{0, 0, 0, 0}}, float[4] var = {{1, 1, 1, 1}}, float[2, 4] head = {{1, -1, 0.5, 2, 0, 1, -1, 1}}> {{
  centred = Sub (x, mean_image) c = Conv (centred, weight)
  b{", bm, bv" if mode else ""} = BatchNormalization <training_mode = {mode}> (c, scale, bias, mean, var)
  p = GlobalAveragePool (b) f = Flatten (p) y = Gemm <transB = 1> (f, head) }}""")
    for name, shape in (("mean_image", (1, 3, 6, 6)), ("weight", (4, 3, 3, 3))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return proto


@pytest.mark.slow
def test_check_compares_what_is_predicted_with_the_file(run, folder):
    for mode in (0, 1):
        onnx.save(with_mean_image(mode), folder / f"mode{mode}.onnx")
    printed = " ".join(run("check", "mode0.onnx", "--no-gradients").output.split())
    assert re.search(r"predict computes what mode0\.onnx computes, to \de[-+]\d+ of the largest output", printed)
    result = " ".join(run("check", "mode1.onnx", "--no-gradients").output.split())
    assert "predict does not compute what mode1.onnx computes: 'y' is off by" in result
    assert "statistics, which were never updated: mean 0 and variance 1" in result


@pytest.mark.slow
def test_training_compares_with_the_file_on_its_first_batch(run, folder):
    rng = np.random.default_rng(1)
    np.savez(folder / "pictures.npz", x=rng.normal(size=(16, 3, 6, 6)).astype(np.float32), labels=np.arange(16) % 2)
    for mode in (0, 1):
        onnx.save(with_mean_image(mode), folder / f"mode{mode}.onnx")
        options = ["--data", "pictures.npz", "-o", f"run{mode}", "--epochs", "1", "--batch-size", "4"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = " ".join(run("train", f"mode{mode}.onnx", *options).output.split())
        told = [str(warning.message) for warning in caught if issubclass(warning.category, ObjectiveWarning)]
        assert ["predict does not compute what mode1.onnx computes" in message for message in told] == [True] * mode
        assert "frozen: mean_image (preprocesses 'x'); train it with --trainable mean_image" in text


@pytest.mark.slow
def test_what_prepares_an_input_is_listed_and_trains_by_name(run, folder):
    onnx.save(with_mean_image(), folder / "image.onnx")
    printed = run("inspect", "image.onnx").stdout
    assert "constants that prepare an input, which train only where trainable names them: 108 in 1 tensor" in printed
    assert "preprocesses 'x'" in printed
    for names, frozen in (((), True), (("mean_image",), False), (("*", "mean_image"), False)):
        options = [option for name in names for option in ("--trainable", name)]
        text = " ".join(run("check", "image.onnx", "--no-gradients", *options).output.split())
        assert ("frozen: mean_image (preprocesses 'x'); train it with --trainable mean_image" in text) == frozen


@pytest.mark.slow
def test_a_shape_that_is_an_input_is_to_be_given_where_gradients_are_checked(run, folder, caplog):
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[N, 3, 4] x, int64[3] s) => (float[a, b, c] y)
        <float[4, 1] w = {1, 2, 3, 4}> { r = Reshape (x, s) y = MatMul (r, w) }""")
    onnx.save(model, folder / "shaped.onnx")
    text = " ".join(run("check", "shaped.onnx", "--loss", "mse", code=1).output.split())
    assert "on a random batch, which may be at fault" in text
    assert "Where 's' says a shape or a length, give it one: --bind 's=[...]'" in text
    assert not caplog.records  # of what reads a node by itself
    assert "all gradients agree" in run("check", "shaped.onnx", "--loss", "mse", "--bind", "s=[0,3,4]").stdout
