"""Softmax, LogSoftmax and Sigmoid in pieces: the operators that stand for them, the same outputs, and what is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from burnish.rewriting.recognize_probabilities import recognize_probabilities
from oracles.recognition import assert_recognized, assert_untouched, written

X = np.random.default_rng(3).normal(scale=2.0, size=(4, 5, 3)).astype(np.float32)
WEIGHTS = {
    "axis": np.array([1], np.int64),
    "first": np.array([0], np.int64),
    "last": np.array([2], np.int64),
    "kept": np.array([-1, 1, 3], np.int64),
    "whole": np.array([1, 5, 3], np.int64),
    "ones": np.ones((1, 1, 1, 1), np.float32),
    "minus": np.array([-1], np.float32),
}
SHIFT = "m = ReduceMax<keepdims = 0>(x, axis) "
SUM = "e = Exp(z) s = ReduceSum<keepdims = 0>(e, axis) "
SHORT = "e = Exp(x) s = ReduceSum<keepdims = 1>(e, axis) "

SOFTMAX = {
    "JAX": SHIFT + "mk = Reshape(m, kept) mx = Expand(mk, whole) z = Sub(x, mx) " + SUM
    + "sk = Reshape(s, kept) sx = Expand(sk, whole) y = Div(e, sx)",
    "kept axes": "m = ReduceMax<keepdims = 1>(x, axis) z = Sub(x, m) " + SHORT.replace("(x)", "(z)") + "y = Div(e, s)",
    "given back by Unsqueeze": SHIFT + "mk = Unsqueeze(m, axis) z = Sub(x, mk) " + SUM + "sk = Unsqueeze(s, axis) y = Div(e, sk)",
    "without the largest": SHORT + "y = Div(e, s)",
    "by the inverse": SHORT + "r = Reciprocal(s) y = Mul(r, e)",
    "the exponential of a logarithm": "l = LogSoftmax<axis = 1>(x) y = Exp(l)",
    "two exponentials": "f = Exp(x) " + SHORT + "y = Div(f, s)",
}  # fmt: skip
LOG_SOFTMAX = {
    "kept axes": "m = ReduceMax<keepdims = 1>(x, axis) z = Sub(x, m) e = Exp(z) s = ReduceSum(e, axis) l = Log(s) y = Sub(z, l)",
    "JAX": SHIFT + "mk = Reshape(m, kept) z = Sub(x, mk) " + SUM + "sk = Reshape(s, kept) l = Log(sk) y = Sub(z, l)",
}
SIGMOID = {
    "one over": "n = Neg(x) e = Exp(n) d = Add(e, one) y = Div(one, d)",
    "by minus one": "n = Mul(x, minus) e = Exp(n) d = Add(e, one) y = Div(one, d)",
    "reciprocal": "n = Neg(x) e = Exp(n) d = Add(one, e) y = Reciprocal(d)",
    "tanh": "h = Mul(x, half) t = Tanh(h) d = Add(t, one) y = Mul(d, half)",
    "tanh, halved first": "h = Div(x, two) t = Tanh(h) g = Mul(half, t) y = Add(half, g)",
}
OTHERS = {
    "a sum over two axes": "e = Exp(x) s = ReduceSum<keepdims = 1>(e, last_two) y = Div(e, s)",
    "a sum of something else": "e = Exp(x) n = Neg(x) f = Exp(n) s = ReduceSum<keepdims = 1>(f, axis) y = Div(e, s)",
    "a logarithm of another sum": "e = Exp(x) s = ReduceSum<keepdims = 1>(e, axis) y = Sub(x, s)",
    "one more axis": "n = Neg(x) e = Exp(n) d = Add(e, ones) y = Div(one, d)",
    "two in place of one": "n = Neg(x) e = Exp(n) d = Add(e, two) y = Div(one, d)",
    "not halved": "t = Tanh(x) d = Add(t, one) y = Mul(d, half)",
}


@pytest.mark.parametrize("form", SOFTMAX)
def test_softmax(form: str) -> None:
    (softmax,) = assert_recognized(written(SOFTMAX[form], X, WEIGHTS), recognize_probabilities, X, ["Softmax"]).graph
    assert softmax.attributes["axis"].as_int() == 1


@pytest.mark.parametrize("form", LOG_SOFTMAX)
def test_log_softmax(form: str) -> None:
    assert_recognized(written(LOG_SOFTMAX[form], X, WEIGHTS), recognize_probabilities, X, ["LogSoftmax"])


@pytest.mark.parametrize("form", SIGMOID)
def test_sigmoid(form: str) -> None:
    assert_recognized(written(SIGMOID[form], X, WEIGHTS), recognize_probabilities, X, ["Sigmoid"])


@pytest.mark.parametrize("form", ["y = Div(one, d)", "y = Reciprocal(d)"])
def test_sigmoid_of_the_negative(form: str) -> None:
    """The exponential overflows where the gradient of its pieces would be NaN."""
    source = written(f"e = Exp(x) d = Add(e, one) {form}", X, WEIGHTS)
    assert_recognized(source, recognize_probabilities, X, ["Neg", "Sigmoid"])


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_something_else_stays(form: str) -> None:
    assert_untouched(written(OTHERS[form], X, WEIGHTS), recognize_probabilities)


def test_lines_of_a_square_that_are_divided_by_each_others_sums_stay() -> None:
    square = X[:3, :3, 0]
    weights = {"axis": np.array([1], np.int64), "row": np.array([1, -1], np.int64)}
    body = "e = Exp(x) s = ReduceSum<keepdims = 0>(e, axis) sk = Reshape(s, row) y = Div(e, sk)"
    assert_untouched(written(body, square, weights), recognize_probabilities)


def test_a_shift_along_another_axis_stays() -> None:
    """The largest of each column, subtracted before a softmax over rows, is no constant of a row."""
    body = "m = ReduceMax<keepdims = 1>(x, last) z = Sub(x, m) e = Exp(z) s = ReduceSum<keepdims = 1>(e, axis) y = Div(e, s)"
    assert_recognized(written(body, X, WEIGHTS), recognize_probabilities, X, ["ReduceMax", "Sub", "Softmax"])


def test_pieces_that_something_else_reads_stay() -> None:
    assert_untouched(written(SHORT + "y = Div(e, s)", X, WEIGHTS, outputs="y, s"), recognize_probabilities)
