"""Models with the standard's training operators, lowered and run on stock ONNX Runtime."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import burnish
from burnish.backend import BurnishBackend
from burnish.errors import ConfigurationError, EngineError, GradientError, InputError, ModelError, UnsupportedOperatorError
from burnish.operators import registry

TRAINING = "ai.onnx.preview.training"


def parsed(text):
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18, "{TRAINING}" : 1]>\n{text}')


def run(model, *inputs, **options):
    return BurnishBackend.prepare(model, **options).run([np.asarray(item) for item in inputs])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.slow
def test_gradient_of_gradient():
    model = parsed(f"""
        agraph (double[n] x, double[n] w) => (double[n] first, double[n] second_w, double[n] second_x) {{
            s = Sin (w)
            p = Mul (x, s)
            cube = Mul (p, p)
            y = Mul (cube, p)
            unused, first = {TRAINING}.Gradient <xs = ["x", "w"], y = "y"> (x, w)
            second_w, second_x = {TRAINING}.Gradient <xs = ["w", "x"], y = "first"> (w, x)
        }}""")
    x, w = normal(5, seed=1), normal(5, seed=2)
    first, second_w, second_x = run(model, x, w)
    s, c = np.sin(w), np.cos(w)
    np.testing.assert_allclose(first, 3 * x**3 * s**2 * c, rtol=1e-12)
    np.testing.assert_allclose(second_w, 3 * x**3 * (2 * s * c**2 - s**3), rtol=1e-12)
    np.testing.assert_allclose(second_x, 9 * x**2 * s**2 * c, rtol=1e-12)


def test_second_derivative_through_convolution_and_loss():
    model = parsed(f"""
        agraph (float[2,3,5,5] x, float[4,3,3,3] w, int64[2] labels) => (float penalized, float[4,3,3,3] result) {{
            h = Conv (x, w)
            a = Tanh (h)
            m = ReduceMean <keepdims = 0> (a, axes)
            loss = SoftmaxCrossEntropyLoss (m, labels)
            d_x = {TRAINING}.Gradient <xs = ["x"], zs = ["w", "labels"], y = "loss"> (x, w, labels)
            squared = ReduceSumSquare <keepdims = 0> (d_x)
            penalized = Add (loss, squared)
            result = {TRAINING}.Gradient <xs = ["w"], y = "penalized"> (w)
        }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3], np.int64), "axes"))
    x, w, labels = normal(2, 3, 5, 5, seed=3), normal(4, 3, 3, 3, seed=4), np.array([1, 3])
    penalized, result = run(model, x.astype("f"), w.astype("f"), labels)
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.tanh(torch.conv2d(tx, tw)).mean((2, 3)), torch.tensor(labels))
    (d_x,) = torch.autograd.grad(loss, tx, create_graph=True)
    expected = loss + d_x.square().sum()
    expected.backward()
    np.testing.assert_allclose(penalized, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(result, tw.grad, rtol=1e-4, atol=1e-5 * float(tw.grad.abs().max()))


def test_gradient_at_values_of_its_own():
    model = parsed(f"""
        agraph (double[n] h, double[n] z, double[n] other_h, double[n] other_z)
        => (double[n] y, double[n] d_h, double[n] d_z) {{
            e = Exp (h)
            y = Mul (e, z)
            d_h, d_z = {TRAINING}.Gradient <xs = ["h", "z"], y = "y"> (other_h, other_z)
        }}""")
    h, z, other_h, other_z = (normal(4, seed=seed) for seed in range(4))
    y, d_h, d_z = run(model, h, z, other_h, other_z)
    np.testing.assert_allclose(y, np.exp(h) * z)
    np.testing.assert_allclose(d_h, np.exp(other_h) * other_z)
    np.testing.assert_allclose(d_z, np.exp(other_h))


def test_intermediate_values_and_constants_in_zs_count_as_independent():
    """y = h x with h = x²: 3 x² in all, h where h is held."""
    model = parsed(f"""
        agraph (double[n] x) => (double[n] whole, double[n] held, double[n] d_x, double[n] d_h) {{
            h = Mul (x, x)
            y = Mul (h, x)
            whole = {TRAINING}.Gradient <xs = ["x"], y = "y"> (x)
            held = {TRAINING}.Gradient <xs = ["x"], zs = ["h"], y = "y"> (x, h)
            d_x, d_h = {TRAINING}.Gradient <xs = ["x", "h"], y = "y"> (x, h)
        }}""")
    x = normal(6)
    whole, held, d_x, d_h = run(model, x)
    np.testing.assert_allclose(whole, 3 * x**2)
    np.testing.assert_allclose(held, x**2)
    np.testing.assert_allclose(d_x, x**2)
    np.testing.assert_allclose(d_h, x)


def test_gradient_with_respect_to_initializers_what_does_not_matter_and_outputs_left_out():
    model = parsed(f"""
        agraph (float[2,3] x) => (float[2] y, float[3] d_w, float[3] d_unread)
        <float[3] w = {{1, 2, 3}}, float[3] unread = {{1, 1, 1}}> {{
            y = MatMul (x, w)
            , d_w, d_unread = {TRAINING}.Gradient <xs = ["x", "w", "unread"], y = "y"> (x, w, unread)
        }}""")
    x = normal(2, 3).astype(np.float32)
    y, d_w, d_unread = run(model, x)
    np.testing.assert_allclose(y, x @ [1, 2, 3], rtol=1e-5)
    np.testing.assert_allclose(d_w, x.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(d_unread, np.zeros(3, np.float32))


def test_a_gradient_may_stand_in_front_of_what_it_differentiates():
    model = parsed(f"""
        agraph (float[3] x) => (float[3] d_x, float[3] y) {{
            d_x = {TRAINING}.Gradient <xs = ["x"], y = "y"> (x)
            y = Mul (x, x)
        }}""")
    d_x, y = run(model, np.array([1, 2, 3], np.float32))
    np.testing.assert_array_equal(d_x, [2, 4, 6])
    np.testing.assert_array_equal(y, [1, 4, 9])


def test_gradient_through_training_mode_layers():
    """Batch normalization of the batch's statistics, and dropout whose gradient has the mask of the forward pass."""
    model = parsed(f"""
        agraph (double[8,3] x) => (double[8,3] n, double[8,3] d_x, double[8,3] y, bool[8,3] mask)
        <double[3] scale = {{1, 2, 3}}, double[3] bias = {{0, 1, 0}}, double[3] mean = {{0, 0, 0}}, double[3] var = {{1, 1, 1}},
         double ratio = {{0.25}}, bool training = {{1}}> {{
            n, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, var)
            y, mask = Dropout (n, ratio, training)
            square = Mul (y, y)
            d_x = {TRAINING}.Gradient <xs = ["x"], y = "square"> (x)
        }}""")
    x = normal(8, 3)
    n, d_x, y, mask = run(model, x)
    tx = torch.tensor(x, requires_grad=True)
    expected = torch.nn.functional.batch_norm(
        tx, None, None, torch.tensor([1.0, 2, 3]).double(), torch.tensor([0.0, 1, 0]).double(), True
    )
    dropped = expected * torch.tensor(mask) / 0.75
    dropped.square().sum().backward()
    assert not mask.all()
    assert mask.any()
    np.testing.assert_allclose(n, expected.detach(), rtol=1e-9)
    np.testing.assert_allclose(y, dropped.detach(), rtol=1e-9)
    np.testing.assert_allclose(d_x, tx.grad, rtol=1e-8, atol=1e-10)


def dropout_model(seed=""):
    return parsed(f"""
        agraph (float[n] x, float ratio, bool training) => (float[n] y, bool[n] mask, float[n] z) {{
            y, mask = Dropout {seed} (x, ratio, training)
            z = Dropout (x, ratio, training)
        }}""")


@pytest.mark.slow
def test_dropout_modes_and_ratios_are_read_when_the_model_runs():
    model, x = dropout_model(), np.ones(4096, np.float32)
    y, mask, z = run(model, x, np.float32(0.25), True)
    np.testing.assert_allclose(y, mask / 0.75, rtol=1e-6)
    assert abs(mask.mean() - 0.75) < 0.03
    assert not np.array_equal(y, z), "every node has a stream of its own"
    y, mask, _ = run(model, x, np.float32(0.25), False)
    np.testing.assert_array_equal(y, x)
    assert mask.all()
    y, mask, _ = run(model, x, np.float32(1.0), True)
    assert not y.any()
    assert not mask.any()


@pytest.mark.slow
def test_masks_follow_the_seed_of_the_node_or_else_of_the_call():
    x = np.ones(256, np.float32)

    def masks(model, seed):
        return run(model, x, np.float32(0.5), True, seed=seed)[1:]

    first, other, again = (masks(dropout_model(), seed) for seed in (0, 1, 0))
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])
    first, other = (masks(dropout_model("<seed = 7>"), seed) for seed in (0, 1))
    np.testing.assert_array_equal(first[0], other[0])
    assert not np.array_equal(first[1], other[1])


