"""Programs that train with every loss, step for step as PyTorch does, and data sets added up from batches of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish import losses
from burnish.errors import ConfigurationError, InputError
from burnish.graph import Tensor
from burnish.training.metric_totals import Means, Sums
from oracles.combinations import spread
from oracles.scaled_model import RATE, scaled_outputs
from specs.losses import LossCase, one_per_loss


def batch_of(case: LossCase) -> dict[str, np.ndarray]:
    return {f"in:{name}": array for name, array in case.predictions.items()} | dict(case.labels)


def trained_by_torch(case: LossCase, start: Mapping[str, np.ndarray], steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    weights = {name: torch.tensor(start[f"param/w:{name}"]).requires_grad_() for name in case.predictions}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = [torch.from_numpy(array) * weights[name] for name, array in case.predictions.items()]
        loss = case.torch(*outputs, *(torch.from_numpy(np.array(array)) for array in case.labels.values()))
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values, {f"param/w:{name}": weight.detach().numpy() for name, weight in weights.items()}


TRAINED = [case for case in one_per_loss() if next(iter(case.predictions.values())).ndim > 0]


@pytest.mark.slow
@spread("case", TRAINED, test_all=12, ids=str)
def test_two_steps_are_those_of_torch(case: LossCase, tmp_path: Any) -> None:
    program = burnish.compile(scaled_outputs(case.predictions), loss=case.loss, optimizer=burnish.optim.sgd(lr=RATE, momentum=0))
    assert {entry.name for entry in program.signature["step"].inputs_of(burnish.program.Role.LABEL)} == set(case.labels)
    program.save(tmp_path / "program")
    again = burnish.Program.load(tmp_path / "program")
    assert losses.get(again.options["loss"]) == case.loss
    session = burnish.Session(again, threads=1)
    values, weights = trained_by_torch(case, session.state(), 2)
    for value in values:
        np.testing.assert_allclose(session.step(batch_of(case))["loss"], value, rtol=1e-10)
    for name, weight in weights.items():
        np.testing.assert_allclose(session.state()[name], weight, rtol=1e-10)


@spread("case", TRAINED, test=13, ids=str)
def test_a_data_set_adds_up_from_batches_of_any_size(case: LossCase) -> None:
    session = burnish.Session(burnish.compile(scaled_outputs(case.predictions), loss=case.loss), threads=1)
    batch = batch_of(case)
    parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 1), slice(1, None))]
    whole = session.evaluate(batch)
    apart = session.evaluate_data(parts)
    assert apart.keys() == whole.keys()
    np.testing.assert_allclose([apart[name] for name in whole], list(whole.values()), rtol=1e-12)


SUMMED = [
    *(losses.get(f"{name}:reduction=sum") for name in ("mse", "mae", "huber", "smooth_l1", "bce_with_logits", "cross_entropy")),
    *(losses.get(f"{name}:reduction=sum") for name in ("focal", "binary_focal", "dice", "hinge", "nll", "multi_margin")),
]


@pytest.mark.slow
@spread("loss", SUMMED, test_all=4, ids=lambda loss: loss.name)
def test_a_sum_over_a_data_set_is_the_sum_over_its_batches(loss: losses.Loss, tmp_path: Any) -> None:
    case = next(case for case in TRAINED if case.loss.name == loss.name)
    batch = batch_of(case)
    still = burnish.compile(scaled_outputs(case.predictions), loss=loss, optimizer=burnish.optim.sgd(lr=0.0))
    session = burnish.Session(still, threads=1)
    expected = session.evaluate(batch)["loss"]
    samples = len(next(iter(batch.values())))
    for size in (1, 2, samples):
        parts = [{name: array[at : at + size] for name, array in batch.items()} for at in range(0, samples, size)]
        assert session.evaluate_data(parts)["loss"] == pytest.approx(expected, rel=1e-9)
        data: dict[str, Any] = {"run_directory": tmp_path / str(size), "batch_size": size, "threads": 1, "progress": False}
        alone = burnish.Trainer(still, dict(batch), **data).run()
        assert alone.metrics["loss"] == pytest.approx(expected, rel=1e-6)
        assert math.fsum(row["loss"] or 0.0 for row in alone.history) == pytest.approx(expected, rel=1e-6)
        judged = burnish.Trainer(still, dict(batch), dict(batch), **data, overwrite=True).run()
        assert judged.metrics["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_sum_beside_means_and_penalties() -> None:
    """A weighted sum of a mean, a sum over samples, and a sum that no sample has a part in."""
    case = next(case for case in TRAINED if case.loss.name == "mean_squared_error")
    batch = batch_of(case)
    mixed = losses.weighted_sum([(1.0, "mse"), (0.5, losses.get("mae:reduction=sum"))])
    program = burnish.compile(scaled_outputs(case.predictions), loss=mixed, optimizer=burnish.optim.sgd(lr=0.0))
    session = burnish.Session(program, threads=1)
    whole = session.evaluate(batch)
    parts = [{key: array[part] for key, array in batch.items()} for part in (slice(0, 1), slice(1, None))]
    apart = session.evaluate_data(parts)
    np.testing.assert_allclose([apart[key] for key in whole], list(whole.values()), rtol=1e-12)
    means, sums = Means(), Sums.of(program)
    for part in parts:
        means.add(session.evaluate(part), len(next(iter(part.values()))), sums)
    assert sums.averages(means)["loss"] == pytest.approx(whole["loss"], rel=1e-9)


def test_a_sum_that_no_sample_has_a_part_in_counts_once() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 3] y, float[] penalty)
            <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) penalty = ReduceSumSquare <keepdims = 0> (w) }"""
    )
    loss = losses.weighted_sum([(1.0, "mse:reduction=sum", "y"), (0.5, losses.output("penalty", reduction="sum"))])
    session = burnish.Session(burnish.compile(model, loss=loss), threads=1)
    zeros = {"x": np.zeros((2, 2), np.float32), "targets:y": np.ones((2, 3), np.float32)}
    assert session.evaluate_data([zeros] * 3)["loss"] == pytest.approx(18 + 0.5 * 91)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "operator"), [("bce_with_logits", "Sigmoid"), ("binary_focal", "Sigmoid"), ("focal", "Softmax"), ("dice", "Softmax")]
)
def test_a_final_activation_that_the_loss_applies_is_stepped_over(loss: str, operator: str) -> None:
    case = next(case for case in TRAINED if case.loss.name == loss)

    def squash(x: Tensor) -> Tensor:
        return x.builder.op(operator, x, axis=1) if operator == "Softmax" else x.builder.op(operator, x)

    plain = burnish.Session(burnish.compile(scaled_outputs(case.predictions), loss=loss), threads=1)
    squashed = burnish.Session(burnish.compile(scaled_outputs(case.predictions, squash), loss=loss), threads=1)
    assert squashed.step(batch_of(case)) == plain.step(batch_of(case))


