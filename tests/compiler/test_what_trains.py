"""What trains and what cannot: the messages of ``burnish.compile`` and ``burnish.grad``, by which a user finds the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import burnish
from burnish.errors import ConfigurationError, GradientError, UntrainedWeightsWarning
from burnish.operators import registry

EYE = np.eye(2, dtype=np.float32)
FLOAT = onnx.TensorProto.FLOAT


def model_of(
    nodes: Sequence[tuple[str, Sequence[str], str]], weights: Mapping[str, np.ndarray], outputs: Sequence[str] = ("y",)
) -> onnx.ModelProto:
    """A model over ``x`` [batch, 2]; nodes are (operator, inputs, output), and the output names the node, too."""
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, [output], name=f"the_{output}") for operator, inputs, output in nodes],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info(name, FLOAT, ["batch", None]) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


TWO_HEADS = model_of(
    [("MatMul", ["x", "first"], "a"), ("MatMul", ["x", "second"], "b")], {"first": EYE, "second": EYE * 2}, ["a", "b"]
)


@pytest.mark.parametrize(
    ("nodes", "weights", "message"),
    [
        ([("Relu", ["x"], "y")], {}, r"the model has no weights, .* Give a model that holds its parameters"),
        ([("Mul", ["x", "s"], "y")], {"s": np.float32(2)}, r"the model has no weights, .* of one dimension or more"),
        ([("Relu", ["x"], "y")], {"w": EYE}, r"no gradient reaches .* \('w': no operator reads it\)\. Give a model whose"),
        (
            [("MatMul", ["x", "w"], "z"), ("Round", ["z"], "y")],
            {"w": EYE},
            r"'w': Round 'the_y' \(output 'y'\) lets no gradient through",
        ),
        (
            [("Relu", ["x"], "y"), *(("MatMul", ["x", f"w{i}"], f"z{i}") for i in range(5))],
            {f"w{i}": EYE for i in range(5)},
            r"'w2': .*; and 2 more",
        ),
    ],
)
def test_a_model_without_weights_that_train(nodes, weights, message):
    with pytest.raises(ConfigurationError, match=f"^nothing would train: .*{message}"):
        burnish.compile(model_of(nodes, weights))


def test_a_trainable_that_selects_nothing():
    with pytest.raises(ConfigurationError, match=r"trainable selects none of the model's weights, such as 'first'; .* all 2"):
        burnish.compile(TWO_HEADS, outputs="a", trainable=lambda name, array: False)
    with pytest.raises(ConfigurationError, match=r"trainable selects none"):
        burnish.compile(TWO_HEADS, outputs="a", trainable=[])


def test_weights_that_the_loss_does_not_depend_on_stay_unless_they_are_asked_for():
    with pytest.warns(UntrainedWeightsWarning, match=r"'second': nothing that leads to 'a' reads it"):
        program = burnish.compile(TWO_HEADS, outputs="a")
    assert "next:param/second" not in {entry.name for entry in program.signature["step"].outputs}
    for trainable in (["second"], ["first", "second"], "sec*"):
        with pytest.raises(
            ConfigurationError, match=r"'sec.*' would not train: .* \('second': nothing that leads to 'a' reads it\)"
        ):
            burnish.compile(TWO_HEADS, outputs="a", trainable=trainable)
    with pytest.warns(UntrainedWeightsWarning, match="second"):
        program = burnish.compile(TWO_HEADS, outputs="a", trainable="*")
    assert program.options["trainable"] == ["first", "second"]


def test_nothing_trains_where_the_loss_depends_on_no_weight():
    model = model_of([("MatMul", ["x", "w"], "a"), ("Relu", ["x"], "b")], {"w": EYE}, ["a", "b"])
    message = r"nothing would train: the loss reads 'b', .* \('w': .*\)\. Train other weights .* another output \(outputs\)"
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(model, outputs="b")


def test_the_operator_between_the_loss_and_the_only_weight_is_named():
    nodes = [("MatMul", ["x", "w"], "a"), ("Sign", ["a"], "cut"), ("Add", ["cut", "x"], "b")]
    with pytest.raises(ConfigurationError, match=r"'w': Sign 'the_cut' \(output 'cut'\) lets no gradient through"):
        burnish.compile(model_of(nodes, {"w": EYE}, ["a", "b"]), outputs="b")


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("frist", r"'frist' matches no weight of the model; did you mean 'first'"),
        ("axes", r"'axes': it is not floating-point"),
        ("idle", r"'idle': no operator reads it"),
        (3, r"trainable must be None, names or patterns of weights, or a function of \(name, array\), not 3"),
        ([3], r"trainable must be None, .* not \[3\]"),
    ],
)
def test_names_that_are_no_weights(trainable, message):
    nodes = [("MatMul", ["x", "first"], "a"), ("Mul", ["a", "scale"], "b"), ("ReduceSum", ["b", "axes"], "y")]
    weights = {"first": EYE, "scale": np.float32(2), "axes": np.array([1]), "idle": EYE}
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(model_of(nodes, weights), loss="mse", trainable=trainable)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": None}, r"norm must be a policy, such as 'train' or 'frozen', or \{pattern: policy\}, not None"),
        ({"metrics": 3}, r"metrics must be None, or a list of names or objects of burnish\.metrics, not 3"),
        ({"target": ["onnxruntime"]}, r"target: unknown '\['onnxruntime'\]'; choose among 'onnxruntime'"),
        ({"precision": "float8"}, r"precision: unknown 'float8'; choose among 'float32'"),
        ({"outputs": None}, r"the model has the outputs 'a', 'b': say which one the loss reads with the option outputs"),
    ],
)
def test_options_of_another_kind(options, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(TWO_HEADS, **{"outputs": "a", **options})


DET = model_of(
    [("Det", ["square"], "volume"), ("Mul", ["x", "volume"], "scaled"), ("MatMul", ["scaled", "w"], "y")],
    {"square": EYE, "w": EYE},
)


@pytest.mark.parametrize("predicate", [lambda name: True, lambda: True, lambda name, array, index: True])
def test_a_predicate_of_other_arguments_than_name_and_array(predicate):
    with pytest.raises(ConfigurationError, match=r"cannot be called with a weight's name and array .*: give a function of these"):
        burnish.compile(TWO_HEADS, loss="mse", outputs="a", trainable=predicate)


def test_a_missing_gradient_names_the_options_of_the_caller(monkeypatch):
    monkeypatch.delitem(registry.records(), ("", "Det"))
    problem = (
        r"^Det 'the_volume' \(output 'volume'\) has no gradient rule, and '{}' is differentiated through it\. Differentiate .*"
    )
    with pytest.raises(GradientError, match=problem.format("param/square") + r"\(trainable=\[\.\.\.\] says .* outputs='\.\.\.'"):
        burnish.compile(DET)
    with pytest.raises(GradientError, match=problem.format("square") + r"\(wrt=\[\.\.\.\] says .* of='\.\.\.' which output\)"):
        burnish.grad(DET, wrt=["square"])
    burnish.compile(DET, trainable=["w"])


@pytest.mark.parametrize("wrt", [None, [], [1], 3])
def test_grad_takes_names(wrt):
    with pytest.raises(
        ConfigurationError, match=r"^wrt must be the name of an input or initializer, or a list of such names, not "
    ):
        burnish.grad(DET, wrt=wrt)


def test_grad_gives_a_name_that_is_asked_for_twice_once():
    outputs = [value.name for value in burnish.grad(TWO_HEADS, wrt=["x", "x"], of="a").graph.outputs]
    assert outputs == ["a", "b", "grad:x"]


def test_grad_refuses_an_unknown_target():
    with pytest.raises(ConfigurationError, match=r"target: unknown 'abacus'; choose among 'onnxruntime'"):
        burnish.grad(DET, wrt="x", target="abacus")