OPTIMIZERS = {
    "Adam": (2, "norm_coefficient = 0.1, norm_coefficient_post = 0.01, alpha = 0.8, beta = 0.95, epsilon = 0.001"),
    "Adam defaults": (2, ""),
    "Adagrad": (1, "norm_coefficient = 0.1, decay_factor = 0.3, epsilon = 0.001"),
    "Adagrad defaults": (1, ""),
    "Momentum": (1, 'norm_coefficient = 0.1, alpha = 0.8, beta = 0.6, mode = "standard"'),
    "Momentum nesterov": (1, 'norm_coefficient = 0.1, alpha = 0.8, beta = 0.6, mode = "nesterov"'),
}


def adam_by_hand(inputs, norm_coefficient=0.0, norm_coefficient_post=0.0, alpha=0.9, beta=0.999, epsilon=1e-6):
    """The formulas of the operator's specification in float64; the standard's own evaluator returns float32."""
    attributes = (norm_coefficient, norm_coefficient_post, alpha, beta, epsilon)
    norm_coefficient, post, alpha, beta, epsilon = (float(np.float32(attribute)) for attribute in attributes)
    rate, count = inputs["r"], inputs["t"]
    if count > 0:
        rate = rate * np.sqrt(1 - beta**count) / (1 - alpha**count)
    results = []
    for i in "12":
        x, g, v, h = (inputs[f"{kind}{i}"] for kind in "xgvh")
        g = norm_coefficient * x + g
        v, h = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g * g
        results.append(((1 - post) * (x - rate * v / (np.sqrt(h) + epsilon)), v, h))
    return [tensors[kind] for kind in range(3) for tensors in results]


