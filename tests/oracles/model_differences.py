"""Any model as a function in float64, and whether gradients of it agree with differences, at points without a derivative too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from burnish import engines
from oracles.gradient_harness import Erf

Feeds = Mapping[str, Any]
Function = Callable[[Feeds], dict[str, Any]]

TOLERANCE = 1e-6
"""Relative to the norm of a gradient, or to 1 where that is less."""
STEP = 2.0**-15
"""A power of two: beside values that float32 holds, a moved value is exact. Truncation is near 2e-10 of the third derivative."""
MOST_ELEMENTS = 24
"""Of a larger input so many elements are moved, drawn at random, and then all together along one direction."""


def in_float64(array: Any) -> Any:
    """An array of floating-point numbers, or a list of them, in float64; others as they are."""
    if isinstance(array, (list, tuple)):
        return [in_float64(part) for part in array]
    if array is None:
        return None
    array = np.asarray(array)
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else array


def quietly(function: Function, feeds: Feeds) -> dict[str, Any]:
    """Call a function that may overflow on purpose."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(feeds)


def evaluators(model: onnx.ModelProto) -> Iterator[Function]:
    """What can run a model: ONNX Runtime, the evaluator of the standard, the PyTorch engine."""
    names = [value.name for value in model.graph.output]
    inputs = {value.name for value in model.graph.input}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # no kernel for float64, or a newer opset; its errors share no base class
        pass
    else:
        yield lambda feeds: dict(zip(names, session.run(names, _only(feeds, inputs)), strict=True))
    try:
        evaluator = ReferenceEvaluator(model, new_ops=[Erf])
    except Exception:  # it lacks an operator
        pass
    else:
        yield lambda feeds: dict(zip(names, evaluator.run(names, _only(feeds, inputs)), strict=True))
    try:
        loaded = engines.get("torch").load(ir.from_proto(model))
    except Exception:  # an operator that it does not translate
        return
    yield lambda feeds: dict(loaded(_only(feeds, inputs)))


def run(model: onnx.ModelProto, feeds: Feeds) -> dict[str, Any]:
    """Run a model in float64 on whatever can.

    Raises:
        RuntimeError: nothing can; the message has what each said.
    """
    problems = []
    for function in evaluators(model):
        try:
            return quietly(function, feeds)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise RuntimeError("; ".join(problems) or "nothing runs the model")


def function_in_float64(
    model: onnx.ModelProto, feeds: Feeds, moved: Sequence[str], outputs: Sequence[str], expected: Feeds | None = None
) -> Function | None:
    """A function that computes outputs of a model in float64 with all digits, or None where nothing here does.

    Args:
        model: in float64.
        feeds: a value for each input.
        moved: the inputs that it will be asked to move.
        outputs: those that count.
        expected: what they are known to be, to two digits.
    """
    for function in evaluators(model):
        try:
            results = quietly(function, feeds)
            right = expected is None or all(_agrees(results[name], expected[name]) for name in outputs)
            right = right and _has_all_digits(function, feeds, moved, outputs)
        except Exception:  # whatever an evaluator's code raises
            continue
        if right:
            return function
    return None


def remembering(function: Function, feeds: Feeds) -> Function:
    """A function that computes once what it is asked beside ``feeds`` for one output after another, where inputs have moved."""
    results: dict[tuple[tuple[str, bytes], ...], dict[str, Any]] = {}

    def remembered(moved: Feeds) -> dict[str, Any]:
        key = tuple((name, array.tobytes()) for name, array in moved.items() if array is not feeds[name])
        if key not in results:
            results[key] = function(moved)
        return results[key]

    return remembered


def _only(feeds: Feeds, names: Iterable[str]) -> dict[str, Any]:
    return {name: feeds[name] for name in names if name in feeds}


def _agrees(actual: Any, expected: Any) -> bool:
    actual, expected = np.asarray(actual), np.asarray(in_float64(expected))
    close = actual.shape == expected.shape and np.allclose(actual, expected, 2e-2, 1e-2, equal_nan=True)
    return close and actual.dtype == np.float64


def _has_all_digits(function: Function, feeds: Feeds, moved: Sequence[str], outputs: Sequence[str]) -> bool:
    """Whether three values close together lie on a line: what is computed in float32 inside scatters around it."""
    rng = np.random.default_rng(3)
    directions = {name: rng.standard_normal(np.shape(feeds[name])) for name in moved}
    values = []
    for distance in (1e-6, 2e-6, 3e-6):
        results = quietly(function, {**feeds, **{name: np.asarray(feeds[name] + distance * directions[name]) for name in moved}})
        values.append([np.asarray(results[name]) for name in outputs])
    for first, second, third in zip(*values, strict=True):
        if not first.shape == second.shape == third.shape:
            return True
        with np.errstate(invalid="ignore"):
            bent = np.abs(first - 2 * second + third)
        bent = bent[np.isfinite(bent)]
        scale = np.abs(np.where(np.isfinite(second), second, 0)).max(initial=1.0)
        # At the edge of its domain a function may be bent as much, in single elements.
        if bent.size and np.mean(bent > 1e-10 * scale) > (0.5 if bent.size < 6 else 0.15):
            return False
    return True


