"""Gradients beside central differences: right ones agree, a wrong rule is found and its node named, kinks are told apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest

import burnish
from burnish.comparison import Projection, check_gradients, compare_engines
from burnish.comparison.differences import Differences
from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.models import residual_network
from burnish.operators import Operation
from oracles.operator_records import change_record

HEADER = '<ir_version: 10, opset_import: ["": 21]>'
NETWORK = """g (float[N, 3] x) => (float[N, 2] y)
<float[3, 4] first = {0.3, -0.2, 0.5, 0.1, 0.9, -0.7, 0.4, 0.2, -0.5, -0.8, 0.6, 0.3}, float[4] bias = {0, 0, 0, 0},
 float[4, 2] head = {0.5, -0.4, 0.3, 0.8, -0.6, 0.7, 0.2, 0.1}> {
    p = MatMul (x, first)
    b = Add (p, bias)
    t = Tanh (b)
    y = MatMul (t, head)
}"""


def compiled(text: str, **options: object) -> burnish.Program:
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    for node in model.graph.node:
        node.name = f"the_{node.op_type.lower()}"
    return burnish.compile(model, **{"loss": Projection(), **options})


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., object]], None]:
    """Put a wrong rule in the place of an operator's."""

    def replace(operator: str, rule: Callable[..., object]) -> None:
        change_record(monkeypatch, operator, gradient=rule)

    return replace


def test_right_gradients_agree() -> None:
    check = check_gradients(compiled(NETWORK))
    assert check.agrees
    assert [(tensor.name, tensor.shape, tensor.probes) for tensor in check.tensors] == [
        ("param/first", (3, 4), 4),
        ("param/bias", (4,), 4),
        ("param/head", (4, 2), 4),
    ]
    assert all(0 < tensor.error < 1e-7 for tensor in check.tensors)
    assert check.message().startswith("all gradients agree with central differences: the worst error is ")


@pytest.mark.slow
def test_normalization_in_training_and_convolutions() -> None:
    check = check_gradients(burnish.compile(residual_network(), loss=Projection()), probes=2)
    assert check.agrees
    assert len(check.tensors) == 29
    assert max(tensor.error for tensor in check.tensors) > 0


def test_the_loss_of_a_program_will_do() -> None:
    assert check_gradients(compiled(NETWORK, loss="cross_entropy")).agrees


@pytest.mark.parametrize("factor", [1.001, -1.0, 0.0])
def test_a_wrong_rule_is_named(broken, factor: float) -> None:
    def wrong(op: Operation, dy: Tensor) -> Tensor:
        return dy * (1 - op.output * op.output) * factor

    broken("Tanh", wrong)
    check = check_gradients(compiled(NETWORK))
    assert [tensor.name for tensor in check.tensors if not tensor.agrees] == ["param/first", "param/bias"]
    assert check.faults == ["Tanh 'the_tanh' (output 't')"]
    assert check.message() == (
        "the gradient of 'param/first', 'param/bias' differs from central differences: at fault is the gradient of Tanh "
        "'the_tanh' (output 't')"
    )


def test_a_rule_that_forgets_one_element_is_found_by_the_direction_through_all(broken) -> None:
    def wrong(op: Operation, dy: Tensor) -> Tensor:
        builder = op.builder
        mask = np.ones((1, 4))
        mask[0, 2] = 0
        return dy * (1 - op.output * op.output) * builder.cast(builder.constant(mask), dy.dtype)

    broken("Tanh", wrong)
    check = check_gradients(compiled(NETWORK), probes=1)
    assert not check.agrees
    assert check.faults == ["Tanh 'the_tanh' (output 't')"]


