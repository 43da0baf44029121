"""``burnish check``: the table of gradients beside central differences, and how the command ends."""

from __future__ import annotations

import re

import onnx
import onnx.parser
import pytest

from burnish.graph import Tensor
from burnish.operators import Operation
from oracles.operator_records import change_record

CURVED = """<ir_version: 10, opset_import: ["": 21]> g (float[N, T, 2] x) => (float[N, T, 2] y, float[N, T, 2] z)
<float[2, 2] w = {1, 2, 3, 4}, float[2, 2] head = {1, 2, 3, 4}, float[2, 2] other = {1, 2, 3, 4}> {
    h = MatMul (x, w)
    t = Tanh (h)
    y = MatMul (t, head)
    z = MatMul (t, other)
}"""


@pytest.fixture
def curved(folder) -> None:
    model = onnx.parser.parse_model(CURVED)
    model.graph.node[1].name = "bend"
    onnx.save(model, folder / "curved.onnx")


@pytest.mark.slow
def test_gradients_that_are_right(run, folder):
    printed = run("check", "model.onnx", "--probes", "2").stdout
    assert re.search(r"model\.onnx can be trained: \d+ parameters in 11 tensors train\n", printed)
    assert re.search(r"\n stem\.convolution\.weight +\[2, 1, 3, 3\] +\d\.\de-\d\d +2 ", printed)
    assert re.search(r"\nall gradients agree with central differences: the worst error is \d\.\de-\d\d\n$", printed)


def test_only_whether_it_trains(run, folder):
    printed = run("check", "model.onnx", "--no-gradients").stdout
    assert printed.count("\n") == 2
    assert "can be trained" in printed
    assert "predict computes what model.onnx computes" in printed


@pytest.mark.slow
def test_a_wrong_gradient_is_named_and_ends_with_1(run, curved, monkeypatch):
    def wrong(op: Operation, dy: Tensor) -> Tensor:
        return dy * (1 - op.output)

    options = ("--loss", "mse", "--outputs", "y", "--extent", "T=3", "--batch-size", "2")
    run("check", "curved.onnx", *options)
    change_record(monkeypatch, "Tanh", gradient=wrong)
    result = run("check", "curved.onnx", *options, code=1)
    assert re.search(r"\n w +\[2, 2\] +\d\.\de-\d\d +4 +differs: Tanh 'bend' \(output 't'\)", result.stdout)
    assert re.search(r"\n head +\[2, 2\] +\d\.\de-\d\d +4 *\n", result.stdout)
    message = "error: the gradient of 'param/w' differs from central differences: at fault is the gradient of Tanh 'bend' "
    assert message in result.stderr


def test_both_outputs_that_the_loss_would_read(run, curved):
    """Without a loss of one's own, all that the loss reads is weighed by numbers of either sign."""
    printed = run("check", "curved.onnx", "--outputs", "y", "--probes", "1").stdout
    assert re.search(r"\n w +\[2, 2\]", printed)
    assert "other" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--extent", "T"), "--extent T: give NAME=N, such as sequence=16"),
        (("--probes", "0"), "Invalid value for '--probes'"),
    ],
)
def test_options_that_do_not_fit(run, curved, options, message):
    assert message in run("check", "curved.onnx", "--outputs", "y", *options, code=2).stderr


def test_an_extent_that_no_input_has(run, curved):
    message = "error: extent: no input has a dimension 'K'; symbolic are N, T"
    assert message in run("check", "curved.onnx", "--outputs", "y", "--extent", "K=3", code=1).stderr


@pytest.mark.slow
def test_a_program_is_checked_with_its_own_loss(run, folder):
    run("compile", "model.onnx", "-o", "program")
    assert "all gradients agree" in run("check", "program", "--probes", "1").stdout