@dataclass(frozen=True)
class Slopes:
    """Differences along one line.

    Attributes:
        central: the central difference.
        left: the least of those to the two sides, summed over the parts of the function.
        right: the greatest.
        error: how far the central difference may be off.
        smooth: whether there is a derivative.
    """

    central: float
    left: float
    right: float
    error: float
    smooth: bool


def slopes(function: Callable[[float], np.ndarray], middle: np.ndarray, scale: float) -> Slopes:
    """Differences at 0 of the sum of what a function returns, ``middle`` there, with two steps.

    A kink shows in the differences to the two sides: those of a smooth function draw together as the step shrinks. At a jump
    they grow. The error of the nearer central difference is less than its distance from the other.
    """
    step = STEP * 2.0 ** max(0, int(np.log2(max(scale, 1.0) / 1024)))
    far_left, far_right, size = _differences(function, middle, step)
    left, right, _ = _differences(function, middle, step / 8)
    with np.errstate(invalid="ignore"):
        far, near = float((far_left + far_right).sum() / 2), float((left + right).sum() / 2)
    if not np.isfinite([far, near]).all():
        return Slopes(np.nan, -np.inf, np.inf, np.inf, False)
    steepest = max(abs(float(far_left.sum())), abs(float(far_right.sum())))
    noise = 512 * np.finfo(np.float64).eps * size / step
    allowed = 1e-6 * max(steepest, 1e-3) + noise
    if max(abs(float(left.sum())), abs(float(right.sum()))) > 4 * steepest + allowed:
        return Slopes(near, -np.inf, np.inf, np.inf, False)
    apart, near_apart = abs(float((far_right - far_left).sum())), abs(float((right - left).sum()))
    smooth = abs(near - far) <= 1e-4 * max(abs(far), 1e-3) + allowed and (apart <= allowed or near_apart < apart / 3)
    least, greatest = float(np.minimum(left, right).sum()), float(np.maximum(left, right).sum())
    return Slopes(near, least, greatest, abs(near - far) + noise, smooth)


def _differences(
    function: Callable[[float], np.ndarray], middle: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray, float]:
    above, below = function(step), function(-step)
    with np.errstate(invalid="ignore"):
        left, right = (middle - below) / step, (above - middle) / step
    sizes = [abs(float(value.sum())) for value in (middle, above, below)]
    return left, right, max(sizes)


def gradient_problem(
    function: Function, feeds: Feeds, of: str, cotangent: np.ndarray, name: str, gradient: np.ndarray, rng: np.random.Generator
) -> str:
    """What is wrong with the gradient of sum(cotangent * ``of``) with respect to an input; nothing where it is right.

    Where there is no derivative (a kink, a tie), it has to lie between the differences to the two sides; at a jump it has to be
    finite. Elements that are not finite, or whose neighbors have no value, are left out.
    """
    point = np.asarray(feeds[name])
    if gradient.shape != point.shape:
        return f"shape {gradient.shape}, expected {point.shape}"

    def weighted(array: np.ndarray) -> np.ndarray:
        result = np.asarray(quietly(function, {**feeds, name: array})[of])
        # A value that decides a shape has a jump there.
        return (result * cotangent).reshape(-1) if result.shape == cotangent.shape else np.full(cotangent.size, np.inf)

    middle = weighted(point)

    def slopes_along(direction: np.ndarray, scale: float) -> Slopes:
        return slopes(lambda distance: weighted(np.asarray(point + distance * direction)), middle, scale)

    positions = list(np.ndindex(point.shape))
    if len(positions) > MOST_ELEMENTS:
        positions = [positions[index] for index in rng.choice(len(positions), MOST_ELEMENTS, replace=False)]
    allowed = TOLERANCE * max(float(np.linalg.norm(gradient[np.isfinite(gradient)])), 1.0)
    for position in positions:
        if np.isfinite(point[position]):
            direction = np.zeros_like(point)
            direction[position] = 1.0
            problem = _value_problem(float(gradient[position]), slopes_along(direction, abs(float(point[position]))), allowed)
            if problem:
                return f"{problem} at {position}"
    if point.size > MOST_ELEMENTS and np.isfinite(point).all() and np.isfinite(gradient).all():
        # Few digits, so that a moved value is exact; values near zero stay, where kinks are frequent.
        direction = np.where(np.abs(point) < 1e-3, 0.0, rng.standard_normal(point.shape)).astype(np.float16).astype(np.float64)
        slope = slopes_along(direction, 1.0)
        value = float((gradient * direction).sum())
        if slope.smooth and not abs(value - slope.central) <= 3 * allowed + slope.error:
            return f"{value:.9g} along a direction, differences {slope.central:.9g}"
    return ""


def _value_problem(value: float, slope: Slopes, allowed: float) -> str:
    if not np.isfinite(slope.central):
        return ""
    if not np.isfinite(value):
        return f"{value:.9g}, differences {slope.central:.9g}"
    if slope.smooth:
        return "" if abs(value - slope.central) <= allowed + slope.error else f"{value:.9g}, differences {slope.central:.9g}"
    margin = 1e-4 * max(1.0, abs(slope.left), abs(slope.right)) if np.isfinite(slope.left) else 0.0
    if slope.left - margin <= value <= slope.right + margin:
        return ""
    return f"{value:.9g}, at a kink between {slope.left:.9g} and {slope.right:.9g}"
