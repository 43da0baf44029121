"""Accumulated micro-batches of different sizes come to what one batch of them all comes to, whatever its loss is divided by."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish import losses, optim
from burnish.errors import ObjectiveWarning
from burnish.program import Role
from oracles.combinations import diagonal
from oracles.several_workers import largest_difference, train_alone, train_in_threads

CLASSES, IGNORED = 5, -100
LOSSES: dict[str, Any] = {
    "classes": losses.cross_entropy(class_axis=-1),
    "weighed classes": losses.cross_entropy(class_axis=-1, weight=[0.5, 2.0, 1.0, 0.25, 3.0]),
    "classes twice": losses.weighted_sum(
        [(1.0, losses.cross_entropy(class_axis=-1)), (0.5, losses.cross_entropy(class_axis=-1))]
    ),
}
SIZES = [(3, 4, 1), (2, 6, 11), (4, 2, 0), (1, 4, 3)]
"""Of each micro-batch: its texts, their tokens, and how many tokens are labelled."""


@cache
def model() -> ir.Model:
    """Logits [texts, tokens, classes] of tokens, in float64."""
    rng = np.random.default_rng(0)
    values = {"table": rng.standard_normal((9, 3)), "head": rng.standard_normal((3, CLASSES))}
    nodes = [
        onnx.helper.make_node("Gather", ["table", "x"], ["rows"]),
        onnx.helper.make_node("Tanh", ["rows"], ["bounded"]),
        onnx.helper.make_node("MatMul", ["bounded", "head"], ["logits"]),
    ]
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["texts", "tokens"])]
    outputs = [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.DOUBLE, ["texts", "tokens", CLASSES])]
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = onnx.helper.make_graph(nodes, "tagger", inputs, outputs, weights)
    return burnish.load(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10))


def compiled(optimizer: optim.Optimizer, name: str = "classes", **options: Any) -> burnish.Program:
    return burnish.compile(model(), loss=LOSSES[name], optimizer=optimizer, metrics=[], **options)


def micro_batches(labels: str = "labels") -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    batches = []
    for texts, tokens, labelled in SIZES:
        chosen = np.full(texts * tokens, IGNORED)
        chosen[rng.permutation(texts * tokens)[:labelled]] = rng.integers(0, CLASSES, labelled)
        batches.append({"x": rng.integers(0, 9, (texts, tokens)), labels: chosen.reshape(texts, tokens)})
    return batches


def together(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One batch of them all, each text padded with tokens that have no label."""
    length = max(batch["x"].shape[1] for batch in batches)

    def padded(array: np.ndarray, value: int) -> np.ndarray:
        return np.pad(array, [(0, 0), (0, length - array.shape[1])], constant_values=value)

    return {
        "x": np.concatenate([padded(batch["x"], 0) for batch in batches]),
        "labels": np.concatenate([padded(batch["labels"], IGNORED) for batch in batches]),
    }


def assert_same_parameters(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for name in ("param/table", "param/head"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


def trained(program: burnish.Program, batches: list[dict[str, np.ndarray]], engine: str = "reference") -> dict[str, np.ndarray]:
    session = burnish.Session(program, engine=engine)
    for batch in batches:
        session.step(batch)
    return session.state()


@pytest.mark.slow
@diagonal(("engine", ["reference", "onnxruntime", "torch"]), ("name", LOSSES))
def test_micro_batches_weigh_what_their_losses_are_divided_by(name: str, engine: str) -> None:
    batches, inside = micro_batches(), optim.adam(lr=0.1, eps=1e-3)
    accumulated = trained(compiled(optim.accumulate(inside, len(batches)), name), batches, engine)
    assert_same_parameters(accumulated, trained(compiled(inside, name), [together(batches)], engine))
    assert accumulated["opt/accumulated_weight"] == 0  # the next update begins anew


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [lambda inside: optim.ema(inside, 0.5), lambda inside: optim.chain(optim.clip_by_value(9.0), inside)]
)
def test_what_goes_around_an_accumulation_hands_the_weight_on(wrap: Any) -> None:
    batches, inside = micro_batches(), optim.sgd(lr=0.5)
    accumulated = trained(compiled(wrap(optim.accumulate(inside, len(batches)))), batches)
    assert_same_parameters(accumulated, trained(compiled(inside), [together(batches)]))


def test_where_nothing_was_labelled_nothing_changes() -> None:
    batch = micro_batches()[2]
    program = compiled(optim.accumulate(optim.sgd(lr=0.5), 2))
    assert_same_parameters(trained(program, [batch, batch]), program.initial_state())


@pytest.mark.slow
def test_a_penalty_is_the_same_in_each() -> None:
    batches, inside = micro_batches(), optim.chain(optim.add_decayed_weights(0.1), optim.sgd(lr=0.5))
    accumulated = trained(compiled(optim.accumulate(inside, len(batches))), batches)
    assert_same_parameters(accumulated, trained(compiled(inside), [together(batches)]))


def test_a_step_is_the_gradients_and_then_their_update() -> None:
    program = compiled(optim.accumulate(optim.sgd(lr=0.5), 2))
    state, reference = program.initial_state(), burnish.engines.get("reference")
    batch = micro_batches()[1]
    whole = trained(program, [batch])
    given = reference.load(program.grad)({**batch, **{name: state[name] for name in ("param/table", "param/head", "rng/key")}})
    names = [entry.name for entry in program.signature["apply"].inputs]
    assert "loss_weight" in names
    assert given["loss_weight"] == 11
    known = state | given | {"lr": np.float32(0.5)}
    following = reference.load(program.apply)({name: known[name] for name in names})
    np.testing.assert_array_equal(following["next:opt/accumulated_weight"], whole["opt/accumulated_weight"])
    np.testing.assert_array_equal(following["next:opt/accumulated_gradient/head"], whole["opt/accumulated_gradient/head"])


@pytest.mark.slow
def test_several_workers_come_to_what_one_does() -> None:
    program = compiled(optim.accumulate(optim.sgd(lr=0.5), 2))
    batches = micro_batches()
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, [[1, 2], [2, 0], [0, 4], [1, 0]]):
        assert largest_difference(outcome, alone) < 1e-12


def test_terms_that_are_divided_by_other_numbers_weigh_alike_with_a_warning() -> None:
    with pytest.warns(
        ObjectiveWarning, match="accumulate: micro-batches weigh alike.* its terms are divided by numbers that do not"
    ):
        two_losses(optim.accumulate(optim.sgd(), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = two_losses(optim.sgd())
    assert not program.signature["grad"].outputs_of(Role.WEIGHT)
    with pytest.warns(ObjectiveWarning, match="accumulate: micro-batches weigh alike"):
        program.with_optimizer(optim.accumulate(optim.sgd(), 2))


def two_losses(optimizer: optim.Optimizer) -> burnish.Program:
    """A mean over the tokens that count, and a sum over them."""
    mean, total = losses.cross_entropy(class_axis=-1), losses.cross_entropy(class_axis=-1, reduction="sum")
    return burnish.compile(model(), loss=losses.weighted_sum([(1.0, mean), (0.1, total)]), optimizer=optimizer, metrics=[])


def test_a_sum_weighs_alike_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = losses.cross_entropy(class_axis=-1, reduction="sum")
        program = burnish.compile(model(), loss=loss, optimizer=optim.accumulate(optim.sgd(), 2), metrics=[])
    assert not program.signature["grad"].outputs_of(Role.WEIGHT)
