"""Group normalization in pieces: the operator that stands for it, the same outputs, and what is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from burnish.importer import load
from burnish.importer.weights import InitializerKind, classify_initializers
from burnish.rewriting.recognize_group_normalization import recognize_group_normalization
from burnish.rewriting.recognize_layer_normalization import recognize_layer_normalization
from burnish.rewriting.stages import RECOGNIZED, RECOGNIZED_TO_TRAIN
from oracles.combinations import diagonal
from oracles.recognition import (
    assert_gradients,
    assert_recognized,
    assert_untouched,
    exported,
    exported_by_dynamo,
    operators,
    random_weights,
    written,
)

X = np.random.default_rng(0).normal(0.5, 2, size=(2, 6, 4, 5)).astype(np.float32)
WEIGHTS = {
    "ones": np.ones(3, np.float32),
    "zeros": np.zeros(3, np.float32),
    "groups": np.array([0, 3, -1]),
    "shape": np.array([-1, 6, 4, 5]),
    "scale": np.random.default_rng(1).normal(1, 1, size=(6, 1, 1)).astype(np.float32),
    "bias": np.random.default_rng(2).normal(size=(6, 1, 1)).astype(np.float32),
}
BLOCKS = "blocks = Reshape(x, groups) normal = InstanceNormalization<epsilon=0.001>(blocks, ones, zeros) "
PYTORCH = BLOCKS + "back = Reshape(normal, shape) scaled = Mul(back, scale) y = Add(scaled, bias)"
REDUCED = """
    blocks = Reshape(x, groups)
    mean = ReduceMean<keepdims=1>(blocks, last)
    d = Sub(blocks, mean)
    square = Mul(d, d)
    variance = ReduceMean<keepdims=1>(square, last)
    stable = Add(variance, epsilon)
    root = Sqrt(stable)
    normal = Div(d, root)
    back = Reshape(normal, shape)
    scaled = Mul(back, scale)
    y = Add(scaled, bias)
