"""Weights that were not trained, the rate that trains them, and a run that ends where it began: what is said, and what helps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

import burnish
from burnish import losses, models
from burnish.cli.application import app
from burnish.data import ArrayDataset, DataSpec
from burnish.errors import NothingLearnedWarning
from burnish.finetuning.chance import chance_of
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import plan
from burnish.finetuning.preparation import transfer
from burnish.finetuning.rates import find_rate, repeated
from burnish.finetuning.untrained_weights import are_random

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
"""Of three classes: a sum of two signs."""


def perceptron(classes: int = 3) -> onnx.ModelProto:
    return models.create("mlp", classes=classes, input_shape=(4,))


def tuned(model: Any, data: Any, path: Any, **options: Any) -> tuple[burnish.Finetuned, list[NothingLearnedWarning]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = burnish.finetune(model, data, output=path / "tuned.onnx", threads=1, **options)
    return result, [warning.message for warning in caught if isinstance(warning.message, NothingLearnedWarning)]


def weights_of(model: ir.Model) -> list[str]:
    return [name for name in model.graph.initializers if not name.startswith("classifier")]


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (20,)), ("cnn", (3, 16, 16)), ("resnet", (1, 8, 8)), ("lstm", (6, 8)), ("transformer", (16,))]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_weights_that_a_model_is_created_with_look_random(name, shape, seed):
    model = ir.from_proto(models.create(name, classes=4, input_shape=shape, seed=seed))
    count, is_random = are_random(model, weights_of(model))
    assert is_random is True
    assert count > 0


def test_weights_after_some_epochs_do_not_and_small_ones_do_not_tell():
    program = burnish.compile(perceptron(), loss="cross_entropy", optimizer=burnish.optim.adam(lr=3e-3))
    with burnish.Session(program, threads=1) as session:
        for _ in range(60):
            session.step({"x": X, "labels": LABELS})
        state = session.state()
    model = ir.from_proto(perceptron())
    for name, value in model.graph.initializers.items():
        value.const_value = ir.tensor(state[f"param/{name}"], name=name)
    assert are_random(model, weights_of(model)) == (1, False)
    assert are_random(model, ["layers.1.bias", "classifier.weight"]) == (0, None)


def test_a_factor_for_each_channel_and_a_common_direction_are_told_apart():
    """Of folded normalization channels have lengths of their own, which is no sign of training; a mean that all share is one."""
    drawn = np.random.default_rng(0).normal(size=(64, 48))

    def model_of(array: np.ndarray) -> ir.Model:
        proto = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 18]> g (float[N, 48] x) => (float[N, 64] y) { y = Gemm <transB = 1> (x, w) }'
        )
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(array), "w"))
        return ir.from_proto(proto)

    lengths = np.random.default_rng(1).uniform(0.8, 1.2, (64, 1))
    assert are_random(model_of(drawn * lengths), ["w"]) == (1, True)
    assert are_random(model_of(drawn + 0.3), ["w"]) == (1, False)


def test_random_weights_are_said_and_learn_at_one_rate(tmp_path):
    result, said = tuned(perceptron(), (X, LABELS), tmp_path)
    assert said == []
    assert result.result.metrics["accuracy"] > 0.9
    (weights,) = (note for note in result.notes if note.startswith("weights:"))
    assert "look random in the one layer large enough to tell" in weights
    assert not any(note.startswith("rates: the new head") for note in result.notes)
    (rate,) = (note for note in result.notes if note.startswith("lr:"))
    assert "trial steps at one rate each the loss came from" in rate
    assert "diverged at" in rate


def test_a_plateau_that_range_tests_do_not_leave_is_left():
    """A network of convolutions without normalization, whose loss falls after some 40 steps alone."""
    digits = burnish.data.open_dataset("digits:train", DataSpec.by(burnish.compile(plain_digits(), loss="cross_entropy")))
    program = burnish.compile(plain_digits(), loss="cross_entropy", optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    lr, said = find_rate(program, repeated(digits, 32, 0), is_trained=False, threads=1)
    assert 0.03 < lr < 0.3
    assert "in 100 trial steps at one rate each" in said
    assert "in 40 trial steps" in find_rate(program, repeated(digits, 32, 0), steps=40, threads=1)[1]  # as many as the run has


def plain_digits() -> ir.Model:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 18]>
plain (float[batch, 1, 8, 8] x) => (float[batch, 10] logits) {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, k1, b1)
    b = Relu (a)
    c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
    d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, k2, b2)
    e = Relu (d)
    f = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e)
    g = Flatten <axis = 1> (f)
    h = Gemm <transB = 1> (g, w1, b3)
    i = Relu (h)
    logits = Gemm <transB = 1> (i, w2, b4)
}""")
    shapes = {"k1": (16, 1, 3, 3), "k2": (32, 16, 3, 3), "w1": (64, 128), "w2": (10, 64)}
    for (name, shape), bias in zip(shapes.items(), ("b1", "b2", "b3", "b4"), strict=True):
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        for key, extents in ((name, shape), (bias, shape[:1])):
            model.graph.initializer.append(numpy_helper.from_array(np.float32(rng.uniform(-bound, bound, extents)), key))
    return ir.from_proto(model)


