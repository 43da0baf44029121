"""GELU in pieces: the operator that stands for it, the same outputs, and what is left alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from burnish.rewriting.recognize_gelu import recognize_gelu
from oracles.recognition import assert_gradients, assert_recognized, assert_untouched, exported, random_weights, written

X = np.concatenate([np.linspace(-6, 6, 61), [0.0, -30.0, 30.0]]).astype(np.float32).reshape(4, 16)
NUMBERS = {
    "root": np.float32(math.sqrt(2.0)),
    "inverse_root": np.float32(math.sqrt(0.5)),
    "cubic": np.float32(0.044715),
    "outer": np.float32(0.79788456),
}

GATE = "arg = Div(x, root) erf = Erf(arg) gate = Add(erf, one) "
EXACT = {
    "PyTorch": GATE + "twice = Mul(x, gate) y = Mul(twice, half)",
    "commuted": GATE.replace("erf, one", "one, erf") + "twice = Mul(gate, x) y = Mul(half, twice)",
    "half of x first": GATE + "low = Mul(x, half) y = Mul(low, gate)",
    "half of the gate first": GATE + "cdf = Mul(half, gate) y = Mul(x, cdf)",
    "product with the inverse": GATE.replace("Div(x, root)", "Mul(inverse_root, x)") + "cdf = Mul(gate, half) y = Mul(cdf, x)",
    "divided by two": GATE + "twice = Mul(x, gate) y = Div(twice, two)",
    "x divided by two": GATE + "low = Div(x, two) y = Mul(gate, low)",
    "gate divided by two": GATE + "cdf = Div(gate, two) y = Mul(x, cdf)",
}

TANH = "u = Mul(outer, sum) t = Tanh(u) gate = Add(t, one) twice = Mul(x, gate) y = Mul(half, twice)"
APPROXIMATE = {
    "PyTorch": "xx = Mul(x, x) cube = Mul(x, xx) term = Mul(cubic, cube) sum = Add(x, term) " + TANH,
    "power": "cube = Pow(x, three) term = Mul(cube, cubic) sum = Add(term, x) " + TANH,
    "constant first": "kx = Mul(cubic, x) kxx = Mul(kx, x) term = Mul(kxx, x) sum = Add(x, term) " + TANH,
    "x taken out": "ux = Mul(x, outer) kx = Mul(cubic, x) kxx = Mul(kx, x) sum = Add(one, kxx) "
    + TANH.replace("Mul(outer, sum)", "Mul(ux, sum)"),
    "x taken out, power": "xx = Pow(x, two) kxx = Mul(cubic, xx) sum = Add(kxx, one) usum = Mul(outer, sum) "
    + TANH.replace("Mul(outer, sum)", "Mul(x, usum)"),
    "half of the gate first": "cube = Pow(x, three) term = Mul(cube, cubic) sum = Add(term, x) "
    + TANH.replace("twice = Mul(x, gate) y = Mul(half, twice)", "cdf = Mul(half, gate) y = Mul(x, cdf)"),
}


@pytest.mark.parametrize("form", EXACT)
def test_exact_forms(form: str) -> None:
    model = assert_recognized(written(EXACT[form], X, NUMBERS), recognize_gelu, X, ["Gelu"])
    assert model.opset_imports[""] == 20
    assert not model.graph.initializers
    (node,) = (node for node in model.graph if node.op_type == "Gelu")
    assert "approximate" not in node.attributes


@pytest.mark.parametrize("form", APPROXIMATE)
def test_approximations(form: str) -> None:
    model = assert_recognized(written(APPROXIMATE[form], X, NUMBERS), recognize_gelu, X, ["Gelu"])
    (node,) = (node for node in model.graph if node.op_type == "Gelu")
    assert node.attributes["approximate"].as_string() == "tanh"


def test_constants_may_be_off_by_rounding() -> None:
    near = {name: np.nextafter(number, np.float32(2)) for name, number in NUMBERS.items()}
    assert_recognized(written(EXACT["PyTorch"], X, near), recognize_gelu, X, ["Gelu"])
    assert_recognized(written(APPROXIMATE["PyTorch"], X, near), recognize_gelu, X, ["Gelu"])


def test_half_precision() -> None:
    x = X.astype(np.float16)
    numbers = {name: np.float16(number) for name, number in {**NUMBERS, "half": 0.5, "one": 1.0}.items()}
    proto = written(EXACT["PyTorch"], x, numbers, dtype="float16")
    assert_recognized(proto, recognize_gelu, x, ["Gelu"], tolerance=2e-3)


UNTOUCHED = {
    "another root": (EXACT["PyTorch"], "y", {"root": np.float32(1.4)}),
    "a root of few digits": (EXACT["PyTorch"], "y", {"root": np.float32(1.41421)}),
    "no half": (EXACT["PyTorch"], "y", {"half": np.float32(1.0)}),
    "another cubic term": (APPROXIMATE["PyTorch"], "y", {"cubic": np.float32(0.0447)}),
    "another x in the gate": ("e = Exp(x) " + EXACT["PyTorch"].replace("Div(x", "Div(e"), "y", {}),
    "the gate is an output": (EXACT["PyTorch"], "y, gate", {}),
    "erf has another reader": (EXACT["PyTorch"] + " z = Exp(erf)", "y, z", {}),
    "a constant for each number": (EXACT["PyTorch"], "y", {"half": np.full(16, 0.5, np.float32)}),
    "a constant of more axes": (EXACT["PyTorch"], "y", {"half": np.full((1, 1, 1), 0.5, np.float32)}),
    "tanh of another argument": (APPROXIMATE["power"].replace("Add(term, x)", "Sub(term, x)"), "y", {}),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_is_no_gelu_stays(case: str) -> None:
    body, outputs, numbers = UNTOUCHED[case]
    assert_untouched(written(body, X, {**NUMBERS, **numbers}, outputs), recognize_gelu)


def test_float64_keeps_its_digits() -> None:
    numbers = {"outer": math.sqrt(2 / math.pi), "cubic": 0.044715, "half": 0.5, "one": 1.0, "three": 3.0}
    proto = written(APPROXIMATE["power"], X, {name: np.float64(n) for name, n in numbers.items()}, dtype="double")
    assert_untouched(proto, recognize_gelu)


def test_a_model_with_what_means_something_else_in_opset_20_stays() -> None:
    body = "grid = Add(x, one) " + EXACT["PyTorch"].replace("y =", "z =") + ' y = GridSample<mode="bilinear">(image, points)'
    weights = {"image": np.ones((1, 1, 4, 4), np.float32), "points": np.zeros((1, 2, 2, 2), np.float32), **NUMBERS}
    assert_untouched(written(body, X, weights, "y, z"), recognize_gelu)


@pytest.mark.parametrize("opset", [9, 13, 18])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_pytorch_exports(approximate: str, opset: int) -> None:
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    module = random_weights(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.GELU(approximate)))
    proto = exported(module, x, opset)
    assert_recognized(proto, recognize_gelu, x, ["Gemm", "Gelu"])
    assert_gradients(proto, module, x, {"0.weight": "0.weight", "0.bias": "0.bias"})