@pytest.mark.parametrize("count", [0, 1, 12])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_match_their_specification(name, count):
    """Two tensors of different rank, in float64; Adagrad and Momentum against the evaluator that comes with the standard."""
    slots, attributes = OPTIMIZERS[name]
    kinds = "xg" + "vh"[:slots]
    shapes = {"1": "[2,3]", "2": ""}
    declared = ", ".join(f"double{shapes[i]} {kind}{i}" for kind in kinds for i in "12")
    results = [f"{kind}{i}" for kind in kinds.replace("g", "") for i in "12"]
    outputs = ", ".join(f"double{shapes[result[1]]} next_{result}" for result in results)
    model = parsed(f"""
        agraph (double r, int64 t, {declared}) => ({outputs}) {{
            {", ".join(f"next_{result}" for result in results)} = {TRAINING}.{name.split()[0]}
                {f"<{attributes}>" if attributes else ""} (r, t, {", ".join(f"{kind}{i}" for kind in kinds for i in "12")})
        }}""")
    inputs = {"r": np.array(0.3), "t": np.array(count)}
    for position, (kind, i) in enumerate((kind, i) for kind in kinds for i in "12"):
        array = np.asarray(normal(*((2, 3) if i == "1" else ()), seed=position))
        inputs[f"{kind}{i}"] = np.abs(array) if kind == "h" or (name.startswith("Adagrad") and kind == "v") else array
    if name.startswith("Adam"):
        expected = adam_by_hand(inputs, **dict(re.findall(r"(\w+) = ([\d.]+)", attributes)))
    else:
        expected = ReferenceEvaluator(model).run(None, inputs)
    for actual, wanted in zip(run(model, *inputs.values()), expected, strict=True):
        assert actual.shape == np.shape(wanted)
        np.testing.assert_allclose(actual, wanted, rtol=1e-12)


