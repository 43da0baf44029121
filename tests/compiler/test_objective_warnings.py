"""Losses that would make something else of an output than was meant: what is said of it, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import burnish
from burnish import losses
from burnish.errors import ConfigurationError, InputError, ObjectiveWarning

ENDINGS = {
    "linear": "y = Identity(z)",
    "scaled": "s = Mul(z, two) y = Flatten(s)",
    "Softmax": "y = Softmax(z)",
    "Sigmoid": "y = Sigmoid(z)",
    "LogSoftmax": "y = LogSoftmax(z)",
    "Softmax and Log": "p = Softmax(z) y = Log(p)",
    "Tanh": "y = Tanh(z)",
    "Tanh, then flat": "t = Tanh(z) y = Flatten(t)",
    "Softsign": "y = Softsign(z)",
    "Clip": "y = Clip(z, least, most)",
    "scaled Tanh": "t = Tanh(z) y = Mul(t, two)",
    "wide Clip": "y = Clip(z, lowest, highest)",
    "LogSoftmax written out": "m = ReduceLogSumExp(z, one) y = Sub(z, m)",
}


BOUNDS = {"least": -1, "most": 1, "lowest": -50, "highest": 50}


def dense(ending: str, columns: int = 3, x: str = "N, 5", y: str = "N, c") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[{x}] x) => (float[{y}] y) '
        f"{{ h = MatMul(x, w) z = Add(h, b) {ENDINGS.get(ending, ending)} }}"
    )
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.normal(size=(5, columns)).astype(np.float32),
        "b": np.zeros(columns, np.float32),
        "two": np.array(2, np.float32),
        "one": np.array([1]),
        **{name: np.array(bound, np.float32) for name, bound in BOUNDS.items()},
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


HELD = "applies an activation to logits, which are any numbers, and reads 'y', which"
LOGARITHMS = "takes logarithms of probabilities, and reads 'y'"


@pytest.mark.parametrize(
    ("loss", "ending", "message"),
    [
        ("nll", "linear", f"nll {LOGARITHMS} as MatMul .* computes it, which is any number: choose cross_entropy"),
        ("nll", "scaled", f"nll {LOGARITHMS} as MatMul"),
        ("nll", "Softmax", rf"nll {LOGARITHMS}, which Softmax .* bounds to \[0, 1\]: choose cross_entropy"),
        ("kl_divergence", "linear", f"kl_divergence {LOGARITHMS} as MatMul .*with probabilities=True"),
        ("kl_divergence", "Sigmoid", rf"kl_divergence {LOGARITHMS}, which Sigmoid .* bounds to \[0, 1\]"),
        (
            "bce",
            "linear",
            r"takes probabilities, and reads 'y' as MatMul .* outside of \[0, 1\] the loss is NaN: choose bce_with",
        ),
        ("hinge", "Sigmoid", r"hinge takes scores .* reads 'y', which Sigmoid .* bounds to \[0, 1\].* \(outputs='z'\)"),
        ("multi_margin", "Softmax", r"multi_margin takes scores .* reads 'y', which Softmax .* bounds to \[0, 1\]"),
        ("bce", "Softmax", r"a yes or no of its own, .* Softmax .* share one .*: choose cross_entropy .* \(outputs='z'\)"),
        ("cross_entropy", "Tanh", rf"{HELD} Tanh .* within bounds, .*: let it read what comes before \(outputs='z'\)"),
        ("bce_with_logits", "Tanh, then flat", rf"{HELD} Tanh .*\(outputs='z'\)"),
        ("cross_entropy", "Softsign", rf"{HELD} Softsign .* choose a loss of values, such as 'mse'"),
        ("focal", "Clip", rf"{HELD} Clip .*\(outputs='z'\)"),
        (losses.weighted_sum([(1.0, "cross_entropy"), (0.5, "nll")]), "linear", LOGARITHMS),
    ],
)
def test_an_output_of_another_scale_is_warned_of(loss, ending, message):
    with pytest.warns(ObjectiveWarning, match=message):
        burnish.compile(dense(ending), loss=loss, metrics=())


@pytest.mark.parametrize(
    ("loss", "ending"),
    [
        *[(loss, ending) for loss in ("nll", "kl_divergence") for ending in ENDINGS if ending.startswith(("Log", "Softmax and"))],
        *[("cross_entropy", ending) for ending in ("scaled Tanh", "wide Clip")],
        ("bce", "Sigmoid"),
        ("mse", "Tanh"),
        ("hinge", "linear"),
        ("multi_margin", "linear"),
        ("multi_margin:margin=0.2", "Softmax"),
        ("mse", "Sigmoid"),
    ],
)
def test_nothing_is_said_of_what_a_loss_is_made_for(loss, ending):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(dense(ending), loss=loss, metrics=())
    assert "param/w" in program.initial_state()


@pytest.mark.parametrize(
    ("loss", "ending", "shape", "node"),
    [
        ("cross_entropy", "linear", "N, 3, 5", "MatMul"),  # as many steps as classes: the labels would fit
        ("cross_entropy", "Softmax", "N, 3, 5", "Softmax"),
        ("cross_entropy", "linear", "N, 3, 3, 5", "MatMul"),
        ("focal", "linear", "N, T, 5", "MatMul"),
        ("nll", "LogSoftmax", "N, T, 5", "LogSoftmax"),
    ],
)
def test_classes_along_the_last_axis_are_warned_of(loss, ending, shape, node):
    model = dense(ending, 3, shape, shape.replace("5", "3"))
    with pytest.warns(
        ObjectiveWarning, match=rf"reads classes along axis 1 of 'y' of shape .*, and {node} .* the last axis: .*"
    ) as said:
        burnish.compile(model, loss=loss, metrics=())
    assert "loss='cross_entropy:class_axis=-1'" in str(said[0].message)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        burnish.compile(model, loss="cross_entropy:class_axis=-1", metrics=())


def test_classes_that_are_moved_to_axis_1_are_nothing_to_warn_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(dense("y = Transpose<perm = [0, 2, 1]>(z)", 3, "N, 3, 5", "N, 3, 3"), metrics=())
    assert "param/w" in program.initial_state()


def test_sorted_scores_are_no_classes():
    model = dense("v, i = TopK(z, one) y = Identity(v)", 3, y="N, 2")
    model.graph.initializer[3].CopyFrom(numpy_helper.from_array(np.array([2]), "one"))
    with pytest.raises(
        ConfigurationError, match=r"TopK .* sorts the output 'y' along axis 1, .* what comes before \(outputs='z'\)"
    ):
        burnish.compile(model)
    burnish.compile(model, outputs="z")
    burnish.compile(model, loss="mse")


@pytest.mark.parametrize("loss", ["nll", "multi_margin"])
def test_one_class_is_none_to_tell_apart(loss):
    with pytest.raises(ConfigurationError, match=r"has one class along axis 1, and nothing would train"):
        burnish.compile(dense("LogSoftmax", 1, y="N, 1"), loss=loss)


@pytest.mark.parametrize("loss", ["hinge", "hinge_embedding", "cosine_embedding"])
def test_no_answer_of_no_is_written_as_zero(loss):
    """A target of 0 would be no error of any score, and have no gradient."""
    if loss == "cosine_embedding":
        program, targets = burnish.compile(dense("y = Identity(z) q = Neg(z)"), loss=loss, outputs=["y", "z"]), np.zeros(4)
    else:
        program, targets = burnish.compile(dense("linear"), loss=loss), np.zeros((4, 3))
    saved = burnish.program.Signature.from_dict(program.signature.to_dict())
    assert [entry.two_values for entry in saved["step"].inputs if entry.name == "targets"] == [True]
    batch = {"x": np.ones((4, 5), np.float32), "targets": targets.astype(np.float32)}
    with burnish.Session(program, threads=1) as session:
        with pytest.raises(InputError, match=r"'targets' holds 0.0 at .* valid are -1 and 1\. Write -1 for no, which is often 0"):
            session.step(batch)
        for _ in range(2):  # the second finds a batch of the form of the first
            session.step(
                {**batch, "targets": np.where(np.arange(targets.size).reshape(targets.shape) % 2, 1, -1).astype(np.float32)}
            )
        with pytest.raises(InputError, match=r"holds 0\.0 at"):
            session.step(batch)


INSIDE = (
    '<ir_version: 9, opset_import: ["": 18]> g (float[N, 2] x, int64[N] labels) => (float[N, 2] logits, float loss) '
    "<float[2, 2] w = {1, 2, 3, 4}> { logits = MatMul(x, w) loss = SoftmaxCrossEntropyLoss(logits, labels) }"
)


def test_a_model_that_computes_its_loss_is_told_how_to_train():
    model = onnx.parser.parse_model(INSIDE)
    with pytest.raises(
        ConfigurationError, match=r"option outputs; where 'loss' is the loss .*, give output='loss' in place of loss"
    ):
        burnish.compile(model)
    with pytest.raises(
        ConfigurationError, match=r"input 'labels', .*: rename that input; or, .* \(output='\.\.\.'\) in place of"
    ):
        burnish.compile(model, outputs="logits")
    program = burnish.compile(model, output="loss")
    with burnish.Session(program, threads=1) as session:
        loss = session.step({"x": np.ones((1, 2), np.float32), "labels": np.array([0])})["loss"]
    assert loss == pytest.approx(np.log1p(np.exp(2.0)))
