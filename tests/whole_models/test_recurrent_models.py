"""Recurrent layers in whole models: what trains on every engine, evaluates with the standard's operator, and exports."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import EngineError, GradientError
from oracles.combinations import diagonal, named

WORDS, EMBEDDED, HIDDEN, CLASSES = 12, 6, 5, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
ENGINES = ("onnxruntime", "torch", "reference")


def classifier(kind: str, lengths: bool = False, dtype=np.float32, **attributes) -> onnx.ModelProto:
    """Gather -> recurrent layer -> last hidden state -> Gemm; batch and number of words are open."""
    rng = np.random.default_rng(3)
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    rows = GATES[kind] * HIDDEN
    weights = {
        "embedding": rng.standard_normal((WORDS, EMBEDDED)),
        "W": rng.standard_normal((count, rows, EMBEDDED)) / 2,
        "R": rng.standard_normal((count, rows, HIDDEN)) / 2,
        "B": rng.standard_normal((count, 2 * rows)) / 4,
        "head": rng.standard_normal((count * HIDDEN, CLASSES)) / 2,
        "bias": np.zeros(CLASSES),
    }
    states = {"LSTM": ["", "last", ""]}.get(kind, ["", "last"])
    batch_first = attributes.get("layout", 0)
    nodes = [
        helper.make_node("Gather", ["embedding", "words"], ["embedded"], name="embed"),
        helper.make_node(
            "Identity" if batch_first else "Transpose", ["embedded"], ["x"], **({} if batch_first else {"perm": [1, 0, 2]})
        ),
        helper.make_node(
            kind, ["x", "W", "R", "B", *(["lengths"] if lengths else [])], states, name="layer", hidden_size=HIDDEN, **attributes
        ),
        helper.make_node("Transpose", ["last"], ["by_sequence"], perm=[0, 1, 2] if batch_first else [1, 0, 2]),
        helper.make_node("Flatten", ["by_sequence"], ["features"]),
        helper.make_node("Gemm", ["features", "head", "bias"], ["logits"], name="classify"),
    ]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info("words", TensorProto.INT64, ["batch", "words"])]
    if lengths:
        inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["batch"]))
    graph = helper.make_graph(
        nodes,
        "classifier",
        inputs,
        [helper.make_tensor_value_info("logits", element, ["batch", CLASSES])],
        [numpy_helper.from_array(array.astype(dtype), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def batches(lengths: bool) -> list[dict[str, np.ndarray]]:
    """Two batches of other sizes; the class is a function of the first word."""
    rng = np.random.default_rng(5)
    made = []
    for batch, words in ((8, 7), (5, 4)):
        ids = rng.integers(0, WORDS, (batch, words))
        entry = {"words": ids, "labels": ids[:, 0] % CLASSES}
        if lengths:
            entry["lengths"] = rng.integers(1, words + 1, batch).astype(np.int32)
        made.append(entry)
    return made


@diagonal(
    ("kind", ["LSTM", "GRU", "RNN"]),
    ("direction", ["forward", "bidirectional"]),
    ("lengths", named([False, True], ["whole", "padded"])),
    test=1,
)
def test_a_classifier_trains_alike_on_every_engine(kind: str, direction: str, lengths: bool) -> None:
    program = burnish.compile(
        classifier(kind, lengths, direction=direction), loss="cross_entropy", optimizer=burnish.optim.adam(0.03)
    )
    sessions = [burnish.Session(program, engine=engine) for engine in ENGINES]
    given = batches(lengths)
    losses = np.array([[session.step(batch)["loss"] for session in sessions] for batch in given * 15])
    np.testing.assert_allclose(losses[:, 1:], losses[:, :1].repeat(2, 1), rtol=1e-3)
    assert losses[-4:, 0].mean() < 0.5 * losses[:4, 0].mean()
    states = [session.state() for session in sessions]
    for name, expected in states[0].items():
        for other in states[1:]:
            np.testing.assert_allclose(other[name], expected, rtol=1e-2, atol=2e-3, err_msg=name)
    for session in sessions[1:]:
        session.load_state(states[0])
    predicted = [session.predict({name: array for name, array in given[0].items() if name != "labels"}) for session in sessions]
    evaluated = [session.evaluate(given[0])["loss"] for session in sessions]
    for other in predicted[1:]:
        np.testing.assert_allclose(other["logits"], predicted[0]["logits"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(evaluated[1:], evaluated[:1] * 2, rtol=1e-4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_training_computes_what_the_operator_computes(kind: str) -> None:
    """The loss of a step is that of the model as it was shipped, run by ONNX Runtime's own kernel."""
    attributes = {"linear_before_reset": 1} if kind == "GRU" else {}
    model = classifier(kind, lengths=True, direction="bidirectional", **attributes)
    gradient = ir.to_proto(burnish.grad(model, wrt=["W"], of="logits"))
    feeds = {name: array for name, array in batches(lengths=True)[0].items() if name != "labels"}
    feeds["lengths"][2] = 0
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(["logits"], feeds)
    session = onnxruntime.InferenceSession(gradient.SerializeToString())
    (actual,) = session.run(["logits"], {**feeds, "cotangent:logits": np.ones_like(expected)})
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-6)