def test_a_rate_of_one_element_keeps_the_rank_of_a_scalar_parameter():
    model = parsed(f"""
        agraph (float[1] r, int64[1] t, float x, float g, float h) => (float next_x, float next_h) {{
            next_x, next_h = {TRAINING}.Adagrad (r, t, x, g, h)
        }}""")
    next_x, next_h = run(model, np.float32([0.5]), np.array([0]), np.float32(1), np.float32(2), np.float32(0))
    assert next_x.shape == next_h.shape == ()
    np.testing.assert_allclose(next_x, 1 - 0.5 * 2 / (2 + 1e-6), rtol=1e-6)


def test_a_training_step_as_the_standard_describes_it():
    """Loss, Gradient and Momentum in one graph: what exporters of training graphs write."""
    model = parsed(f"""
        agraph (float[n,3] x, int64[n] labels, int64 t, float[3,4] w, float[3,4] v)
        => (float loss, float[3,4] next_w, float[3,4] next_v) <float r = {{0.1}}> {{
            scores = MatMul (x, w)
            loss = SoftmaxCrossEntropyLoss (scores, labels)
            d_w = {TRAINING}.Gradient <xs = ["w"], zs = ["x", "labels"], y = "loss"> (w, x, labels)
            next_w, next_v = {TRAINING}.Momentum
                <alpha = 0.9, beta = 1.0, norm_coefficient = 0.0, mode = "standard"> (r, t, w, d_w, v)
        }}""")
    rng = np.random.default_rng(5)
    x, labels, w = rng.normal(size=(6, 3)).astype("f"), rng.integers(0, 4, 6), rng.normal(size=(3, 4)).astype("f")
    weight = torch.tensor(w, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    prepared, v = BurnishBackend.prepare(model), np.zeros_like(w)
    for t in range(5):
        loss, w, v = prepared.run([x, labels, np.array(t), w, v])
        optimizer.zero_grad()
        expected = torch.nn.functional.cross_entropy(torch.tensor(x) @ weight, torch.tensor(labels))
        expected.backward()
        optimizer.step()
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(w, weight.detach(), rtol=1e-5)


def test_only_standard_operators_remain_and_loading_twice_changes_nothing():
    model = parsed(f"""
        agraph (float[3] x) => (float[3] d_x) {{
            y = Mul (x, x)
            d_x = {TRAINING}.Gradient <xs = ["x"], y = "y"> (x)
        }}""")
    lowered = burnish.lower(burnish.load(burnish.load(model)))
    assert set(lowered.opset_imports) == {""}
    assert {node.domain for node in lowered.graph} == {""}
    np.testing.assert_array_equal(run(burnish.load(model), np.float32([1, 2, 3]))[0], [2, 4, 6])


GRADIENT = f"{TRAINING}.Gradient"


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (f'd = {GRADIENT} <xs = ["q"], y = "y"> (x)', ModelError, "differentiates 'q', a value that the model's graph does not"),
        (f'd = {GRADIENT} <xs = ["x"], y = "q"> (x)', ModelError, "differentiates 'q'"),
        (f'd = {GRADIENT} <xs = ["x"], zs = ["k"], y = "y"> (x)', ModelError, "has 1 inputs, and names 2 values in xs and zs"),
        (f'd, e = {GRADIENT} <xs = ["x"], y = "y"> (x)', ModelError, "has 2 outputs, and names 1 values in xs"),
        (f'd = {GRADIENT} <xs = ["k"], y = "y"> (k)', GradientError, "'k' is INT64, and only floating-point values"),
        (f'd = {GRADIENT} <xs = ["x"], y = "h"> (x)\nh = Add (d, x)', ModelError, "depends on that gradient"),
        (f'h = DFT (x)\nd = {GRADIENT} <xs = ["x"], y = "h"> (x)', GradientError, "has no gradient rule"),
        (f"d = {TRAINING}.Adagrad (x, k, x)", ModelError, "has 1 inputs behind R and T, and takes 3 for each tensor"),
        (
            f'd, e = {TRAINING}.Momentum <alpha = 1.0, beta = 1.0, norm_coefficient = 0.0, mode = "fast"> (s, k, x, x, x)',
            ModelError,
            "has the mode 'fast', and the standard knows 'standard' and 'nesterov'",
        ),
    ],
)
def test_errors_name_the_node(body, error, message, monkeypatch):
    monkeypatch.delitem(registry.records(), ("", "DFT"))
    model = parsed(
        f"agraph (float[1,4,1] x, int64 k) => (float[1,4,1] y, float[1,4,1] d) <float s = {{1}}> {{ y = Mul (x, x)\n {body} }}"
    )
    with pytest.raises(error, match=message):
        burnish.lower(model)


