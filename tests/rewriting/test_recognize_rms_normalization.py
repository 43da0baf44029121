"""RMS normalization in pieces: the operator that stands for it, the same outputs, and what is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from burnish.importer import load
from burnish.rewriting.recognize_rms_normalization import recognize_rms_normalization
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

X = np.random.default_rng(0).normal(0.5, 2, size=(2, 3, 8)).astype(np.float32)
WEIGHTS = {"scale": np.random.default_rng(1).normal(1, 1, size=8).astype(np.float32)}
POWER = "square = Pow(x, two) power = ReduceMean<keepdims=1>(square, last) stable = Add(power, epsilon) root = Sqrt(stable) "
LLAMA = POWER + "inv = Div(one, root) normal = Mul(x, inv) y = Mul(scale, normal)"

FORMS = {
    "Llama, T5": LLAMA,
    "division": POWER + "normal = Div(x, root) y = Mul(normal, scale)",
    "Reciprocal": LLAMA.replace("Div(one, root)", "Reciprocal(root)"),
    "squared by Mul": LLAMA.replace("Pow(x, two)", "Mul(x, x)"),
    "Pow for the inverse": LLAMA.replace("root = Sqrt(stable)", "").replace("Div(one, root)", "Pow(stable, minus_half)"),
    "scale on the inverse": POWER + "inv = Reciprocal(root) gain = Mul(inv, scale) y = Mul(gain, x)",
    "scale before the division": POWER + "product = Mul(scale, x) y = Div(product, root)",
    "commuted": LLAMA.replace("power, epsilon", "epsilon, power").replace("Mul(x, inv)", "Mul(inv, x)"),
    "casts that change nothing": "wide = Cast<to=1>(x) "
    + LLAMA.replace("Pow(x", "Pow(wide").replace("Mul(x", "Mul(wide").replace("y = Mul(scale, normal)", "")
    + "narrow = Cast<to=1>(normal) y = Mul(scale, narrow)",
}


@pytest.mark.parametrize("opset", [18, 20, 21, 23])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, opset: int) -> None:
    proto = written(FORMS[form], X, WEIGHTS, opset=opset)
    model = assert_recognized(proto, recognize_rms_normalization, X, ["RMSNormalization"])
    assert model.opset_imports[""] == 23
    assert set(model.graph.initializers) == {"scale"}
    (node,) = (node for node in model.graph if node.op_type == "RMSNormalization")
    assert [value.name for value in node.inputs] == ["x", "scale"]
    assert node.attributes["axis"].as_int() == -1
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-3)


def test_without_scale() -> None:
    body = LLAMA.replace("y = Mul(scale, normal)", "").replace("normal =", "y =")
    assert_recognized(written(body, X, {}), recognize_rms_normalization, X, ["RMSNormalization"])


def test_two_axes() -> None:
    assert_recognized(
        written(LLAMA.replace("last", "last_two"), X, WEIGHTS), recognize_rms_normalization, X, ["Expand", "RMSNormalization"]
    )


def test_a_scale_that_is_computed() -> None:
    body = "gain = Add(scale, one) " + LLAMA.replace("Mul(scale", "Mul(gain")
    assert_recognized(written(body, X, WEIGHTS), recognize_rms_normalization, X, ["Add", "RMSNormalization"])


def test_half_precision_with_float32_statistics() -> None:
    body = "wide = Cast<to=1>(x) " + LLAMA.replace("(x,", "(wide,").replace(
        "y = Mul(scale, normal)", "narrow = Cast<to=10>(normal) y = Mul(scale, narrow)"
    )
    weights = {"scale": WEIGHTS["scale"].astype(np.float16)}
    proto = written(body, X, weights, dtype="float16")
    # ONNX Runtime rounds once, the pieces twice.
    assert_recognized(proto, recognize_rms_normalization, X.astype(np.float16), ["RMSNormalization"], tolerance=2e-3)


def test_widened_values_that_something_else_reads_stay() -> None:
    body = "wide = Cast<to=1>(x) " + LLAMA.replace("(x,", "(wide,").replace(
        "y = Mul(scale, normal)", "sum = Add(wide, normal) y = Cast<to=10>(sum)"
    )
    proto = written(body, X, {}, dtype="float16")
    expected = ["Cast", "RMSNormalization", "Add", "Cast"]
    assert_recognized(proto, recognize_rms_normalization, X.astype(np.float16), expected, tolerance=1e-3)


UNTOUCHED = {
    "power is an output": (LLAMA, "y, power"),
    "root has another reader": (LLAMA + " z = Exp(root)", "y, z"),
    "epsilon is computed": ("e = Exp(x) " + LLAMA.replace("epsilon", "e"), "y"),
    "axes in front": (LLAMA.replace("last", "first"), "y"),
    "another x": ("e = Exp(x) " + LLAMA.replace("Mul(x, inv)", "Mul(e, inv)"), "y"),
    "a sum instead of a mean": (LLAMA.replace("ReduceMean", "ReduceSum"), "y"),
    "axes that go": (LLAMA.replace("keepdims=1", "keepdims=0").replace("last", "all"), "y"),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_is_no_rms_normalization_stays(case: str) -> None:
    body, outputs = UNTOUCHED[case]
    weights = {**WEIGHTS, "first": np.array([0, 1]), "all": np.array([0, 1, 2])}
    assert_untouched(written(body, X, weights, outputs), recognize_rms_normalization)


def test_float64_keeps_its_digits() -> None:
    weights = {**WEIGHTS, "one": np.array(1.0), "two": np.array(2.0), "epsilon": np.array(1e-3)}
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    assert_untouched(written(LLAMA, X, weights, dtype="double"), recognize_rms_normalization)


def test_a_model_with_what_means_something_else_in_opset_23_stays() -> None:
    body = LLAMA.replace("y =", "z =") + ' y = GridSample<mode="bilinear">(image, points)'
    weights = {**WEIGHTS, "image": np.ones((1, 1, 4, 4), np.float32), "points": np.zeros((1, 2, 2, 2), np.float32)}
    assert_untouched(written(body, X, weights, "y, z"), recognize_rms_normalization)


class LlamaNorm(torch.nn.Module):
    """RMS normalization as Llama's code has it: statistics in float32, cast back before the weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_pytorch_exports(opset: int) -> None:
    module = random_weights(LlamaNorm(8))
    proto = exported(module, X, opset)
    model = assert_recognized(proto, recognize_rms_normalization, X, ["RMSNormalization"])
    assert list(model.graph.initializers) == ["weight"]
    assert_gradients(proto, module, X, {"weight": "weight"})


@pytest.mark.slow
def test_pytorch_export_by_dynamo() -> None:
    proto = exported_by_dynamo(random_weights(torch.nn.RMSNorm(8)), X, 18)
    model = assert_recognized(proto, recognize_rms_normalization, X, ["RMSNormalization"])
    assert list(model.graph.initializers) == ["weight"]


def test_pytorch_export_in_half_precision() -> None:
    module = random_weights(LlamaNorm(8)).half()
    x = X.astype(np.float16)
    assert_recognized(exported(module, x, 17), recognize_rms_normalization, x, ["RMSNormalization"], tolerance=2e-3)


def test_layer_normalization_is_none() -> None:
    proto = exported(torch.nn.LayerNorm(8), X, 14)
    model = load(proto)
    recognize_rms_normalization(model)
    assert operators(model)[:2] == ["ReduceMean", "Sub"]
