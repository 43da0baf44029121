"""The gradient of the standard's Dropout, through the mask that the node itself drew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from burnish.autodiff import differentiate
from burnish.errors import GradientError
from burnish.graph import Tensor
from oracles.small_graphs import SmallGraph

SHAPE = (40, 30)


def dropout_graph(
    ratio: float | str | None, training: bool | str | None, dtype: str, opset: int = 18, outputs: int = 1
) -> SmallGraph:
    """(x, dy, ratio, training) -> y, dx; "run" leaves a setting to run time, None leaves it out."""
    inputs: dict[str, tuple[str, Any]] = {"x": (dtype, ("batch", SHAPE[1])), "dy": (dtype, ("batch", SHAPE[1]))}
    if ratio == "run":
        inputs["ratio"] = ("float32", ())
    if training == "run":
        inputs["training"] = ("bool", ())
    graph = SmallGraph(inputs, opset)
    builder = graph.builder

    def given(setting: Any, name: str, dtype: str) -> Tensor | None:
        if setting is None or setting == "run":
            return None if setting is None else graph[name]
        return builder.constant(np.asarray(setting, dtype))

    operands = [graph["x"], given(ratio, "ratio", "float32"), given(training, "training", "bool")]
    while operands[-1] is None:
        operands.pop()
    result: Any = builder.op("Dropout", *operands, seed=5, outputs=outputs)
    y = result[0] if outputs > 1 else result
    gradient = differentiate(builder, {y.value: graph["dy"]}, [graph["x"].value])[graph["x"].value]
    assert gradient is not None
    assert (gradient.dtype, gradient.shape) == (graph["x"].dtype, graph["x"].shape)
    graph.output("y", y)
    graph.output("dx", gradient)
    graph.check()
    return graph


def feeds(dtype: str) -> dict[str, np.ndarray]:
    x, dy = np.random.default_rng(0).standard_normal((2, *SHAPE))
    return {"x": x.astype(dtype), "dy": dy.astype(dtype)}


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("settings", ["known", "run"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5])
def test_in_training_it_is_the_factor_of_each_element(ratio: float, settings: str, outputs: int, dtype: str, opset: int) -> None:
    if settings == "known":
        results = dropout_graph(ratio, True, dtype, opset, outputs).run(**feeds(dtype))
    else:
        graph = dropout_graph("run", "run", dtype, opset, outputs)
        results = graph.run(**feeds(dtype), ratio=np.float32(ratio), training=np.asarray(True))
    factor = results["y"] / feeds(dtype)["x"]
    assert (factor == 0).any() == (ratio > 0)
    np.testing.assert_allclose(results["dx"], feeds(dtype)["dy"] * factor, rtol=1e-6)
    np.testing.assert_allclose(factor[factor != 0], 1 / (1 - ratio), rtol=1e-6)


def test_the_ratio_is_one_half_where_it_is_left_out() -> None:
    results = dropout_graph(None, True, "float32").run(**feeds("float32"))
    dropped = results["dx"] == 0
    assert 0.4 < dropped.mean() < 0.6
    np.testing.assert_allclose(results["dx"][~dropped], 2 * feeds("float32")["dy"][~dropped], rtol=1e-6)


@pytest.mark.parametrize(("ratio", "training"), [(0.3, None), (None, None), (0.3, False)])
def test_outside_training_it_is_the_identity(ratio: float | None, training: bool | None) -> None:
    graph = dropout_graph(ratio, training, "float64")
    assert graph.operators() == ["Dropout"]
    np.testing.assert_array_equal(graph.run(**feeds("float64"))["dx"], feeds("float64")["dy"])


def test_a_mode_of_run_time_may_be_outside_training() -> None:
    for ratio in ("run", 0.3):
        graph = dropout_graph(ratio, "run", "float64")
        given = {"ratio": np.float32(0.3)} if ratio == "run" else {}
        results = graph.run(**feeds("float64"), **given, training=np.asarray(False))
        np.testing.assert_array_equal(results["dx"], feeds("float64")["dy"])


def test_a_ratio_of_one_gives_zeros() -> None:
    """The reference evaluator runs these: ONNX Runtime refuses a ratio of 1."""
    graph = dropout_graph(1.0, True, "float64")
    with np.errstate(all="ignore"):
        assert not graph.run_reference(**feeds("float64"))["dx"].any()
        graph = dropout_graph("run", "run", "float64")
        results = graph.run_reference(**feeds("float64"), ratio=np.float32(1.0), training=np.asarray(True))
    assert not results["dx"].any()


def test_a_mask_that_is_drawn_has_no_derivative_by_its_ratio() -> None:
    graph = SmallGraph({"x": ("float32", (3,)), "dy": ("float32", (3,)), "ratio": ("float32", ())}, 18)
    builder = graph.builder
    for training, has_gradient in ((False, True), (True, False)):
        y = builder.op("Dropout", graph["x"], graph["ratio"], builder.constant(np.asarray(training)))
        values = [graph["x"].value, graph["ratio"].value]
        if has_gradient:
            gradients = differentiate(builder, {y.value: graph["dy"]}, values)
            assert gradients[values[0]] is not None
            assert gradients[values[1]] is None
        else:
            with pytest.raises(GradientError, match=r"Dropout .*a mask that is drawn has no derivative by its ratio"):
                differentiate(builder, {y.value: graph["dy"]}, values)


@pytest.mark.parametrize("op_type", ["Bernoulli", "RandomNormalLike", "RandomUniformLike", "EyeLike"])
def test_what_reads_no_numbers_or_jumps_with_them_has_the_gradient_zero(op_type: str) -> None:
    graph = SmallGraph({"x": ("float32", (3, 3)), "dy": ("float32", (3, 3))}, 18)
    y = graph.builder.op(op_type, graph["x"])
    assert differentiate(graph.builder, {y.value: graph["dy"]}, [graph["x"].value]) == {graph["x"].value: None}