def test_a_rate_that_is_too_low_is_said_and_the_remedy_helps(tmp_path):
    _, (said,) = tuned(perceptron(), (X, LABELS), tmp_path, lr=1e-6)
    assert str(said).startswith("Nothing was learned: the loss of the training data is 1.1")
    assert "chance comes to 1.0" in str(said)
    assert "Try this next: leave out lr=1e-06 (--lr)" in str(said)
    assert said.loss is not None
    assert said.chance is not None
    assert said.loss > said.chance > 1.0
    assert tuned(perceptron(), (X, LABELS), tmp_path)[1] == []


def test_columns_on_other_scales_are_said_and_the_remedy_helps(tmp_path):
    columns = X * np.float32([1e-3, 1e-3, 1e3, 1e3])
    _, (said,) = tuned(perceptron(), (columns, LABELS), tmp_path)
    assert "Try this next: standardize the columns of 'x', whose standard deviations are 0.0" in str(said)
    standardized = (columns - columns.mean(0)) / columns.std(0)
    result, none = tuned(perceptron(), (standardized, LABELS), tmp_path)
    assert none == []
    assert result.result.metrics["accuracy"] > 0.9


@pytest.mark.slow
def test_frozen_layers_that_tell_nothing_are_said_and_the_remedy_helps(tmp_path):
    """A product of signs, of which four numbers behind six layers of random weights hold nothing."""
    x = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    labels = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    _, (said,) = tuned(ir.to_proto(models.mlp((2,), 2, width=4, layers=6)), (x, labels), tmp_path, freeze_until="head")
    assert "Try this next: let all layers train: leave out freeze_until='head' (--freeze-until)" in str(said)
    result, none = tuned(ir.to_proto(models.mlp((2,), 2, width=32)), (x, labels), tmp_path, epochs=10)
    assert none == []
    assert result.result.metrics["accuracy"] > 0.9


def deep(layers: int = 6) -> onnx.ModelProto:
    """Convolutions with PyTorch's initial weights and no normalization: what goes in is hardly told apart at the end."""
    rng = np.random.default_rng(0)
    nodes, value, channels = [], "x", 1
    initializers = []
    for layer in range(layers):
        bound = 1 / math.sqrt(channels * 9)
        initializers.append(numpy_helper.from_array(np.float32(rng.uniform(-bound, bound, (8, channels, 3, 3))), f"k{layer}"))
        initializers.append(numpy_helper.from_array(np.float32(rng.uniform(-bound, bound, 8)), f"b{layer}"))
        nodes.append(onnx.helper.make_node("Conv", [value, f"k{layer}", f"b{layer}"], [f"c{layer}"], pads=[1] * 4))
        nodes.append(onnx.helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        value, channels = f"r{layer}", 8
    nodes.append(onnx.helper.make_node("GlobalAveragePool", [value], ["p"]))
    nodes.append(onnx.helper.make_node("Flatten", ["p"], ["f"]))
    nodes.append(onnx.helper.make_node("Gemm", ["f", "w"], ["y"], transB=1))
    initializers.append(numpy_helper.from_array(np.float32(rng.uniform(-0.35, 0.35, (10, 8))), "w"))
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 1, 8, 8])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 10])
    graph = onnx.helper.make_graph(nodes, "deep", [x], [y], initializers)
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 18)])


@pytest.mark.slow
def test_convolutions_without_normalization_are_said_and_the_remedy_helps(tmp_path):
    _, (said,) = tuned(deep(), "digits:train", tmp_path, epochs=2)
    assert "Try this next: train with batch normalization after each convolution: folded_norm='insert'" in str(said)
    result, none = tuned(deep(), "digits:train", tmp_path, epochs=2, folded_norm="insert")
    assert none == []
    assert result.result.metrics["accuracy"] > 0.6
    assert any("with scale 1 and bias 0, as the weights are random" in note for note in result.notes)


def test_labels_that_mean_something_else_in_the_evaluation_data_are_said(tmp_path):
    result, (said,) = tuned(perceptron(), (X, LABELS), tmp_path, eval_data=(X, (LABELS + 1) % 3))
    assert str(said).startswith("Nothing was learned that holds for the evaluation data")
    assert "see that the labels of both have the same classes in the same order" in str(said)
    assert said.loss == pytest.approx(min(row["eval_loss"] for row in result.result.history if row["eval_loss"]), rel=0.5)


def test_the_file_s_own_head_that_is_no_better_than_chance_is_said(tmp_path):
    result, said = tuned(perceptron(), (X, LABELS), tmp_path, head="keep")
    assert said == []
    (start,) = (note for note in result.notes if note.startswith("start:"))
    assert "so the file knows nothing of these labels" in start
    (tmp_path / "again").mkdir()
    again, _ = tuned(tmp_path / "tuned.onnx", (X, LABELS), tmp_path / "again", head="keep")
    assert not any(note.startswith("start:") for note in again.notes)


