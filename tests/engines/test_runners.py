"""The engines on a program whose step is known in closed form."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch import TorchEngine
from burnish.errors import EngineError, NonFiniteLossError
from burnish.files import model_file
from burnish.graph import Builder
from oracles.open_program import open_program
from oracles.tiny_program import CLASSES, FEATURES, LR, TRAINED, numpy_step, tiny_batch, tiny_program

ENGINES = [OnnxRuntimeEngine, ReferenceEngine, TorchEngine]


def opened(engine, program, **options):
    return open_program(engine, program, program.initial_state(0), device=None, threads=options.get("threads", 1))


def with_lr(batch, lr=LR, dtype=np.float32):
    return {**batch, "lr": np.asarray(lr, dtype)}


@pytest.mark.parametrize("make_engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_follow_the_closed_form(make_engine, dtype):
    program = tiny_program(ir.DataType.from_numpy(np.dtype(dtype)))
    runner = opened(make_engine(), program)
    state = program.initial_state(0)
    tolerance = 2e-6 if dtype is np.float32 else 1e-14
    for number, size in enumerate((8, 5, 8, 1, 16)):
        batch = tiny_batch(size, seed=number, dtype=dtype)
        outputs = runner.step(with_lr(batch, dtype=dtype))
        loss, state = numpy_step(state, batch)
        assert set(outputs) == {"loss", "accuracy"}
        assert outputs["loss"].dtype == dtype
        np.testing.assert_allclose(outputs["loss"], loss, rtol=tolerance)
        held = runner.state()
        assert set(held) == set(state)
        for name, array in state.items():
            np.testing.assert_allclose(held[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("make_engine", ENGINES)
def test_evaluation_and_prediction_read_the_current_state_and_leave_it(make_engine):
    program = tiny_program()
    runner = opened(make_engine(), program)
    for number in range(3):
        runner.step(with_lr(tiny_batch(seed=number)))
        state = runner.state()
        batch = tiny_batch(6, seed=50 + number)
        logits = ((batch["x"] - state["stat/mean"]) * state["param/scale"]) @ state["param/weight"] + state["param/bias"]
        np.testing.assert_allclose(runner.predict({"x": batch["x"]})["logits"], logits, rtol=1e-5, atol=1e-5)
        exponentials = np.exp(logits)
        losses = -np.log((exponentials / exponentials.sum(1, keepdims=True))[np.arange(6), batch["labels"]])
        evaluated = runner.evaluate(batch)
        np.testing.assert_allclose(evaluated["loss"], losses.mean(), rtol=1e-5)
        np.testing.assert_allclose(evaluated["sum:loss"], losses.sum(), rtol=1e-5)
        assert evaluated["sum:accuracy"] == (logits.argmax(1) == batch["labels"]).sum()
        assert evaluated["count:accuracy"] == 6
        for name, array in runner.state().items():
            np.testing.assert_array_equal(array, state[name], err_msg=name)


@pytest.mark.parametrize("make_engine", ENGINES)
def test_evaluation_reads_another_state_entry_where_it_is_told_to(make_engine):
    program = tiny_program()
    runner = opened(make_engine(), program)
    instead = {f"param/{name}": f"opt/momentum/{name}" for name in TRAINED}
    for number in range(3):
        runner.step(with_lr(tiny_batch(seed=number)))
        state = runner.state()
        plain = open_program(
            make_engine(), program, state | {n: state[other] for n, other in instead.items()}, device=None, threads=1
        )
        batch = tiny_batch(6, seed=50 + number)
        x = {"x": batch["x"]}
        np.testing.assert_array_equal(runner.predict(x, instead)["logits"], plain.predict(x)["logits"])
        assert runner.evaluate(batch, instead) == plain.evaluate(batch)
        assert not np.array_equal(runner.predict(x)["logits"], plain.predict(x)["logits"])


@pytest.mark.parametrize("make_engine", ENGINES)
def test_a_non_finite_loss_leaves_the_state_as_it_was(make_engine):
    program = tiny_program()
    runner = opened(make_engine(), program)
    runner.step(with_lr(tiny_batch(seed=1)))
    before = runner.state()
    broken = tiny_batch(seed=2)
    broken["x"][3, 1] = np.nan
    message = r"The loss at step 1 is nan\. The state is kept as it was before this step.*in the batch.*lower the learning rate"
    with pytest.raises(NonFiniteLossError, match=message):
        runner.step(with_lr(broken))
    for name, array in runner.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    outputs = runner.step(with_lr(tiny_batch(seed=3)))
    loss, _ = numpy_step(before, tiny_batch(seed=3))
    np.testing.assert_allclose(outputs["loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("make_engine", ENGINES)
def test_a_state_that_is_damaged_already_is_named(make_engine):
    program = tiny_program()
    runner = opened(make_engine(), program)
    runner.step(with_lr(tiny_batch(seed=1), lr=np.inf))
    with pytest.raises(NonFiniteLossError, match=r"'param/weight' holds NaN or infinite values already.*earlier checkpoint"):
        runner.step(with_lr(tiny_batch(seed=2)))


@pytest.mark.parametrize("make_engine", ENGINES)
def test_a_failing_step_leaves_the_state_as_it_was(make_engine):
    program = tiny_program()
    runner = opened(make_engine(), program)
    runner.step(with_lr(tiny_batch(seed=1)))
    before = runner.state()
    mismatched = {**tiny_batch(8), "labels": np.zeros(7, np.int64)}
    with pytest.raises(EngineError, match=r"step graph"):
        runner.step(with_lr(mismatched))
    for name, array in runner.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    runner.step(with_lr(tiny_batch(seed=2)))


@pytest.mark.parametrize("make_engine", ENGINES)
def test_states_are_copies(make_engine):
    program = tiny_program()
    given = program.initial_state(0)
    runner = open_program(make_engine(), program, given, device=None, threads=1)
    given["param/weight"][:] = 7
    runner.state()["param/weight"][:] = 8
    runner.state_entry("param/weight")[:] = 9
    np.testing.assert_array_equal(runner.state()["param/weight"], program.weights["param/weight"])
    runner.step(with_lr(tiny_batch()))
    replacement = program.initial_state(0)
    runner.load_state(replacement)
    replacement["param/weight"][:] = 7
    np.testing.assert_array_equal(runner.state()["param/weight"], program.weights["param/weight"])


@pytest.mark.parametrize("make_engine", [OnnxRuntimeEngine, ReferenceEngine])
def test_another_device_is_refused(make_engine):
    program = tiny_program()
    with pytest.raises(EngineError, match=r"device 'cpu' only, not on 'cuda'"):
        open_program(make_engine(), program, program.initial_state(0), device="cuda", threads=None)


def test_each_graph_is_loaded_once_whatever_the_batch_size(monkeypatch):
    made = []

    class Counted(onnxruntime.InferenceSession):
        def __init__(self, *arguments, **options):
            made.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    runner = opened(OnnxRuntimeEngine(), tiny_program())
    assert not made
    for size in (8, 8, 3, 8):
        runner.step(with_lr(tiny_batch(size)))
    assert len(made) == 1
    for size in (8, 2):
        runner.evaluate(tiny_batch(size))
        runner.predict({"x": tiny_batch(size)["x"]})
        runner.step(with_lr(tiny_batch(size)))
    runner.load_state(runner.state())
    runner.step(with_lr(tiny_batch()))
    assert len(made) == 3


def test_no_state_is_moved_or_copied_by_a_step():
    runner = opened(OnnxRuntimeEngine(), tiny_program())
    addresses = [{name: buffer.value.data_ptr() for name, buffer in held.items()} for held in runner._sets]
    for name, entry in addresses[0].items():
        shared = entry == addresses[1][name]
        assert shared == (name == "param/scale"), name
    binding_of = runner._graph("step")._bindings
    for number in range(4):
        runner.step(with_lr(tiny_batch(seed=number)))
        assert runner._graph("step")._bindings is binding_of
        assert [{name: buffer.value.data_ptr() for name, buffer in held.items()} for held in runner._sets] == addresses


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_run_twice_is_bitwise_the_same(threads):
    def run():
        runner = opened(OnnxRuntimeEngine(), tiny_program(), threads=threads)
        losses = [runner.step(with_lr(tiny_batch(64, seed=number)))["loss"] for number in range(20)]
        return losses, runner.state()

    (first_losses, first), (second_losses, second) = run(), run()
    assert [loss.tobytes() for loss in first_losses] == [loss.tobytes() for loss in second_losses]
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(
    "options",
    [
        {"optimization": "none"},
        {"optimization": "basic", "arena": "none"},
        {"memory_pattern": True, "arena": "next_power_of_two"},
        {"execution_order": "priority", "spinning": False, "config": {"session.disable_prepacking": "1"}},
    ],
)
def test_options_change_no_result(options):
    program = tiny_program()
    plain, tuned = opened(OnnxRuntimeEngine(), program), opened(OnnxRuntimeEngine(**options), program)
    for number in range(3):
        batch = with_lr(tiny_batch(seed=number))
        np.testing.assert_allclose(tuned.step(batch)["loss"], plain.step(batch)["loss"], rtol=1e-6)


def test_bfloat16_state_and_outputs_are_carried():
    dtype = ir.DataType.BFLOAT16
    shape = ir.Shape(["batch", 3])
    x, w = (ir.Value(name=name, type=ir.TensorType(dtype), shape=shape) for name in ("x", "param/w"))
    graph = ir.Graph([x, w], [], nodes=[], opset_imports={"": 18}, name="predict")
    builder = Builder(graph)
    doubled = builder.op("Cast", builder.op("Cast", builder.tensor(w), to=1) * 2.0, to=int(dtype))
    doubled.value.name = "y"
    graph.outputs.append(doubled.value)
    program = tiny_program()
    given = {**program.graphs.given, "predict": ir.Model(graph, ir_version=10)}
    program = replace(program, graphs=replace(program.graphs, given=given))
    from burnish.program import Entry, GraphSignature, Role

    program.signature.graphs["predict"] = GraphSignature(
        (Entry("x", Role.DATA, dtype, ("batch", 3)), Entry("param/w", Role.PARAMETER, dtype, (2, 3))),
        (Entry("y", Role.OUTPUT, dtype, ("batch", 3)),),
    )
    values = np.array([[1.5, -2, 0.25], [3, 4, 1e30]]).astype(dtype.numpy())
    program.weights = {**program.weights, "param/w": values}
    runner = opened(OnnxRuntimeEngine(), program)
    result = runner.predict({"x": values})["y"]
    assert result.dtype == dtype.numpy()
    np.testing.assert_array_equal(result.astype(np.float32), values.astype(np.float32) * 2)
    np.testing.assert_array_equal(runner.state()["param/w"].astype(np.float32), values.astype(np.float32))


def model_of(nodes, inputs, outputs, opset=18, initializers=()):
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in inputs],
        [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in outputs],
        list(initializers),
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10))


@pytest.mark.parametrize("make_engine", ENGINES)
def test_a_model_is_run_once(make_engine):
    node = helper.make_node("Neg", ["x"], ["y"])
    model = model_of([node], [("x", TensorProto.FLOAT, ["n"])], [("y", TensorProto.FLOAT, ["n"])])
    np.testing.assert_array_equal(make_engine().run(model, {"x": np.float32([1, -2])})["y"], [-1, 2])


@pytest.mark.parametrize("make_engine", ENGINES)
def test_a_loaded_model_runs_on_batch_after_batch(make_engine):
    nodes = [helper.make_node("Neg", ["x"], ["negative"]), helper.make_node("Mul", ["x", "negative"], ["y"])]
    floats = [(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y", "negative")]
    model = model_of(nodes, floats[:1], floats[1:])
    run = make_engine().load(model)
    for size in (3, 1, 4):
        x = np.random.default_rng(size).normal(size=size).astype(np.float32)
        outputs = run({"x": x})
        assert [*outputs] == ["y", "negative"]
        np.testing.assert_array_equal(outputs["y"], -x * x)
        np.testing.assert_array_equal(outputs["negative"], -x)


def test_a_failing_node_is_named(capfd):
    model = model_of(
        [helper.make_node("MatMul", ["x", "x"], ["y"], name="squared")],
        [("x", TensorProto.FLOAT, ["a", "b"])],
        [("y", TensorProto.FLOAT, None)],
    )
    with pytest.raises(EngineError, match=r"failed in the model graph at MatMul 'squared': .*dimension mismatch.*smaller batch"):
        OnnxRuntimeEngine().run(model, {"x": np.zeros((2, 3), np.float32)})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "engine",
    [
        OnnxRuntimeEngine(),
        ReferenceEngine(),
        TorchEngine(),
        TorchEngine(compile="none"),
        pytest.param(TorchEngine(compile="inductor"), marks=pytest.mark.slow),
    ],
)
def test_a_failing_step_names_the_node_of_the_model(engine):
    nodes = [
        helper.make_node("Add", ["tokens", "tokens"], ["doubled"], name="double"),
        helper.make_node("Gather", ["table", "doubled"], ["logits"], name="look_up"),
    ]
    table = numpy_helper.from_array(np.zeros((4, 2), np.float32), "table")
    model = model_of(
        nodes, [("tokens", TensorProto.INT64, ["batch"])], [("logits", TensorProto.FLOAT, ["batch", 2])], initializers=[table]
    )
    session = burnish.Session(burnish.compile(model), engine)
    before = session.state()
    with pytest.raises(EngineError, match=r"failed in the step graph at Gather 'look_up'.*No state has changed"):
        session.step({"tokens": np.array([1, 3]), "labels": np.array([0, 1])})
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            helper.make_node("Det", ["x"], ["y"], name="volume"),
            r"load the model graph at Det 'volume'.*no kernel of this operator for this dtype: use a float32 model, or engine=",
        ),
        (helper.make_node("Foo", ["x"], ["y"], name="odd"), r"cannot load the model graph at Foo 'odd'.*Update onnxruntime"),
    ],
)
def test_an_operator_without_a_kernel_is_named(node, message):
    model = model_of([node], [("x", TensorProto.DOUBLE, ["a", "b"])], [("y", TensorProto.DOUBLE, None)])
    with pytest.raises(EngineError, match=message):
        OnnxRuntimeEngine().run(model, {"x": np.zeros((2, 2))})


def test_the_reference_engine_names_what_it_lacks():
    node = helper.make_node("Foo", ["x"], ["y"], name="odd")
    model = model_of([node], [("x", TensorProto.DOUBLE, ["a"])], [("y", TensorProto.DOUBLE, None)])
    with pytest.raises(EngineError, match=r"reference engine cannot load the model graph: .*Foo.*Use engine='onnxruntime'"):
        ReferenceEngine().run(model, {"x": np.zeros(2)})


def test_constants_beyond_one_file_go_through_external_data(monkeypatch):
    monkeypatch.setattr(model_file, "ONE_FILE_LIMIT", 1 << 10)
    table = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="large")
    row = ir.Value(name="row", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["n"]))
    graph.inputs.append(row)
    builder = Builder(graph)
    result = builder.op("Gather", builder.constant(table), builder.tensor(row), axis=0)
    result.value.name = "rows"
    graph.outputs.append(result.value)
    model = ir.Model(graph, ir_version=10)
    assert not model_file.fits_one_file(model)
    np.testing.assert_array_equal(OnnxRuntimeEngine().run(model, {"row": np.array([5, 1])})["rows"], table[[5, 1]])
    assert [node.op_type for node in model.graph] == ["Constant", "Gather"]


def test_the_hand_written_graphs_agree_with_each_other():
    """grad followed by apply is step."""
    program = tiny_program()
    engine = OnnxRuntimeEngine()
    state, batch = program.initial_state(0), tiny_batch()
    values = {**state, **with_lr(batch)}

    def run(graph, extra):
        inputs = {entry.name: {**values, **extra}[entry.name] for entry in program.signature[graph].inputs}
        return engine.run(program.graphs[graph], inputs)

    gradients = run("grad", {})
    applied = run("apply", {name: array for name, array in gradients.items() if name.startswith("grad:")})
    stepped = run("step", {})
    assert gradients["grad:weight"].shape == (FEATURES, CLASSES)
    for name in TRAINED:
        np.testing.assert_allclose(applied[f"next:param/{name}"], stepped[f"next:param/{name}"], rtol=1e-6)


RUNTIMES = {"onnxruntime": "onnxruntime_inference_collection", "reference": "reference_evaluator", "torch": "<eval_with_key>"}
"""By engine, the file where the runtime begins that it calls."""


@pytest.mark.parametrize("engine", RUNTIMES)
def test_a_step_reaches_the_runtime_in_six_frames(engine):
    session = burnish.Session(tiny_program(), engine)
    session.step(tiny_batch())
    here = sys._getframe()
    depths = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and RUNTIMES[engine] in frame.f_code.co_filename:
            caller, depth = frame.f_back, 0
            while caller is not here:
                assert caller is not None
                caller, depth = caller.f_back, depth + 1
            depths.append(depth)

    sys.setprofile(look)
    try:
        session.step(tiny_batch())
    finally:
        sys.setprofile(None)
    assert depths
    assert depths[0] <= 6
