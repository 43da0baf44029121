"""Cross-entropy at its edges: ignored labels, large logits, what it costs. Its values are in test_losses_against_pytorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish import losses
from burnish.autodiff import differentiate
from burnish.errors import ConfigurationError
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.loss_graphs import loss_graph
from oracles.small_graphs import SmallGraph

CLASSES = 5
IGNORE = -100


def torch_cross_entropy(x: np.ndarray, labels: np.ndarray, dy: float, **options: Any) -> tuple[float, np.ndarray]:
    tensor = torch.from_numpy(np.asarray(x, np.float64)).requires_grad_()
    weight = options.pop("weight", None)
    weight = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(tensor, torch.from_numpy(labels), weight=weight, **options)
    loss.backward(torch.tensor(dy, dtype=torch.float64))
    assert tensor.grad is not None
    return loss.item(), tensor.grad.numpy()


def test_sums_and_weights_of_batches_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(2)
    loss = losses.cross_entropy(weight=[0.5, 1.0, 2.0, 0.0, 3.0], label_smoothing=0.1)
    x, labels = rng.standard_normal((12, CLASSES)), rng.integers(0, CLASSES, 12)
    labels[:3] = IGNORE
    session = loss_graph(loss, ("batch", CLASSES)).session()
    parts = [session(x=x[part], labels=labels[part], dy=np.float64(1)) for part in (slice(0, 3), slice(3, 4), slice(4, 12))]
    whole = session(x=x, labels=labels, dy=np.float64(1))
    for name in ("total", "weight"):
        np.testing.assert_allclose(sum(part[name] for part in parts), whole[name], rtol=1e-14)
    assert parts[0]["weight"] == 0


@pytest.mark.parametrize("weight", [None, [0.5, 1.0, 2.0, 0.0, 3.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_whose_labels_are_all_ignored_has_loss_and_gradient_zero(weight: Any, smoothing: float) -> None:
    loss = losses.cross_entropy(weight=weight, label_smoothing=smoothing)
    x = np.random.default_rng(0).standard_normal((3, CLASSES))
    results = loss_graph(loss, (3, CLASSES)).run(x=x, labels=np.full(3, IGNORE), dy=np.float64(1))
    assert str(results["loss"]) == "0.0"
    assert results["weight"] == 0
    assert not results["dx"].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_of_ten_thousand_are_exact_in_float32(smoothing: float) -> None:
    x = np.array(
        [[1e4, -1e4, 0.0, 9999.0, 1.0], [-1e4, -1e4, -1e4, -1e4, -1e4], [1e4, 1e4, 0.0, -1e4, 5e3], [88.8, -103.0, 0, 1, 2]],
        np.float32,
    )
    labels = np.array([1, 4, 0, 1])
    results = loss_graph(losses.cross_entropy(label_smoothing=smoothing), x.shape, "float32").run(
        x=x, labels=labels, dy=np.float32(1)
    )
    expected, gradient = torch_cross_entropy(x, labels, 1.0, label_smoothing=smoothing)
    np.testing.assert_allclose(results["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(results["dx"], gradient, rtol=1e-5, atol=1e-7)


def test_an_ignored_position_may_hold_anything() -> None:
    x = np.array([[0.0, 1.0], [np.inf, -np.inf]])
    graph = SmallGraph({"x": ("float64", (2, 2)), "label": ("int64", (2,))})
    ((total, weight, *_),) = losses.cross_entropy(ignore_index=7).terms([graph["x"]], [graph["label"]])
    graph.output("total", total)
    graph.output("weight", weight)
    results = graph.run(x=x, label=np.array([0, 7]))
    np.testing.assert_allclose(results["total"], np.log1p(np.e), rtol=1e-12)
    assert results["weight"] == 1


def test_cross_entropy_costs_no_one_hot() -> None:
    graph = SmallGraph({"x": ("float32", ("batch", 1000)), "label": ("int64", ("batch",))})
    ((total, weight, *_),) = losses.cross_entropy().terms([graph["x"]], [graph["label"]])
    forward = list(graph.graph)
    gradient = differentiate(graph.builder, {total.value: graph.builder.scalar(1.0, total)}, [graph["x"].value])
    assert gradient[graph["x"].value] is not None
    assert len(forward) <= 1
    assert graph.operators() == ["SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad"]
    lower_semantic_operators(ir.Model(graph.graph, ir_version=10))
    wide = [
        node.op_type
        for node in graph.graph
        if node.outputs[0].shape is not None and len(node.outputs[0].shape) == 2 and node.outputs[0].shape[1] == 1000
    ]
    assert "OneHot" not in wide
    assert wide.count("LogSoftmax") == 1
    assert len(wide) <= 4
    assert weight.dtype == graph["x"].dtype


@pytest.mark.slow
def test_a_softmax_along_the_last_axis_is_stepped_over_and_metrics_read_the_last_axis() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> tokens (float[batch, tokens, 3] x) => (float[batch, tokens, 4] p)
        <float[3, 4] head = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4}> {
            logits = MatMul (x, head)
            p = Softmax <axis = -1> (logits)
        }""")
    moved = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> tokens (float[batch, tokens, 3] x) => (float[batch, 4, tokens] logits)
        <float[3, 4] head = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4}> {
            rows = MatMul (x, head)
            logits = Transpose <perm = [0, 2, 1]> (rows)
        }""")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (2, 5))
    labels[0, 1:3] = -100
    batch = {"x": rng.standard_normal((2, 5, 3)).astype(np.float32), "labels": labels}
    metrics = ["accuracy", "perplexity", "top_2", "f1:macro"]
    program = burnish.compile(model, loss="cross_entropy:class_axis=-1", metrics=metrics)
    assert program.options["predictions"] == [{"output": "p", "reads": "logits"}]
    assert [entry.extents for entry in program.signature["step"].inputs if entry.name == "labels"] == [("batch", "tokens")]
    figures = burnish.Session(program).evaluate(batch)
    expected = burnish.Session(burnish.compile(moved, metrics=metrics)).evaluate(batch)
    assert figures == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("axis", [0, 2, True, "last"])
def test_classes_are_along_the_second_or_the_last_axis(axis: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"class_axis must be 1 or -1, not {axis!r}"):
        losses.cross_entropy(class_axis=axis)  # type: ignore[arg-type]


TAGGER = """
<ir_version: 8, opset_import: ["": 18]>
tagger (float[N, T, 4] x) => (float[N, T, 3] y)
<float[4, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1}> { h = MatMul(x, w) y = %s (h) }"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["Identity", "Softmax <axis = -1>"])
def test_a_tagger_trains_along_its_last_axis(last: str) -> None:
    """It takes the steps that PyTorch takes, also where it ends in a Softmax, which the loss steps over."""
    model = onnx.parser.parse_model(TAGGER.replace("%s", last))
    program = burnish.compile(model, loss="cross_entropy:class_axis=-1", optimizer="sgd:lr=0.5")
    rng = np.random.default_rng(6)
    x, labels = rng.standard_normal((2, 5, 4)).astype(np.float32), rng.integers(0, 3, (2, 5))
    weight = torch.tensor(onnx.numpy_helper.to_array(model.graph.initializer[0]).copy(), requires_grad=True)
    logits = torch.from_numpy(x) @ weight
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(labels))
    expected.backward()
    for engine in ("onnxruntime", "torch"):
        with burnish.Session(program, engine=engine) as session:
            results = session.step({"x": x, "labels": labels})
            moved = session.state()["param/w"]
        assert results["loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert results["accuracy"] == pytest.approx((logits.argmax(-1).numpy() == labels).mean())
        np.testing.assert_allclose(moved, weight.detach() - 0.5 * weight.grad, rtol=1e-5, atol=1e-6)


def test_an_open_second_axis_is_warned_of() -> None:
    model = onnx.parser.parse_model(TAGGER.replace("%s", "Relu"))
    said = r"axis 1 of 'y' of shape .*T.*, which is open: .*'cross_entropy:class_axis=-1'"
    with pytest.warns(burnish.errors.ObjectiveWarning, match=said):
        burnish.compile(model, loss="cross_entropy")


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy:class_axis=-1", "focal", "cross_entropy:probabilities=true"])
def test_a_model_of_one_class_is_refused(loss: str) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[N, 4] x) => (float[N, 1] y) <float[4, 1] w = {1, 2, 3, 4}>'
    with pytest.raises(
        burnish.errors.ConfigurationError, match=r"'y' of shape \[N,1\] has one class along axis -?1, and nothing"
    ):
        burnish.compile(onnx.parser.parse_model(text + "{ y = MatMul(x, w) }"), loss=loss)
