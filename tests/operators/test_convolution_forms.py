"""The forms of a convolution's gradients: each alone beside PyTorch, and which one is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from burnish.graph import Builder
from burnish.operators import Operation
from burnish.operators.convolution import weight_forms
from burnish.operators.convolution_forms import BATCHES, NANOSECONDS, SERIAL, Convolution, Form, choose, forced_forms, nanoseconds
from burnish.operators.convolution_input_forms import INPUT_FORMS, REVERSED_CONVOLUTION, TRANSPOSED_CONVOLUTION
from burnish.operators.convolution_weight_forms import DEPTHWISE_WEIGHT_FORMS, POINTWISE_WEIGHT_FORMS, WEIGHT_FORMS
from oracles.convolutions import check_against_torch, convolutions, gradient_model
from oracles.gradient_harness import Evaluator
from specs.convolution import torch_convolution

BY_NAME = {form.name: form for form in (*INPUT_FORMS, *POINTWISE_WEIGHT_FORMS, *WEIGHT_FORMS, *DEPTHWISE_WEIGHT_FORMS)}
FORMS = list(BY_NAME)
Drawn = tuple[list[int], list[int], dict[str, Any]]


def fitted_to(form: Form, drawn: Drawn) -> Drawn:
    """A drawn convolution turned into one that a form may be chosen for."""
    x_shape, w_shape, attributes = drawn
    if form in POINTWISE_WEIGHT_FORMS:
        group = 1 if form.name == "product over images" else attributes["group"]
        return x_shape, [w_shape[0], x_shape[1] // group, *[1] * (len(x_shape) - 2)], {
            "strides": attributes["strides"],
            "group": group,
        }  # fmt: skip
    if form in DEPTHWISE_WEIGHT_FORMS:
        outputs = x_shape[1] if form.name == "product per tap" else 2 * x_shape[1]
        return x_shape, [outputs, 1, *w_shape[2:]], attributes | {"group": x_shape[1]}
    if form is REVERSED_CONVOLUTION:
        return x_shape, w_shape, attributes | {"strides": [1] * len(attributes["strides"])}
    return drawn


def semantic_convolution(drawn: Drawn, form: Form, batch: int | str) -> Convolution:
    """The convolution behind the gradient that a form computes."""
    x_shape, w_shape, attributes = drawn
    model = gradient_model("Conv", [batch, *x_shape[1:]], np.zeros(w_shape, np.float32), attributes, lowered=False)
    wanted = "ConvInputGrad" if form in INPUT_FORMS else "ConvWeightGrad"
    (node,) = (node for node in model.graph if node.op_type == wanted)
    op = Operation(node, Builder(model.graph))
    first, second, third = (op.required(index) for index in range(3))
    return Convolution(op, first, *((third, second) if form in INPUT_FORMS else (second, third)))


def check_form(name: str, drawn: Drawn, batch_is_static: bool) -> None:
    form = BY_NAME[name]
    x_shape, w_shape, attributes = drawn = fitted_to(form, drawn)
    batch = x_shape[0] if batch_is_static else "batch"
    convolution = semantic_convolution(drawn, form, batch)
    assume(form.applies(convolution))
    assume(form in POINTWISE_WEIGHT_FORMS or form in INPUT_FORMS or not convolution.is_pointwise)
    assume(form not in DEPTHWISE_WEIGHT_FORMS or convolution.is_depthwise)
    with forced_forms(name):
        assert choose([form], convolution) is form
        check_against_torch("Conv", x_shape, w_shape, attributes, known=[batch, *x_shape[1:]])
    assert all(amount >= 0 for amount in form.work(convolution, 3).values())
    assert form.nanoseconds(convolution, 3) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_drawn_convolutions_in_every_form(name: str) -> None:
    settled = settings(
        max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
    )
    settled(given(convolutions("Conv"), st.booleans())(lambda drawn, static: check_form(name, drawn, static)))()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_many_drawn_convolutions_in_every_form(name: str) -> None:
    settled = settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    settled(given(convolutions("Conv"), st.booleans())(lambda drawn, static: check_form(name, drawn, static)))()


EXAMPLES: dict[str, Drawn] = {
    "pointwise": ([2, 6, 4, 3], [4, 6, 1, 1], {"strides": [2, 1]}),
    "depthwise": ([2, 4, 7, 6], [4, 1, 3, 3], {"group": 4, "pads": [1, 0, 1, 2], "strides": [2, 1], "dilations": [1, 2]}),
    "groups": ([2, 4, 7, 6], [6, 2, 3, 2], {"group": 2, "pads": [1, 0, 1, 1]}),
    # The reference evaluator's ConvTranspose fails with groups of several channels.
    "dense": ([2, 4, 7, 6], [6, 4, 3, 2], {"pads": [1, 0, 1, 1]}),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_in_float64(name: str) -> None:
    """On the standard's reference evaluator, to rounding of float64: nothing goes through float32."""
    form, rng = BY_NAME[name], np.random.default_rng(4)
    families = {
        "pointwise": POINTWISE_WEIGHT_FORMS,
        "depthwise": DEPTHWISE_WEIGHT_FORMS,
        "groups": WEIGHT_FORMS,
        "dense": INPUT_FORMS,
    }
    (kind,) = (name for name, forms in families.items() if form in forms)
    x_shape, w_shape, attributes = EXAMPLES[kind]
    assert form.applies(semantic_convolution(EXAMPLES[kind], form, "batch"))
    x, w = rng.standard_normal(x_shape), rng.standard_normal(w_shape)
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, w)]
    y = torch_convolution(*leaves, **attributes)
    dy = rng.standard_normal(tuple(y.shape))
    expected = torch.autograd.grad(y, leaves, torch.from_numpy(dy))
    with forced_forms(name):
        model = gradient_model("Conv", ["batch", *x_shape[1:]], w, attributes, dtype=ir.DataType.DOUBLE)
    evaluate = Evaluator(model)
    assert not evaluate.on_onnxruntime
    results = evaluate({"x": x, "dy": dy})
    for wanted, gradient in zip(("x", "w"), expected, strict=True):
        np.testing.assert_allclose(results[f"grad:{wanted}"], gradient.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [[9], [3, 3], [9, 9], [2, 3, 4]])