def test_a_layer_with_the_batch_in_front_trains_and_evaluates() -> None:
    """ONNX Runtime has no kernel for it: it evaluates what stands for the layer in training."""
    program = burnish.compile(classifier("LSTM", layout=1), loss="cross_entropy", optimizer="sgd")
    assert "LSTM" not in {node.op_type for node in program.predict.graph}
    batch_first, time_first = (
        burnish.compile(classifier("LSTM", layout=layout), loss="cross_entropy", optimizer=burnish.optim.sgd(0.1))
        for layout in (1, 0)
    )
    sessions = [burnish.Session(program, engine="onnxruntime") for program in (batch_first, time_first)]
    for batch in batches(lengths=False) * 2:
        losses = [session.step(batch)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    evaluated = [session.evaluate(batches(lengths=False)[0])["loss"] for session in sessions]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


@diagonal(("kind", ["LSTM", "GRU", "RNN"]), (("dtype", "tolerance"), [(np.float64, 1e-12), (np.float16, 1e-3)]), test=3)
def test_a_model_of_another_type_evaluates_what_it_trains(kind: str, dtype, tolerance: float) -> None:
    """ONNX Runtime's kernels are for float32."""
    program = burnish.compile(classifier(kind, dtype=dtype), loss="cross_entropy", optimizer=burnish.optim.sgd(0.1))
    session = burnish.Session(program, engine="onnxruntime")
    batch = batches(lengths=False)[0]
    before = session.evaluate(batch)["loss"]
    assert session.step(batch)["loss"] == pytest.approx(before, rel=tolerance)


def test_evaluation_runs_the_layer_itself_and_an_export_holds_it(tmp_path) -> None:
    program = burnish.compile(classifier("GRU"), loss="cross_entropy", optimizer=burnish.optim.sgd(0.1))
    session = burnish.Session(program, engine="onnxruntime")
    batch = batches(lengths=False)[0]
    session.step(batch)
    for graph in (program.predict, program.evaluate):
        assert [node.op_type for node in graph.graph].count("GRU") == 1
    session.export(tmp_path / "tuned.onnx")
    exported = onnx.load(tmp_path / "tuned.onnx")
    assert [node.op_type for node in exported.graph.node].count("GRU") == 1
    (logits,) = onnxruntime.InferenceSession(exported.SerializeToString()).run(["logits"], {"words": batch["words"]})
    np.testing.assert_allclose(logits, session.predict({"words": batch["words"]})["logits"], rtol=1e-6)


def test_a_layer_without_a_gradient_is_no_obstacle_where_none_passes_through() -> None:
    model = classifier("LSTM", clip=3.0)
    with pytest.raises(
        GradientError, match=r"LSTM 'layer' .*has the attribute clip.*or let nothing train that its output depends on"
    ):
        burnish.compile(model, loss="cross_entropy", optimizer="sgd")
    program = burnish.compile(model, loss="cross_entropy", optimizer=burnish.optim.sgd(0.1), trainable=["head", "bias"])
    session = burnish.Session(program, engine="onnxruntime")
    losses = [session.step(batches(lengths=False)[0])["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    with pytest.raises(EngineError, match=r"LSTM 'layer' .*has clip, .*use engine='onnxruntime'"):
        burnish.Session(program, engine="torch").step(batches(lengths=False)[0])


class Tagger(torch.nn.Module):
    """Two layers in both directions, and the state behind the last word."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(WORDS, EMBEDDED)
        self.layers = getattr(torch.nn, kind)(EMBEDDED, HIDDEN, num_layers=2, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(words))[0][:, -1])


@pytest.mark.filterwarnings("ignore")
@diagonal(("kind", ["LSTM", "GRU", "RNN"]), ("engine", ["onnxruntime", "torch"]))
def test_what_pytorch_exports_trains_as_in_pytorch(kind: str, engine: str) -> None:
    module, words = Tagger(kind), torch.from_numpy(batches(lengths=False)[0]["words"])
    file = io.BytesIO()
    torch.onnx.export(
        module,
        (words,),
        file,
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["words"],
        dynamic_axes={"words": {0: "batch", 1: "words"}},
    )
    assert kind in {node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node}
    program = burnish.compile(file.getvalue(), loss="cross_entropy", optimizer=burnish.optim.sgd(0.5))
    session, optimizer = burnish.Session(program, engine=engine), torch.optim.SGD(module.parameters(), lr=0.5)
    for batch in batches(lengths=False) * 3:
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(batch["words"])), torch.from_numpy(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    trained = session.state()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(trained[f"param/{name}"], parameter.detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