def test_a_wrong_rule_of_two_is_named_by_itself(broken) -> None:
    """The gradients of those before it are wrong too, and not by their own fault."""

    def wrong(op: Operation, dy: Tensor) -> Tensor:
        return dy

    broken("Exp", wrong)
    text = NETWORK.replace("t = Tanh (b)", "s = Cos (b)\n e = Exp (s)\n t = Atan (e)")
    check = check_gradients(compiled(text))
    assert check.faults == ["Exp 'the_exp' (output 'e')"]


def test_a_rounding_that_gradients_pass_is_no_difference() -> None:
    text = NETWORK.replace("t = Tanh (b)", "q = QuantizeLinear (b, step, zero)\n t = DequantizeLinear (q, step, zero)")
    text = text.replace("float[4] bias", "float step = {0.05}, uint8 zero = {128}, float[4] bias")
    assert check_gradients(compiled(text)).agrees


@pytest.mark.parametrize(
    ("probes", "rtol", "match"), [(0, 1e-6, "^probes=0: give one"), (1, 0.0, "^rtol=0.0: give a number above")]
)
def test_what_cannot_be_checked(probes: int, rtol: float, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        check_gradients(compiled(NETWORK), probes=probes, rtol=rtol)


def judged(function: Callable[[np.ndarray], float], x: list[float], gradient: list[float], probes: int = 4):
    differences = Differences(lambda arrays: float(function(arrays["x"])), {"x": np.array(x)})
    return differences.judge("x", np.array(gradient), probes)


def test_a_kink_is_no_difference_and_is_counted() -> None:
    check = judged(lambda x: np.sum(np.maximum(x, 0)), [0.0, 1.0], [0.0, 1.0])
    assert (check.agrees, check.probes, check.kinks) == (True, 1, 1)
    assert not judged(lambda x: np.sum(np.maximum(x, 0)), [0.0, 1.0], [0.0, 0.5]).agrees


def test_a_kink_close_by_is_stepped_over() -> None:
    check = judged(lambda x: np.sum(np.abs(x)), [3e-6, 1.0], [1.0, 1.0])
    assert (check.agrees, check.probes, check.kinks) == (True, 2, 0)


def test_a_gradient_of_rounding_alone_agrees() -> None:
    """The function does not depend on x but for what it rounds."""
    check = judged(lambda x: np.sum((x + 1e3) - 1e3 - x), [0.3, 0.7, -0.2], [0.0, 0.0, 0.0])
    assert check.agrees


def test_a_function_that_is_curved() -> None:
    x = [0.3, -2.0, 1.5]
    assert judged(lambda x: np.sum(np.exp(3 * x)), x, [float(3 * np.exp(3 * item)) for item in x]).agrees
    assert not judged(lambda x: np.sum(np.exp(3 * x)), x, [float(3.0001 * np.exp(3 * item)) for item in x]).agrees


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization"])
def test_normalization_of_a_network_in_float32_after_weights(operator: str) -> None:
    """Its statistics are float32 where the file says nothing else, and float64 where all is compared in that."""
    of_rows = operator.startswith(("Layer", "RMS"))
    axes, product, weight = ("", "MatMul", "4, 4") if of_rows else (", 5", "Conv", "4, 4, 1")
    operands = "h, scale" if operator.startswith("RMS") else "h, scale, bias"
    attributes = "<num_groups = 2>" if operator.startswith("Group") else ""
    numbers = ", ".join(f"{number:.3f}" for number in np.random.default_rng(0).normal(size=16))
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 23]>
g (float[n, 4{axes}] x) => (float[n, 4{axes}] y)
<float[{weight}] w = {{{numbers}}}, float[4] scale = {{1, 2, 3, -1}}, float[4] bias = {{0, 1, 2, 3}}> {{
  h = {product} (x, w) y = {operator} {attributes} ({operands}) }}""")
    program = burnish.compile(model, loss="mse")
    assert check_gradients(program).agrees
    for options in ({"against_float64": True}, {"own_state": True}):
        found = compare_engines(program, ["onnxruntime", "reference"], steps=1, **options)
        assert found.agrees, found.message()
