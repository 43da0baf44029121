"""The policy ``auto``: what does not train keeps its statistics, bit for bit, and the rest trains."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from typer.testing import CliRunner

import burnish
import burnish.torch
from burnish.cli.application import app
from burnish.errors import ObjectiveWarning
from oracles.combinations import diagonal
from oracles.several_workers import largest_difference, train_alone, train_in_threads

LAYERS = ("stem", "middle", "head")


def network(affine: bool = True) -> onnx.ModelProto:
    """Three linear layers, each before batch normalization; ``affine=False``: without scales and biases that could train."""
    rng = np.random.default_rng(5)
    nodes, x = [], "x"
    for layer in LAYERS:
        nodes.append(onnx.helper.make_node("Gemm", [x, f"{layer}.weight", f"{layer}.bias"], [f"{layer}.linear"]))
        operands = [f"{layer}.norm.{name}" for name in ("weight", "bias", "mean", "var")]
        nodes.append(onnx.helper.make_node("BatchNormalization", [f"{layer}.linear", *operands], [layer], name=f"{layer}.norm"))
        x = layer
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in ("x", "head")]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:])
    proto = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 15)])
    for layer in LAYERS:
        arrays = {
            "weight": rng.standard_normal((4, 4)),
            "bias": rng.standard_normal(4),
            "norm.mean": rng.standard_normal(4),
            "norm.var": rng.uniform(0.5, 2, 4),
        }
        if affine:
            arrays |= {"norm.weight": rng.uniform(0.5, 2, 4), "norm.bias": rng.standard_normal(4)}
        for name, array in arrays.items():
            proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), f"{layer}.{name}"))
        if not affine:
            for name, number in (("weight", 1.0), ("bias", 0.0)):
                constant = numpy_helper.from_array(np.full(4, number, np.float32), f"{layer}.norm.{name}")
                proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], [f"{layer}.norm.{name}"], value=constant))
    return proto


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(6)
    return [{"x": (3 + rng.standard_normal((8, 4))).astype(np.float32), "labels": rng.integers(0, 4, 8)} for _ in range(count)]


HEAD = {
    "trainable": {"trainable": ["head.*"]},
    "a frozen group": {"optimizer": burnish.optim.groups(burnish.optim.sgd(lr=0.1), {"stem*": "frozen", "middle*": "frozen"})},
}


@diagonal(("way", HEAD), ("engine", ["onnxruntime", "torch"]), test=2)
def test_a_frozen_part_stays_what_the_file_computes(way: str, engine: str) -> None:
    proto = network()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("middle", onnx.TensorProto.FLOAT, ["n", 4]))
    program = burnish.compile(proto, outputs="head", **HEAD[way])
    assert program.options["norm_layers"] == {"stem.norm": "frozen", "middle.norm": "frozen", "head.norm": "train"}
    assert program.options["auto_frozen_layers"] == ["stem.norm", "middle.norm"]
    before = program.initial_state()
    x = batches(1)[0]["x"]
    with burnish.Session(program, engine=engine, threads=1) as session:
        features = session.predict({"x": x})["middle"]
        for batch in batches(5):
            session.step(batch)
        after = session.state()
        np.testing.assert_array_equal(session.predict({"x": x})["middle"], features)
    changed = {name for name in before if name.startswith(("param/", "stat/")) and not np.array_equal(before[name], after[name])}
    assert changed == {
        f"{kind}/head.{name}"
        for kind, name in [
            ("param", "weight"), ("param", "norm.weight"), ("param", "norm.bias"), ("stat", "norm.mean"), ("stat", "norm.var")
        ]
    } | ({"param/head.bias"} & changed)  # fmt: skip


def test_the_step_normalizes_frozen_layers_by_their_statistics() -> None:
    """The loss of a step on the head alone is that of the file with its head in training, not of a batch-normalized stem."""
    frozen = {"stem.norm": "frozen:all", "middle.norm": "frozen:all"}
    (batch,) = batches(1)
    losses = []
    for options in ({}, {"norm": frozen}, {"norm": "train"}):
        program = burnish.compile(network(), trainable=["head.*"], **options)
        with burnish.Session(program, engine="reference") as session:
            losses.append(session.step(batch)["loss"])
    assert losses[0] == losses[1]
    assert abs(losses[0] - losses[2]) > 1e-3


def test_a_layer_without_parameters_follows_what_stands_before_it() -> None:
    policies = burnish.compile(network(affine=False), trainable=["middle.*"]).options["norm_layers"]
    assert list(policies.values()) == ["frozen", "train", "train"]
    assert set(burnish.compile(network(affine=False)).options["norm_layers"].values()) == {"train"}


def test_a_policy_that_is_named_holds() -> None:
    policies = burnish.compile(network(), trainable=["head.*"], norm={"stem*": "train"}).options
    assert policies["norm_layers"] == {"stem.norm": "train", "middle.norm": "frozen", "head.norm": "train"}
    assert policies["auto_frozen_layers"] == ["middle.norm"]
    assert "auto_frozen_layers" not in burnish.compile(network(), trainable=["head.*"], norm="train").options


def with_modes(modes: dict[str, int], fresh: bool = False) -> onnx.ModelProto:
    """The network as it is exported while it trains: layers in training mode return their statistics as well."""
    proto = network()
    for node in proto.graph.node:
        layer = node.name.removesuffix(".norm")
        if modes.get(layer) is not None and node.op_type == "BatchNormalization":
            node.attribute.append(onnx.helper.make_attribute("training_mode", modes[layer]))
            node.output.extend([f"{layer}.m", f"{layer}.v"] if modes[layer] else [])
    for tensor in proto.graph.initializer if fresh else ():
        if tensor.name.endswith(("norm.mean", "norm.var")):
            tensor.CopyFrom(numpy_helper.from_array(np.full(4, tensor.name.endswith("var"), np.float32), tensor.name))
    return proto


def computed(layers_by_batch: set[str], proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """What the network computes where some layers normalize by the batch, in float64."""
    arrays = {tensor.name: numpy_helper.to_array(tensor).astype(float) for tensor in proto.graph.initializer}
    y = x.astype(float)
    for layer in LAYERS:
        y = y @ arrays[f"{layer}.weight"] + arrays[f"{layer}.bias"]
        by_batch = layer in layers_by_batch
        mean, variance = (y.mean(0), y.var(0)) if by_batch else (arrays[f"{layer}.norm.mean"], arrays[f"{layer}.norm.var"])
        y = (y - mean) / np.sqrt(variance + 1e-5) * arrays[f"{layer}.norm.weight"] + arrays[f"{layer}.norm.bias"]
    return y


@pytest.mark.parametrize("opset", [13, 15])
def test_a_file_that_was_exported_while_it_trained_keeps_the_mode_of_each_layer(opset: int) -> None:
    modes = {"stem": 0, "middle": 0, "head": 1}
    proto = with_modes(modes if opset == 15 else {"head": 1})
    proto.opset_import[0].version = opset
    for node in proto.graph.node if opset == 13 else ():  # in which the number of outputs told the mode
        del node.attribute[:]
        node.output.extend(["head.saved_mean", "head.saved_var"] if len(node.output) == 3 else [])
    program = burnish.compile(proto, loss="mse", optimizer="sgd:lr=0.1")
    assert program.options["norm_layers"] == {"stem.norm": "frozen", "middle.norm": "frozen", "head.norm": "train"}
    x = batches(1)[0]["x"]
    with burnish.Session(program, threads=1) as session:
        loss = session.step({"x": x, "targets": np.zeros((8, 4), np.float32)})["loss"]
        moved = {name for name, array in session.state().items() if not np.array_equal(array, program.initial_state()[name])}
    assert loss == pytest.approx(np.mean(computed({"head"}, proto, x) ** 2), rel=1e-5)
    assert {name for name in moved if name.startswith("stat/")} == {"stat/head.norm.mean", "stat/head.norm.var"}
    layer = burnish.torch.Layer(proto)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), computed({"head"}, proto, x), atol=1e-4)


@pytest.mark.parametrize("mode", [0, 1])
def test_layers_of_one_mode_train_alike(mode: int) -> None:
    proto = with_modes(dict.fromkeys(LAYERS, mode))
    assert set(burnish.compile(proto).options["norm_layers"].values()) == {"train"}
    policies = burnish.compile(proto, norm={"stem*": "frozen"}).options["norm_layers"]
    assert list(policies.values()) == ["frozen", "train", "train"]


def test_layers_whose_statistics_were_never_updated_have_none_to_be_frozen_with() -> None:
    """With the head alone a step computes what the file does: by the batch."""
    proto = with_modes(dict.fromkeys(LAYERS, 1), fresh=True)
    program = burnish.compile(proto, loss="mse", trainable=["head.weight"])
    assert set(program.options["norm_layers"].values()) == {"train"}
    x = batches(1)[0]["x"]
    with burnish.Session(program, threads=1) as session:
        loss = session.step({"x": x, "targets": np.zeros((8, 4), np.float32)})["loss"]
    assert loss == pytest.approx(np.mean(computed(set(LAYERS), proto, x) ** 2), rel=1e-5)


def test_freezing_layers_without_statistics_is_warned_of() -> None:
    proto = with_modes(dict.fromkeys(LAYERS, 1), fresh=True)
    message = r"those of 'stem.norm', 'middle.norm', 'head.norm' were never updated: mean 0 and variance 1"
    with pytest.warns(ObjectiveWarning, match=message + r".*norm=\{'stem.norm': 'train'\}"):
        burnish.compile(proto, norm="frozen")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        burnish.compile(proto, norm="train")  # the remedy
        burnish.compile(with_modes(dict.fromkeys(LAYERS, 1)), norm="frozen")
        burnish.compile(with_modes(dict.fromkeys(LAYERS, 0), fresh=True), norm="frozen")


@pytest.mark.parametrize(
    ("before", "axes", "layer"),
    [
        pytest.param("", "0, 2", "y = BatchNormalization", id="newer"),
        pytest.param(
            "r = Reshape (x, shape) t = Transpose <perm = [0, 2, 1]> (r)",
            "0, 1",
            "y, next_m, next_v = BatchNormalization <training_mode = 1>",
            id="older",
        ),
    ],
)
def test_a_layer_of_a_file_that_computes_its_statistics_uses_the_batch_in_every_mode(before: str, axes: str, layer: str) -> None:
    """As PyTorch's exporters write one without running statistics."""
    t = "t" if before else "x"
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g (float[n, 4, 5] x) => (float[n, 4, 5] y)
<float[4] scale = {{1, 2, 0.5, -1}}, float[4] bias = {{0, 1, 2, 3}}, int64[2] axes = {{{axes}}}, int64[3] shape = {{0, 4, -1}}> {{
  {before} m = ReduceMean <keepdims = 0> ({t}, axes) k = ReduceMean ({t}, axes) c = Sub ({t}, k) s = Mul (c, c)
  v = ReduceMean <keepdims = 0> (s, axes) {layer} (x, scale, bias, m, v) }}""")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(proto, loss="mse", optimizer="sgd:lr=1.0")
    assert program.options["norm_layers"] == {}
    rng = np.random.default_rng(0)
    x, targets = (rng.normal(2, 3, (6, 4, 5)).astype(np.float32) for _ in range(2))
    norm = torch.nn.BatchNorm1d(4, track_running_stats=False).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1, 2, 0.5, -1])), norm.bias.copy_(torch.tensor([0.0, 1, 2, 3]))
    y = norm(torch.from_numpy(x).double())
    loss = torch.nn.functional.mse_loss(y, torch.from_numpy(targets).double())
    loss.backward()
    with burnish.Session(program, threads=1) as session:
        np.testing.assert_allclose(session.predict({"x": x})["y"], y.detach(), atol=1e-5)
        assert session.step({"x": x, "targets": targets})["loss"] == pytest.approx(loss.item(), rel=1e-5)
        state, before = session.state(), program.initial_state()
    for name, parameter in (("scale", norm.weight), ("bias", norm.bias)):
        np.testing.assert_allclose(before[f"param/{name}"] - state[f"param/{name}"], parameter.grad, atol=1e-5)
    batch = [{"x": x, "targets": targets}]
    alone = train_alone(program, batch)
    for outcome in train_in_threads(program, batch, [[4, 2]]):
        assert largest_difference(outcome, alone) < 1e-5


def test_the_command_names_the_layers(tmp_path) -> None:
    onnx.save(network(), tmp_path / "model.onnx")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "model.onnx"), "--trainable", "head.*"])
    text = " ".join(result.output.split())
    assert "of which nothing trains keeps its statistics: stem.norm, middle.norm (--norm train" in text