def test_targets_out_of_range_are_refused() -> None:
    case = next(case for case in TRAINED if case.loss.name == "bce_with_logits")
    session = burnish.Session(burnish.compile(scaled_outputs(case.predictions), loss="bce_with_logits"))
    batch = batch_of(case)
    batch["targets"] = batch["targets"] * 255
    with pytest.raises(InputError, match=r"The input 'targets' holds .*, out of range: valid are 0\.\.1\. Give the loss what"):
        session.step(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "triplet"},
            "the model has the outputs 'a', 'b': say which 3 the loss triplet reads, in order, with",
        ),
        ({"loss": "mse"}, "the model has the outputs 'a', 'b': say which one the loss reads with the option outputs"),
        ({"loss": "triplet", "outputs": ["a", "b"]}, r"outputs: the loss triplet reads 3 outputs, in order: .* not \['a', 'b'\]"),
        ({"loss": "triplet", "outputs": ["a", "b", "c"]}, "outputs: the model has no output 'c'; it has 'a', 'b'"),
        (
            {"loss": losses.cosine_embedding(outputs=["a", "c"])},
            "loss cosine_embedding: the model has no output 'c'; it has 'a', 'b'",
        ),
        (
            {"loss": losses.cosine_embedding(outputs=["a", "b"]), "outputs": "a"},
            "outputs: the loss cosine_embedding says itself which outputs it reads; leave outputs out",
        ),
        (
            {"loss": "triplet", "outputs": ["a", "b", "b"], "metrics": ["accuracy"]},
            "metrics: the loss triplet compares nothing that 'accuracy' could read: leave metrics out",
        ),
    ],
    ids=str,
)
def test_readings_that_do_not_fit_the_model_are_named(options: dict[str, Any], message: str) -> None:
    samples = {name: np.zeros((2, 3)) for name in "ab"}
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(scaled_outputs(samples), **options)


@pytest.mark.slow
def test_the_order_of_outputs_is_that_of_the_readings() -> None:
    rng = np.random.default_rng(0)
    samples = {name: rng.standard_normal((4, 3)) for name in "abc"}
    batch = {f"in:{name}": array for name, array in samples.items()}
    model = scaled_outputs(samples)
    orders = {"default": None, "same": ["a", "b", "c"], "other": ["c", "b", "a"]}
    values = {
        name: burnish.Session(burnish.compile(model, loss="triplet", outputs=order)).step(batch)["loss"]
        for name, order in orders.items()
    }
    assert values["default"] == values["same"]
    assert values["other"] != values["same"]