def test_weight_is_reversed_in_the_same_way_however_many_taps_it_has(kernel: list[int]) -> None:
    """By a product up to 64 taps, by slices beyond: both are exact."""
    sizes = [size + 1 for size in kernel]
    with forced_forms("reversed convolution"):
        check_against_torch("Conv", [1, 2, *sizes], [4, 1, *kernel], {"group": 2})
        model = check_against_torch("Conv", [1, 2, *sizes], [3, 2, *kernel], {})
    assert ("Slice" in {node.op_type for node in model.graph}) == (np.prod(kernel) > 64)


SAME, HALVED, WIDE = {"pads": [1] * 4}, {"pads": [1] * 4, "strides": [2, 2]}, {"pads": [2] * 4}
BY_INPUT = {
    "large_weight_for_one_image": ([1, 512, 7, 7], [512, 512, 3, 3], SAME, "transposed convolution"),
    "large_weight_for_many_images": ([64, 512, 7, 7], [512, 512, 3, 3], SAME, "reversed convolution"),
    "large_plane": (["batch", 64, 56, 56], [64, 64, 3, 3], SAME, "reversed convolution"),
    "stride": (["batch", 64, 56, 56], [64, 64, 3, 3], HALVED, "transposed convolution"),
    "pointwise": (["batch", 64, 56, 56], [256, 64, 1, 1], {}, "reversed convolution"),
    "depthwise": (["batch", 240, 28, 28], [240, 1, 5, 5], WIDE | {"group": 240}, "reversed convolution"),
    "sizes_not_known": (["batch", 512, "height", 7], [512, 512, 3, 3], SAME, "reversed convolution"),
}
BY_WEIGHT = {
    "dense": (["batch", 512, 7, 7], [512, 512, 3, 3], SAME, "correlation"),
    "pointwise_on_a_large_plane": (["batch", 64, 56, 56], [256, 64, 1, 1], {}, "product per image"),
    "pointwise_on_a_small_plane": (["batch", 512, 7, 7], [2048, 512, 1, 1], {}, "product over images"),
    "depthwise_on_a_large_plane": (["batch", 32, 112, 112], [32, 1, 3, 3], SAME | {"group": 32}, "product per tap"),
    "depthwise_with_a_stride": (["batch", 96, 112, 112], [96, 1, 3, 3], HALVED | {"group": 96}, "unfolded product"),
    "depthwise_on_a_small_plane": (["batch", 960, 7, 7], [960, 1, 3, 3], SAME | {"group": 960}, "joined row products"),
    "depthwise_on_a_plane_between": (["batch", 240, 28, 28], [240, 1, 5, 5], WIDE | {"group": 240}, "row products"),
    "sizes_not_known": (["batch", 32, "height", 7], [32, 1, 3, 3], SAME | {"group": 32}, "correlation"),
}


@pytest.mark.parametrize("name", list(BY_INPUT))
def test_form_of_the_input_gradient_follows_the_shape_and_the_batch(name: str) -> None:
    *drawn, expected = BY_INPUT[name]
    assert choose(INPUT_FORMS, semantic_convolution(tuple(drawn), TRANSPOSED_CONVOLUTION, drawn[0][0])).name == expected


@pytest.mark.parametrize("name", list(BY_WEIGHT))
def test_form_of_the_weight_gradient_follows_the_shape(name: str) -> None:
    *drawn, expected = BY_WEIGHT[name]
    convolution = semantic_convolution(tuple(drawn), WEIGHT_FORMS[0], drawn[0][0])
    assert choose(weight_forms(convolution), convolution).name == expected


def test_a_symbolic_batch_gets_the_form_with_the_least_geometric_mean() -> None:
    """One form is best for one image and the other for 64: what is taken for every batch lies between."""
    drawn: Drawn = ([1, 512, 7, 7], [512, 512, 3, 3], {"pads": [1] * 4})
    choices = {
        batch: choose(INPUT_FORMS, semantic_convolution(drawn, TRANSPOSED_CONVOLUTION, batch)) for batch in (1, 64, "batch")
    }
    assert choices[1] is not choices[64]
    convolution = semantic_convolution(drawn, TRANSPOSED_CONVOLUTION, "batch")
    means = {form: np.prod([form.nanoseconds(convolution, batch) for batch in BATCHES]) for form in INPUT_FORMS}
    assert means[choices["batch"]] == min(means.values())


def test_work_on_one_thread_weighs_more_beside_work_on_several() -> None:
    times = NANOSECONDS["transposed convolution"]
    assert "scattered groups" in SERIAL
    assert nanoseconds("transposed convolution", {"scattered groups": 10.0}, threads=4) == 10 * times["scattered groups"]
    assert nanoseconds("transposed convolution", {"products": 10.0}, threads=4) == pytest.approx(2.5 * times["products"])