def test_the_command_warns_too(tmp_path):
    onnx.save(perceptron(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=X, labels=LABELS)
    arguments = [
        "finetune",
        str(tmp_path / "model.onnx"),
        "--data",
        str(tmp_path / "data.npz"),
        "--output",
        str(tmp_path / "run"),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = CliRunner().invoke(app, [*arguments, "--lr", "1e-6", "--threads", "1"])
        assert done.exit_code == 0, done.output
        resumed = CliRunner().invoke(app, [*arguments, "--resume", "--threads", "1"])
        assert resumed.exit_code == 0, resumed.output
    said = [str(warning.message) for warning in caught if issubclass(warning.category, NothingLearnedWarning)]
    assert len(said) == 2  # what was chosen is in the folder, and the run that goes on says the same
    assert said[0] == said[1]
    assert "leave out lr=1e-06 (--lr)" in said[0]


Arrays = Mapping[str, np.ndarray]


def chance_for(loss: Any, program_of: Callable[[], Any], labels: np.ndarray, name: str) -> Any:
    program = burnish.compile(program_of(), loss=loss)
    return chance_of(losses.get(loss), ArrayDataset({"x": X[: len(labels)], name: labels}), DataSpec.by(program))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_chance_of_classes_is_the_least_loss_of_one_answer(smoothing):
    labels = np.array([0] * 120 + [1] * 60 + [2] * 20)
    chance = chance_for(losses.cross_entropy(label_smoothing=smoothing), perceptron, labels, "labels")
    shares = np.array([0.6, 0.3, 0.1])

    def loss_of(answer: np.ndarray) -> float:
        target = (1 - smoothing) * np.eye(3)[labels] + smoothing / 3
        return float(-(target * np.log(answer)).sum(1).mean())

    rng = np.random.default_rng(0)
    others = [loss_of(rng.dirichlet(np.ones(3))) for _ in range(200)]
    assert chance.loss <= min(others) + 1e-9
    assert chance.loss == pytest.approx(loss_of((1 - smoothing) * shares + smoothing / 3))
    assert (chance.share, chance.samples) == (0.6, 200)


@pytest.mark.parametrize(("loss", "least"), [("mse", lambda y: y.var()), ("l1", lambda y: np.abs(y - np.median(y)).mean())])
def test_chance_of_values_is_their_spread(loss, least):
    targets = np.random.default_rng(0).gamma(2.0, size=(200, 3)).astype(np.float32)
    chance = chance_for(loss, perceptron, targets, "targets")
    assert chance.loss == pytest.approx(np.mean([least(column) for column in targets.T]), rel=1e-5)
    assert chance.share is None
    assert chance.is_reached({"loss": chance.loss})
    assert not chance.is_reached({"loss": 0.9 * chance.loss})


def test_a_loss_above_chance_whose_answers_are_right_is_none_of_its_kind():
    """As of a network that is too sure of itself."""
    chance = chance_for("cross_entropy", perceptron, LABELS, "labels")
    assert chance.is_reached({"eval_loss": 3.0, "eval_accuracy": chance.share}, "eval_")
    assert not chance.is_reached({"eval_loss": 3.0, "eval_accuracy": 0.8}, "eval_")
    assert chance.is_reached({"accuracy": 0.8}) is None


def test_values_that_are_not_learned_are_said_too(tmp_path):
    targets = 5000 + 100 * X[:, :1] + 50 * X[:, 1:2]
    model = models.create("mlp", classes=1, input_shape=(4,))
    _, (said,) = tuned(model, (X, 9000 - targets), tmp_path, lr=1e-7)
    assert "(that of always giving the same value)" in str(said)
    assert "Try this next: " in str(said)
    assert said.chance == pytest.approx(1.0, rel=1e-4)  # in units of the targets' standard deviation, as the loss is
    result, none = tuned(model, (X, targets), tmp_path)
    assert none == []
    assert result.result.metrics["r2"] > 0.9


def test_random_weights_with_an_embedding_table_get_adamw():
    model = models.create("transformer", classes=2, input_shape=(8,), vocabulary=20)
    tokens = np.random.default_rng(0).integers(4, 20, (48, 8))
    labels = np.arange(48) % 2
    tokens[:, 1] = labels
    data = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": labels}
    prepared, dataset = transfer(model, data)
    assert (prepared.uses_adamw, prepared.is_trained) == (True, False)
    planned = plan(prepared, dataset, FinetuneOptions(epochs=3, threads=1))
    assert "optimizer: AdamW, as SGD hardly trains an embedding table from random weights" in planned.notes
    assert 1e-5 <= planned.lr <= 1e-2
    assert not transfer(models.create("mlp", classes=2, input_shape=(3,)), (np.zeros((8, 3), np.float32), labels[:8]))[
        0
    ].uses_adamw