"""
AFFINE = ["Reshape", "Reshape"]


@pytest.mark.parametrize("opset", [18, 20, 21, 23])
def test_pytorch_form(opset: int) -> None:
    model = assert_recognized(
        written(PYTORCH, X, WEIGHTS, opset=opset), recognize_group_normalization, X, [*AFFINE, "GroupNormalization"]
    )
    assert model.opset_imports[""] == max(opset, 21)
    assert set(model.graph.initializers) & {"scale", "bias", "ones", "zeros"} == {"scale", "bias"}
    (node,) = (node for node in model.graph if node.op_type == "GroupNormalization")
    assert node.attributes["num_groups"].as_int() == 3
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-3)


FORMS = {
    "shape of x": (
        PYTORCH.replace("back =", "shape_of_x = Shape(x) back =").replace("normal, shape)", "normal, shape_of_x)"),
        {},
    ),
    "commuted": (PYTORCH.replace("back, scale", "scale, back").replace("scaled, bias", "bias, scaled"), {}),
    "batch inferred": (PYTORCH, {"groups": np.array([-1, 3, 40])}),
    "groups of two axes": (PYTORCH, {"groups": np.array([0, 3, 2, -1])}),
    "scale with a batch axis": (PYTORCH, {"scale": WEIGHTS["scale"][None]}),
    "scale for all channels": (PYTORCH, {"scale": np.full((1, 1, 1), 1.5, np.float32)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    body, weights = FORMS[form]
    expected = ["Reshape", "Expand", "Reshape"] if form == "scale for all channels" else AFFINE
    proto = written(body, X, {**WEIGHTS, **weights})
    assert_recognized(proto, recognize_group_normalization, X, [*expected, "GroupNormalization"])


def test_without_affine_part() -> None:
    body = BLOCKS + "y = Reshape(normal, shape)"
    assert_recognized(written(body, X, WEIGHTS), recognize_group_normalization, X, ["GroupNormalization"])


@pytest.mark.parametrize("groups", [[0, 3, -1], [0, 3, 2, 4, -1]])
def test_reductions(groups: list[int]) -> None:
    axes = np.arange(2, len(groups))
    proto = written(REDUCED.replace("last", "axes"), X, {**WEIGHTS, "groups": np.array(groups), "axes": axes})
    model = assert_recognized(proto, recognize_layer_normalization, X, ["Reshape", "LayerNormalization", "Reshape", "Mul", "Add"])
    recognize_group_normalization(model)
    assert operators(model) == [*AFFINE, "GroupNormalization"]


UNTOUCHED = {
    "an affine part of its own": (PYTORCH, "y", {"ones": np.array([1, 2, 1], np.float32)}),
    "a bias of its own": (PYTORCH, "y", {"zeros": np.array([0, 0, 1], np.float32)}),
    "another shape": (
        PYTORCH.replace("scaled = Mul(back, scale) y = Add(scaled, bias)", "y = Exp(back)"),
        "y",
        {"shape": [-1, 3, 8, 5]},
    ),
    "a group of all samples": (PYTORCH, "y", {"groups": np.array([1, 3, -1])}),
    "normalized is an output": (PYTORCH, "y, normal", {}),
    "blocks have another reader": (PYTORCH + " z = Exp(blocks)", "y, z", {}),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_is_no_group_normalization_stays(case: str) -> None:
    body, outputs, weights = UNTOUCHED[case]
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    assert_untouched(written(body, X, {**WEIGHTS, **arrays}, outputs), recognize_group_normalization)


def test_a_scale_for_each_pixel_stays_outside() -> None:
    proto = written(PYTORCH, X, {**WEIGHTS, "scale": np.random.default_rng(3).normal(size=(6, 4, 5)).astype(np.float32)})
    assert_recognized(proto, recognize_group_normalization, X, ["GroupNormalization", "Mul", "Add"])


MODULES = {
    "images": (lambda: torch.nn.GroupNorm(3, 6, eps=1e-3), X),
    "sequences": (lambda: torch.nn.GroupNorm(2, 6), X[..., 0]),
    "vectors": (lambda: torch.nn.GroupNorm(2, 6), X[..., 0, 0]),
    "one group": (lambda: torch.nn.GroupNorm(1, 6), X),
    "a group for each channel": (lambda: torch.nn.GroupNorm(6, 6), X),
    "plain": (lambda: torch.nn.GroupNorm(3, 6, affine=False), X),
}


@diagonal(("name", MODULES), ("opset", [13, 18, 20]), test=9)
def test_pytorch_exports(name: str, opset: int) -> None:
    make, x = MODULES[name]
    module = random_weights(make())
    proto = exported(module, x, opset)
    model = load(proto)
    RECOGNIZED.run(model, None)
    RECOGNIZED_TO_TRAIN.run(model, None)
    assert [operator for operator in operators(model) if operator not in ("Reshape", "Expand")] == ["GroupNormalization"]
    parameters = dict(module.named_parameters())
    names = {initializer: parameter for initializer, parameter in zip(model.graph.initializers, parameters, strict=True)}
    assert_gradients(proto, module, x, names)


@pytest.mark.slow
def test_pytorch_export_by_dynamo() -> None:
    proto = exported_by_dynamo(random_weights(torch.nn.GroupNorm(3, 6)), X, 18)
    assert_recognized(proto, recognize_group_normalization, X, [*AFFINE, "GroupNormalization"])


def test_what_an_exporter_fills_in_is_no_weight() -> None:
    module = random_weights(torch.nn.GroupNorm(3, 6))
    model = load(exported(module, X, 14, folding=True))
    RECOGNIZED.run(model, None)
    assert operators(model) == ["Reshape", "InstanceNormalization", "Reshape", "Mul", "Add"]
    assert classify_initializers(model) == {name: InitializerKind.WEIGHT for name in model.graph.initializers}
    assert len(model.graph.initializers) == 2


def test_weights_of_a_layer_normalization_between_reshapes_stay_weights() -> None:
    weights = {**WEIGHTS, "gain": np.ones(40, np.float32), "shift": np.zeros(40, np.float32)}
    body = "blocks = Reshape(x, groups) normal = LayerNormalization(blocks, gain, shift) y = Reshape(normal, shape)"
    assert_untouched(written(body, X, weights), recognize_group_normalization)


REPEATED = """
    blocks = Reshape(x, groups) all = Shape(blocks) extent = Slice(all, start, end) repeated = Expand(unit, extent)
    normal = LayerNormalization(blocks, repeated) y = Reshape(normal, shape)
"""
SLICED = {**WEIGHTS, "start": np.array([2]), "end": np.array([3])}


def test_ones_repeated_in_the_graph() -> None:
    constant = "unit = Constant<value = float[1] {1.0}>() " + REPEATED
    assert_recognized(written(constant, X, SLICED), recognize_group_normalization, X, ["GroupNormalization"])


def test_a_weight_repeated_in_the_graph_stays_a_weight() -> None:
    weights = {**SLICED, "unit": np.ones(1, np.float32)}
    assert_untouched(written(REPEATED, X, weights), recognize_group_normalization)
