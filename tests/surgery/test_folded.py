"""Batch normalization that was folded into convolutions, seen in a file that no longer has it."""

from __future__ import annotations

import itertools
import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.rewriting.fold_batch_normalization import fold_batch_normalization
from burnish.surgery.folded import perhaps_folded

CHANNELS = (3, 8, 8, 8, 8)


def network(bias=True, behind=None, channels=CHANNELS) -> onnx.ModelProto:
    """Convolutions in a row, the inner ones in residual blocks, with what ``behind`` names behind each."""
    rng = np.random.default_rng(0)
    nodes, tensors, x = [], [], "x"
    for index, (before, after) in enumerate(itertools.pairwise(channels)):
        tensors.append(("w", index, rng.normal(size=(after, before, 3, 3)) / 3))
        operands = [x, f"w{index}"]
        if bias:
            tensors.append(("b", index, rng.normal(size=after)))
            operands.append(f"b{index}")
        nodes.append(helper.make_node("Conv", operands, [f"c{index}"], pads=[1, 1, 1, 1]))
        result = f"c{index}"
        if behind is not None:
            for name in "sumv"[: 4 if behind == "BatchNormalization" else 2]:
                tensors.append((name, index, rng.uniform(0.5, 2, size=after)))
            names = [f"{name}{index}" for name in ("sumv" if behind == "BatchNormalization" else "su")]
            nodes.append(helper.make_node(behind, [result, *names], [f"n{index}"]))
            result = f"n{index}"
        if before == after:
            nodes.append(helper.make_node("Add", [result, x], [f"a{index}"]))
            result = f"a{index}"
        nodes.append(helper.make_node("Relu", [result], [f"r{index}"]))
        x = f"r{index}"
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["y"]))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", channels[0], 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", channels[-1], 1, 1])],
        [numpy_helper.from_array(array.astype(np.float32), f"{name}{index}") for name, index, array in tensors],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("bias", [True, False])
def test_folding_is_seen_once_it_is_done(bias):
    model = burnish.load(network(bias, "BatchNormalization"))
    assert perhaps_folded(model) == 0
    fold_batch_normalization(model)
    assert perhaps_folded(burnish.load(model)) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": False},
        {"behind": "InstanceNormalization"},
        {"channels": (3, 8, 8)},
        {"channels": (3, 4, 5, 6, 7, 8)},
    ],
    ids=["without bias", "normalized", "too few", "nothing repeats"],
)
def test_other_networks_are_left_in_peace(arguments):
    assert perhaps_folded(burnish.load(network(**arguments))) == 0


@pytest.mark.slow
def test_inspect_says_what_can_be_done(tmp_path):
    path = tmp_path / "folded.onnx"
    onnx.save(network(), path)
    printed = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    assert "4 convolutions, all with a bias and none normalized" in printed
    assert "burnish.surgery.insert" in printed
    assert "optimize=False" in printed
    assert "--no-fold" in printed
    described = CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout
    assert json.loads(described)["perhaps_folded"] == 4
    inserted = burnish.surgery.insert(burnish.load(path))
    assert perhaps_folded(inserted) == 0
