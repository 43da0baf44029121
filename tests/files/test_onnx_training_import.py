"""Models whose ``training_info`` burnish did not write: what a program is made of, and what they must say for that."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import BurnishError, CheckpointError, ModelError
from burnish.files.identity import graph_hashes

TRAINING = "ai.onnx.preview.training"
MOMENTUM = f'{TRAINING}.Momentum <alpha = 0.9, beta = 1.0, norm_coefficient = 0.01, mode = "nesterov">'

INFERENCE = """
    net (float[n,3] x) => (float[n,4] scores) <float[3,4] w, float[4] b> {
        product = MatMul (x, w)
        scores = Add (product, b)
    }"""

ALGORITHM = f"""
    step (int64[n] labels, float rate) => (float loss, float[3,4] w2, float[3,4] vw2, float[4] b2, float[4] vb2, int64 t2) {{
        loss = SoftmaxCrossEntropyLoss (scores, labels)
        dw, db = {TRAINING}.Gradient <xs = ["w", "b"], zs = ["x", "labels"], y = "loss"> (w, b, x, labels)
        w2, b2, vw2, vb2 = {MOMENTUM} (rate, t, w, b, dw, db, vw, vb)
        t2 = Add (t, one)
    }}"""

INITIALIZATION = """
    initialization () => (float[3,4] w0, float[3,4] zeros, int64 t0) {
        w0 = RandomNormal <shape = [3, 4], scale = 0.5> ()
        extent = Constant <value_ints = [3, 4]> ()
        zeros = ConstantOfShape (extent)
        t0 = Constant <value_int = 0> ()
    }"""

ALGORITHM_STATE = {
    "vw": np.full((3, 4), 0.25, np.float32),
    "vb": np.full(4, 0.5, np.float32),
    "t": np.array(3),
    "one": np.array(1),
    "rate": np.array(0.1, np.float32),
}
UPDATES = {"w": "w2", "b": "b2", "vw": "vw2", "vb": "vb2", "t": "t2"}
STARTS = {"w": "w0", "vw": "zeros", "t": "t0"}


def tensors(arrays):
    return [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]


def weights():
    rng = np.random.default_rng(2)
    return {"w": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}


def model(inference=INFERENCE, algorithm=ALGORITHM, initialization=INITIALIZATION, state=None, updates=None, starts=None):
    """A model with one training_info, of graphs as text."""
    graph = onnx.parser.parse_graph(inference)
    del graph.initializer[:]
    graph.initializer.extend(tensors(weights()))
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(TRAINING, 1)]
    result = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    info = result.training_info.add()
    info.algorithm.CopyFrom(onnx.parser.parse_graph(algorithm))
    info.algorithm.initializer.extend(tensors(ALGORITHM_STATE if state is None else state))
    info.initialization.CopyFrom(onnx.parser.parse_graph(initialization))
    for bindings, given in ((info.update_binding, updates), (info.initialization_binding, starts)):
        for key, value in given.items():
            bindings.add(key=key, value=value)
    return result


def whole_model(**changes):
    return model(**{"updates": UPDATES, "starts": STARTS} | changes)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(6, 3)).astype(np.float32), "labels": rng.integers(0, 4, 6)}


def names(program, graph, *roles):
    return [entry.name for entry in (*program.signature[graph].inputs, *program.signature[graph].outputs) if entry.role in roles]


def test_the_step_is_that_of_the_file():
    """Against PyTorch's SGD: beta is 1, so that its Nesterov momentum is the standard's."""
    program = burnish.Program.load(whole_model())
    state = program.saved_state
    session = burnish.Session(program, state=state, threads=1)
    parameters = [torch.tensor(state[name], requires_grad=True) for name in ("param/w", "param/b")]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    for parameter, slot in zip(parameters, ("opt/vw", "opt/vb"), strict=True):
        optimizer.state[parameter]["momentum_buffer"] = torch.tensor(state[slot])
    for index in range(5):
        given = batch(index)
        results = session.step(given)
        optimizer.zero_grad()
        scores = torch.tensor(given["x"]) @ parameters[0] + parameters[1]
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(given["labels"]))
        loss.backward()
        optimizer.step()
        assert results["loss"] == pytest.approx(loss.item(), rel=1e-5)
    after = session.state()
    for parameter, name in zip(parameters, ("param/w", "param/b"), strict=True):
        np.testing.assert_allclose(after[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert after["opt/t"] == 8
    assert after["step"] == 5


def test_roles_and_names_follow_from_the_file():
    program = burnish.Program.load(whole_model())
    assert names(program, "step", "data", "label", "hyperparameter") == ["x", "labels", "rate"]
    assert program.signature["step"].inputs_of("hyperparameter")[0].default == pytest.approx(0.1)
    assert set(program.signature["step"].updates) == {
        "param/w",
        "param/b",
        "opt/vw",
        "opt/vb",
        "opt/t",
        "rng/key",
        "step",
    }
    assert names(program, "grad", "gradient") == ["grad:w", "grad:b"]
    assert names(program, "predict", "output") == ["scores"]


def test_training_starts_where_the_initialization_says_and_goes_on_where_the_file_stands():
    program = burnish.Program.load(whole_model())
    start = program.initial_state()
    np.testing.assert_array_equal(program.saved_state["param/w"], weights()["w"])
    assert not np.array_equal(start["param/w"], weights()["w"])
    assert 0.1 < start["param/w"].std() < 1.0
    np.testing.assert_array_equal(start["param/b"], weights()["b"])
    np.testing.assert_array_equal(start["opt/vw"], np.zeros((3, 4)))
    np.testing.assert_array_equal(start["opt/vb"], ALGORITHM_STATE["vb"])
    assert (start["opt/t"], program.saved_state["opt/t"]) == (0, 3)
    again = burnish.Program.load(whole_model())
    np.testing.assert_array_equal(again.initial_state()["param/w"], start["param/w"])


def test_gradients_and_update_apart_are_the_step():
    program, engine = burnish.Program.load(whole_model()), OnnxRuntimeEngine("none")
    state, given = dict(program.saved_state), batch() | {"rate": np.float32(0.3)}
    whole = engine.run(program.step, inputs(program, "step", state, given))
    halves = engine.run(program.grad, inputs(program, "grad", state, given))
    halves |= engine.run(program.apply, inputs(program, "apply", state, given | halves))
    assert len(program.signature["step"].updates) == 7
    for name in program.signature["step"].updates.values():
        np.testing.assert_array_equal(whole[name], halves[name], err_msg=name)


def inputs(program, graph, *sources):
    known = {name: np.asarray(array) for source in sources for name, array in source.items()}
    return {entry.name: known[entry.name] for entry in program.signature[graph].inputs}


def test_it_predicts_evaluates_saves_and_takes_another_optimizer(tmp_path):
    path = tmp_path / "foreign.onnx"
    path.write_bytes(whole_model().SerializeToString())
    program = burnish.Program.load(path)
    session = burnish.Session(program, state=program.saved_state, threads=1)
    given = batch()
    scores = given["x"] @ weights()["w"] + weights()["b"]
    np.testing.assert_allclose(session.predict(given)["scores"], scores, rtol=1e-5)
    expected = torch.nn.functional.cross_entropy(torch.tensor(scores), torch.tensor(given["labels"])).item()
    assert session.evaluate(given)["loss"] == pytest.approx(expected, rel=1e-5)
    assert session.evaluate_data([given, given])["loss"] == pytest.approx(expected, rel=1e-5)
    assert graph_hashes(burnish.Program.load(program.save(tmp_path / "folder"))) == graph_hashes(program)
    assert graph_hashes(burnish.Program.load(program.to_onnx(session.state()))) == graph_hashes(program)
    other = burnish.Session(program.with_optimizer("adam"), threads=1)
    losses = [other.step(given)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


def test_an_update_in_plain_operators_and_statistics_of_the_batch():
    """Gradient descent written out, a running mean of the inputs that the batch decides, and dropout in the algorithm."""
    algorithm = f"""
        step (int64[n] labels) => (float loss, float[3,4] w2, float[3] mean2) {{
            dropped = Dropout (scores, ratio, training)
            loss = SoftmaxCrossEntropyLoss (dropped, labels)
            dw = {TRAINING}.Gradient <xs = ["w"], zs = ["x", "b", "labels"], y = "loss"> (w, x, b, labels)
            rate = Constant <value_float = 0.5> ()
            scaled = Mul (dw, rate)
            w2 = Sub (w, scaled)
            axis = Constant <value_ints = [0]> ()
            average = ReduceMean <keepdims = 0> (x, axis)
            difference = Sub (average, mean)
            share = Mul (difference, rate)
            mean2 = Add (mean, share)
        }}"""
    state = {"mean": np.ones(3, np.float32), "ratio": np.float32(0.5), "training": np.array(True)}
    program = burnish.Program.load(whole_model(algorithm=algorithm, state=state, updates={"w": "w2", "mean": "mean2"}, starts={}))
    assert set(program.signature["step"].updates) == {"param/w", "stat/mean", "rng/key", "step"}
    session = burnish.Session(program, threads=1)
    given = batch()
    first = session.step(given)["loss"]
    np.testing.assert_allclose(session.state()["stat/mean"], (1 + given["x"].mean(0)) / 2, rtol=1e-5)
    held = session.state()
    second = session.step(given)["loss"]
    session.load_state(held | {"rng/key": burnish.Session(program).state()["rng/key"]})
    assert session.step(given)["loss"] != second, "another key, another mask"
    assert first != session.evaluate(given)["loss"]
    np.testing.assert_array_equal(*(session.predict(given)["scores"] for _ in range(2)))


def test_plain_runtimes_and_compile_take_the_inference_graph():
    content = whole_model().SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    given = batch()
    expected = given["x"] @ weights()["w"] + weights()["b"]
    np.testing.assert_allclose(session.run(None, {"x": given["x"]})[0], expected, rtol=1e-5)
    assert list(burnish.compile(content).weights) == ["param/w", "param/b"]


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


def second_step():
    result = whole_model()
    result.training_info.append(result.training_info[0])
    return result


WITHOUT_GRADIENT = """
    step (int64[n] labels) => (float loss, float[3,4] w2) {
        loss = SoftmaxCrossEntropyLoss (scores, labels)
        w2 = Neg (w)
    }"""
NO_SCALAR = changed(ALGORITHM, "SoftmaxCrossEntropyLoss (", 'SoftmaxCrossEntropyLoss <reduction = "none"> (').replace(
    "(float loss", "(float[n] loss"
)
FROM_BATCH = changed(ALGORITHM, "w2, b2, vw2", "w3, b2, vw2").replace(
    "t2 = Add", "spread = ReduceMean <keepdims = 0> (x)\n w2 = Mul (w3, spread)\n t2 = Add"
)
TWO_LOSSES = changed(
    ALGORITHM,
    "dw, db =",
    f'other = ReduceMean <keepdims = 0> (w)\n da = {TRAINING}.Gradient <xs = ["w"], y = "other"> (w)\n dw, db =',
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (second_step, "has 2 training_info, and a program is one training step"),
        (lambda: whole_model(updates={}), "has no update_binding, so that a step changes nothing"),
        (lambda: whole_model(updates=UPDATES | {"q": "w2"}), "binds 'q', which is no initializer of it"),
        (lambda: whole_model(updates=UPDATES | {"w": "q"}), "binds 'w' to 'q', a value that its graphs do not have"),
        (lambda: whole_model(starts={"q": "w0"}), "binds 'q', which is no initializer of it"),
        (lambda: whole_model(starts={"w": "q"}), "initializes 'w' with 'q', which is no output of its initialization graph"),
        (lambda: whole_model(starts={"b": "w0"}), r"initializes 'b', float32 of shape \[4\], with float32 of shape \[3, 4\]"),
        (lambda: whole_model(algorithm=WITHOUT_GRADIENT, updates={"w": "w2"}), "has no ai.onnx.preview.training.Gradient"),
        (lambda: whole_model(algorithm=NO_SCALAR), "differentiates 'loss', which is no scalar"),
        (lambda: whole_model(algorithm=FROM_BATCH), "updates 'w' from the batch itself"),
        (lambda: whole_model(algorithm=TWO_LOSSES), "differentiates '(loss|other)', '(loss|other)', and a program has one loss"),
        (
            lambda: whole_model(updates={name: value for name, value in UPDATES.items() if name != "b"}),
            "has a gradient with respect to 'b', which no update changes",
        ),
    ],
)
def test_what_a_file_lacks_is_named(make, message):
    with pytest.raises(CheckpointError, match=f"^the ModelProto {message}.*Compile its inference graph with burnish.compile"):
        burnish.Program.load(make())


def test_damaged_graphs_are_refused(tmp_path):
    broken = whole_model(algorithm=changed(ALGORITHM, "(scores, labels)", "(stores, labels)"))
    with pytest.raises(ModelError, match="stores"):
        burnish.Program.load(broken)
    content = whole_model().SerializeToString()
    refused = 0
    for length in range(20, len(content), 97):
        (tmp_path / "cut.onnx").write_bytes(content[:length])
        try:
            burnish.Program.load(tmp_path / "cut.onnx")
        except BurnishError:
            refused += 1
    assert refused > 10, "a file cut between two fields may be whole by chance, and none fails in another way"