def test_a_gradient_in_a_branch_is_refused():
    model = parsed(f"""
        agraph (float[3] x, bool c) => (float[3] r) {{
            y = Mul (x, x)
            r = If (c) <
                then_branch = g1 () => (float[3] t) {{ t = {GRADIENT} <xs = ["x"], y = "y"> (x) }},
                else_branch = g2 () => (float[3] e) {{ e = Identity (x) }}
            >
        }}""")
    with pytest.raises((UnsupportedOperatorError, ModelError), match="Gradient"):
        burnish.lower(model)


def test_options_are_checked():
    model = dropout_model()
    with pytest.raises(ConfigurationError, match="target: unknown 'abacus'; choose among 'onnxruntime'"):
        burnish.lower(model, target="abacus")
    with pytest.raises(ConfigurationError, match="seed must be an integer"):
        burnish.lower(model, seed=0.5)


def test_backend_runs_single_operators_and_takes_inputs_by_name():
    node = onnx.helper.make_node("Adagrad", ["r", "t", "x", "g", "h"], ["nx", "nh"], domain=TRAINING)
    one = np.ones(2, np.float32)
    next_x, next_h = BurnishBackend.run_node(node, [np.float32(0.5), np.int64(0), one, one, one])
    np.testing.assert_allclose(next_h, [2, 2])
    np.testing.assert_allclose(next_x, 1 - 0.5 / (np.sqrt(2) + 1e-6) * one, rtol=1e-6)
    prepared = BurnishBackend.prepare(parsed("agraph (float[2] a, float[2] b) => (float[2] c) { c = Sub (a, b) }"))
    np.testing.assert_array_equal(prepared.run({"b": one, "a": 3 * one})[0], [2, 2])
    with pytest.raises(InputError, match="the model has the inputs 'a', 'b', and 'a' were given"):
        prepared.run({"a": one})
    with pytest.raises(InputError, match=r"has 2 inputs \('a', 'b'\), and 1 were given"):
        prepared.run([one])
    with pytest.raises(EngineError, match="failed in the model graph: Unexpected input data type"):
        prepared.run([one, np.ones(2)])
    with pytest.raises(InputError, match="the node has 5 inputs, and 1 were given"):
        BurnishBackend.run_node(node, [one])
    assert not BurnishBackend.supports_device("CUDA:0")
    with pytest.raises(EngineError, match="'CPU' only, not on 'CUDA'"):
        BurnishBackend.prepare(dropout_model(), "CUDA")


def test_models_with_a_gradient_inside_train_once_they_are_lowered():
    """A network whose output is a derivative of its own: y = d/dx tanh(x w)."""
    model = parsed(f"""
        agraph (float[n,3] x) => (float[n,3] y) {{
            h = MatMul (x, w)
            a = Tanh (h)
            y = {GRADIENT} <xs = ["x"], zs = ["w"], y = "a"> (x, w)
        }}""")
    w = normal(3, 2).astype("f")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    for function, call in (
        ("burnish.compile", lambda: burnish.compile(model, loss="mse")),
        ("burnish.grad", lambda: burnish.grad(model, "w")),
    ):
        with pytest.raises(UnsupportedOperatorError, match=rf"{function} does not take as it is. Give burnish\.lower\(model\)"):
            call()
    x = normal(4, 3, seed=1).astype("f")
    gradient = burnish.grad(burnish.lower(model), "w")
    cotangent = normal(4, 3, seed=2).astype("f")
    _, d_w = run(gradient, x, cotangent)
    tw, tx = torch.tensor(w, requires_grad=True), torch.tensor(x, requires_grad=True)
    (y,) = torch.autograd.grad(torch.tanh(tx @ tw).sum(), tx, create_graph=True)
    (y * torch.tensor(cotangent)).sum().backward()
    np.testing.assert_allclose(d_w, tw.grad, rtol=1e-4, atol=1e-5)
    session = burnish.Session(burnish.compile(burnish.lower(model), loss="mse", optimizer="adam"), threads=1)
    losses = [session.step({"x": x, "targets": cotangent})["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
