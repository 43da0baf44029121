"""The policy ``auto``: what does not train keeps its statistics, bit for bit, and the rest trains."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app

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


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
@pytest.mark.parametrize("way", HEAD)
@pytest.mark.quick_cases(2)
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


def test_the_command_names_the_layers(tmp_path) -> None:
    onnx.save(network(), tmp_path / "model.onnx")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "model.onnx"), "--trainable", "head.*"])
    text = " ".join(result.output.split())
    assert "of which nothing trains keeps its statistics: stem.norm, middle.norm (--norm train" in text
