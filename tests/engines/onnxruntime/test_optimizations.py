"""Graphs that ONNX Runtime's optimizers rewrite wrong: they run right, whatever was rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.backend import BurnishBackend
from burnish.engines.onnxruntime import OnnxRuntimeEngine, OptimizationWarning, optimizations
from burnish.engines.onnxruntime.optimizations import TRANSPOSE_OPTIMIZERS, OpenedGraph, Optimizations
from burnish.errors import EngineError
from oracles.several_workers import in_threads

LEVELS = ("basic", "extended", "all")
ROWS, COLUMNS, CLASSES = 3, 4, 2
EMPTY = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)


@pytest.fixture
def unaware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of what ONNX Runtime rewrites wrong: it is found out where it fails."""
    monkeypatch.setattr(optimizations, "is_transposed_wrong", lambda model: False)
    monkeypatch.setattr(import_module("burnish.rewriting.complete_axes"), "names_axes", lambda node: False)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, tuple[str, ...]]]:
    """Of every session that is made: the graph, the optimization level, and what is disabled."""
    made = []
    load = OnnxRuntimeEngine.inference_session

    def noted(self: Any, model: Any, graph: str, threads: Any, chosen: Optimizations | None = None) -> Any:
        used = chosen or Optimizations.of(self.optimization, model)
        made.append((graph, used.level, used.disabled))
        return load(self, model, graph, threads, chosen)

    monkeypatch.setattr(OnnxRuntimeEngine, "inference_session", noted)
    return made


def model_of(
    nodes: Sequence[onnx.NodeProto],
    arrays: Mapping[str, np.ndarray],
    shape: Sequence[int | str],
    output: Sequence[int | str] | None = None,
    dtype: int = TensorProto.FLOAT,
    opset: int = 21,
) -> onnx.ModelProto:
    """A model from ``x`` to the output of its last node."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, output)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def classifier(*, pads: bool = False) -> onnx.ModelProto:
    """Weights, a slice between transpositions and a linear layer; ``pads``: and padding that names its axis."""
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Slice", ["turned", "from", "to", "along"], ["sliced"]),
        helper.make_node("Pad", ["sliced", "amounts", "", "along"], ["padded"], name="pad"),
        helper.make_node("Transpose", ["padded" if pads else "sliced"], ["back"], perm=[0, 2, 1]),
        helper.make_node("Flatten", ["back"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    if not pads:
        del nodes[3]
    rng = np.random.default_rng(0)
    arrays = {
        "scale": rng.standard_normal(COLUMNS).astype(np.float32),
        "from": np.array([1]),
        "to": np.array([COLUMNS]),
        "along": np.array([1]),
        "amounts": np.array([0, 1]),
        "weight": rng.standard_normal((ROWS * (COLUMNS - 1 + pads), CLASSES)).astype(np.float32),
    }
    if not pads:
        del arrays["amounts"]
    return model_of(nodes, arrays, ["batch", ROWS, COLUMNS], ["batch", CLASSES])


def batch_of(samples: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, ROWS, COLUMNS)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, CLASSES, samples)}


def session_of(model: onnx.ModelProto, level: str = "all", **options: Any) -> burnish.Session:
    return burnish.Session(
        burnish.compile(model, optimizer="adam", trainable=["scale", "weight"]),
        OnnxRuntimeEngine(level, kernels=False),
        threads=1,
        **options,
    )


def assert_same_state(session: burnish.Session, other: burnish.Session) -> None:
    expected = other.state()
    for name, array in session.state().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("level", LEVELS)
def test_no_graph_of_a_program_holds_what_is_rewritten_wrong(level, loads):
    session, plain = session_of(classifier(pads=True), level), session_of(classifier(pads=True), "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            batch = batch_of(seed=seed)
            assert session.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)
            assert session.evaluate(batch) == pytest.approx(plain.evaluate(batch), rel=1e-5)
    assert_same_state(session, plain)
    assert sorted(loads) == sorted((graph, used, ()) for graph in ("step", "evaluate") for used in (level, "none"))


@pytest.mark.usefixtures("unaware")
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_fails_goes_on_without_the_guilty_optimizer(level, loads):
    session, plain = session_of(classifier(), level), session_of(classifier(), "none")
    message = rf"^The step graph fails as ONNX Runtime {onnxruntime.__version__} rewrites it at Gather .*out of data bounds.*"
    with pytest.warns(OptimizationWarning, match=message + "without TransposeOptimizer and.*opened again") as warned:
        reported = session.step(batch_of())
    assert len(warned) == 1
    assert reported == plain.step(batch_of())
    assert_same_state(session, plain)
    assert loads == [
        ("step", level, ()),
        ("step", "none", ()),
        ("step", level, TRANSPOSE_OPTIMIZERS),
        ("step", "none", ()),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (5, 2, 7):
            assert session.step(batch_of(size)) == pytest.approx(plain.step(batch_of(size)), rel=1e-5)
    assert_same_state(session, plain)
    assert len(loads) == 4


@pytest.mark.usefixtures("unaware")
def test_evaluation_prediction_and_loaded_models_go_on_too():
    model = classifier(pads=True)
    session, plain = session_of(model), session_of(model, "none")
    batch = batch_of()
    run = OnnxRuntimeEngine().load(ir.from_proto(model))
    calls = {
        "evaluate": (lambda: session.evaluate(batch)["loss"], plain.evaluate(batch)["loss"]),
        "predict": (lambda: session.predict(batch)["logits"], plain.predict(batch)["logits"]),
        "model": (lambda: run({"x": batch["x"]})["logits"], plain.predict(batch)["logits"]),
    }
    for graph, (call, expected) in calls.items():
        with pytest.warns(OptimizationWarning, match=f"The {graph} graph fails") as warned:
            results = [call() for _ in range(2)]
        assert len(warned) == 1
        np.testing.assert_array_equal(results, [expected] * 2)


RESIZED_WITH_CHANNELS_LAST = [
    helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 3, 1]),
    helper.make_node("Resize", ["turned", "", "scales"], ["resized"], mode="linear", name="resize"),
    helper.make_node("Transpose", ["resized"], ["back"], perm=[0, 3, 1, 2]),
    helper.make_node("Relu", ["back"], ["y"]),
]


def test_a_graph_that_cannot_be_loaded_is_loaded_with_less(loads):
    model = model_of(RESIZED_WITH_CHANNELS_LAST, {"scales": np.float32([1, 1, 2, 2])}, [1, 2, 3, 4])
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)
    expected = OnnxRuntimeEngine("none").run(ir.from_proto(model), {"x": x})["y"]
    del loads[:]
    with pytest.warns(OptimizationWarning, match=r"model graph fails.*'Linear' mode only supports") as warned:
        run = OnnxRuntimeEngine().load(ir.from_proto(model))
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(run({"x": x})["y"], expected)
    assert [level for _, level, _ in loads] == ["all", "none", "all"]
    with pytest.warns(OptimizationWarning):
        (result,) = BurnishBackend.run_model(model, [x])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.usefixtures("unaware")
def test_a_failure_without_optimizations_keeps_its_error(loads):
    nodes = [
        helper.make_node("Add", ["x", "x"], ["doubled"]),
        helper.make_node("Gather", ["table", "doubled"], ["rows"], name="look_up"),
        helper.make_node("Transpose", ["rows"], ["logits"], perm=[0, 1]),
    ]
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    model = model_of(nodes, {"table": table}, ["batch"], ["batch", 2], dtype=TensorProto.INT64)
    session = burnish.Session(burnish.compile(model), threads=1)
    labels = np.array([0, 1])
    session.step({"x": np.array([1, 0]), "labels": labels})
    opened = session._runner._graph("step")._opened
    first, before = opened.session, session.state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EngineError, match=r"step graph at Gather 'look_up'.*idx=4 .*No state has changed.*not the cause"):
            session.step({"x": np.array([1, 2]), "labels": labels})
        assert opened.session is first
        assert opened.reopened == 0
        for name, array in session.state().items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        session.step({"x": np.array([0, 1]), "labels": labels})
    assert [level for graph, level, _ in loads if graph == "step"] == ["all", "none"]
    other = burnish.Session(session.program, threads=1)
    for x in ([1, 0], [0, 1]):
        other.step({"x": np.array(x), "labels": labels})
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, other.state()[name], err_msg=name)


def test_what_cannot_be_loaded_at_all_keeps_its_error():
    model = model_of([helper.make_node("Foo", ["x"], ["y"], name="odd")], {}, [2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EngineError, match=r"cannot load the model graph at Foo 'odd'.*Update onnxruntime"):
            OnnxRuntimeEngine().load(ir.from_proto(model))


def opened_with(attempts: Callable[[Optimizations | None, int], None]) -> tuple[OpenedGraph, Callable[[int], Any]]:
    """An opened graph, and what runs it on a batch size; ``attempts`` raises where these optimizations fail on that size."""
    opened = OpenedGraph("step", EMPTY, Optimizations("all"), lambda chosen: chosen)  # type: ignore[arg-type, return-value]

    def run(size: int) -> Any:
        def attempt(chosen: Any) -> Any:
            attempts(chosen, size)
            return chosen

        return opened.run(attempt)

    return opened, run


def test_a_later_shape_that_fails_is_recovered_too():
    def attempts(chosen: Optimizations | None, size: int) -> None:
        if size == 3 and (chosen is None or chosen.level == "all"):
            raise RuntimeError("Non-zero status code returned while running Gather node. Name:'rows' Status Message: bad")

    opened, run = opened_with(attempts)
    assert run(4) is None
    with pytest.warns(OptimizationWarning, match=r"at Gather 'rows' \(bad\), and runs with optimization='basic' but without"):
        assert run(3) == Optimizations("basic", TRANSPOSE_OPTIMIZERS)
    assert run(4) == Optimizations("basic", TRANSPOSE_OPTIMIZERS)
    assert opened.reopened == 2


def test_every_rest_of_optimizations_is_tried():
    def attempts(chosen: Optimizations | None, size: int) -> None:
        if chosen is None or (size > 1 and chosen.level == "all") or (size > 2 and chosen.level != "none"):
            raise RuntimeError("broken")

    opened, run = opened_with(attempts)
    reached = []
    for size in (1, 2, 3, 1):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            reached.append(str(run(size)))
        assert len(warned) == (0 if len(reached) == 4 else 1)
    disabled = " and ".join(TRANSPOSE_OPTIMIZERS)
    assert reached == [
        f"with optimization='all' but without {disabled}",
        f"with optimization='basic' but without {disabled}",
        "without optimizations",
        "without optimizations",
    ]
    assert opened.reopened == 3


@pytest.mark.parametrize("text", ["Failed to allocate memory for requested buffer of size 8589934592", "std::bad_alloc"])
def test_memory_that_ran_out_is_not_asked_for_again(text, monkeypatch, loads):
    session = session_of(classifier())
    session.step(batch_of())
    graph = session._runner._graph("step")
    runs = []

    def fails(*_: Any) -> None:
        runs.append(1)
        raise RuntimeError(f"Non-zero status code returned while running Conv node. Name:'wide' Status Message: {text}")

    monkeypatch.setattr(type(graph), "_run", fails)
    with pytest.raises(EngineError, match=r"step graph at Conv 'wide'.*No state has changed\. Memory ran out: use a smaller"):
        session.step(batch_of())
    assert len(runs) == 1
    assert [level for _, level, _ in loads] == ["all"]


PADDED = np.arange(27, dtype=np.float32).reshape(3, 3, 3)


@pytest.mark.parametrize("level", LEVELS)
def test_padding_of_axes_in_another_order_is_right(level):
    """ONNX Runtime permutes the amounts and leaves the axes: another number in every place, and no error."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Pad", ["turned", "amounts", "", "axes"], ["padded"]),
        helper.make_node("Transpose", ["padded"], ["back"], perm=[0, 2, 1]),
        helper.make_node("Neg", ["back"], ["y"]),
    ]
    arrays = {"amounts": np.array([1, 0, 0, 0, 1, 1]), "axes": np.array([1, 2, 0])}
    expected = -np.pad(PADDED.transpose(0, 2, 1), [(0, 1), (1, 0), (0, 1)]).transpose(0, 2, 1)
    model = model_of(nodes, arrays, [3, 3, 3], [4, 4, 4])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    (wrong,) = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": PADDED})
    assert wrong.shape == expected.shape
    assert not np.array_equal(wrong, expected), "ONNX Runtime has mended it: the remedies here may go"
    np.testing.assert_array_equal(OnnxRuntimeEngine(level).run(ir.from_proto(model), {"x": PADDED})["y"], expected)
    stock = onnxruntime.InferenceSession(ir.to_proto(burnish.lower(model)).SerializeToString(), options)
    np.testing.assert_array_equal(stock.run(None, {"x": PADDED})[0], expected)


def _resized(**attributes: Any) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 3, 1]),
        helper.make_node("Resize", ["turned", "", "scales"], ["resized"], mode="nearest", **attributes),
        helper.make_node("Transpose", ["resized"], ["back"], perm=[0, 3, 1, 2]),
        helper.make_node("Relu", ["back"], ["y"]),
    ]


QUANTIZED_IN_BLOCKS = [
    helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]),
    helper.make_node("QuantizeLinear", ["turned", "scale"], ["whole"], axis=-1, block_size=2),
    helper.make_node("DequantizeLinear", ["whole", "scale"], ["rounded"], axis=-1, block_size=2),
    helper.make_node("Transpose", ["rounded"], ["back"], perm=[1, 0, 2]),
    helper.make_node("Relu", ["back"], ["y"]),
]
BLOCK_SCALES = (np.random.default_rng(1).random((4, 4, 2)) + 0.1).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("nodes", "arrays", "shape"),
    [
        (_resized(axes=[3, -3, 2, 0]), {"scales": np.float32([3, 2, 1, 1])}, (2, 2, 2, 2)),
        (_resized(axes=[1, 3]), {"scales": np.float32([2, 3])}, (2, 2, 2, 2)),
        (QUANTIZED_IN_BLOCKS, {"scale": BLOCK_SCALES}, (4, 4, 4)),
    ],
    ids=["resize of all axes", "resize of some axes", "quantization in blocks"],
)
def test_what_else_is_transposed_wrong_is_right(nodes, arrays, shape, level):
    model = model_of(nodes, arrays, shape)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = OnnxRuntimeEngine("none").run(ir.from_proto(model), {"x": x})["y"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(OnnxRuntimeEngine(level).run(ir.from_proto(model), {"x": x})["y"], expected)


@pytest.mark.usefixtures("unaware")
def test_workers_that_step_alone_come_to_one_graph():
    program = burnish.compile(classifier(), trainable=["scale", "weight"])
    parts = [[4, 0], [3, 2], [2, 2]]  # in the first round the second worker has nothing to fail on

    def work(communicator: Any) -> Any:
        parallel = burnish.DataParallel(communicator=communicator, synchronize_every=1)
        with burnish.Session(program, OnnxRuntimeEngine(), threads=1, parallel=parallel) as session:
            reached = []
            for number, sizes in enumerate(parts):
                session.step(batch_of(sizes[communicator.rank], seed=2 * number + communicator.rank))
                reached.append(session._runner._runner.reopened)
            return reached, session.state()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        (first, state), (second, other) = in_threads(2, work)
    assert first == second == [1, 1, 1]
    assert [warning.category for warning in warned] == [OptimizationWarning]
    for name, array in state.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


PADDING = """<ir_version: 10, opset_import: ["": 21]> g (float[3, 3, 3] x) => (float[4, 4, 4] y)
<int64[6] amounts = {1, 0, 0, 0, 1, 1}, int64[3] axes = {1, 2, 0}> {
    turned = Transpose <perm = [0, 2, 1]> (x)
    padded = Pad (turned, amounts, , axes)
    back = Transpose <perm = [0, 2, 1]> (padded)
    y = Mul (back, w)
}"""


@pytest.mark.slow
@pytest.mark.usefixtures("unaware")
def test_numbers_that_are_wrong_without_an_error_are_found_where_it_is_asked_for():
    """Verified, the first step is compared with one without optimizations; the state moves on once, by the right numbers."""
    model = onnx.parser.parse_model(PADDING)
    rng = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(1, 4, 4)).astype(np.float32), "w"))
    program = burnish.compile(model, loss="mean_squared_error", optimizer="sgd:lr=0.1")
    batch = {"x": PADDED, "targets": rng.normal(size=(4, 4, 4)).astype(np.float32)}
    states = {}
    for name, engine in {"none": OnnxRuntimeEngine("none"), "all": OnnxRuntimeEngine()}.items():
        session = burnish.Session(program, engine)
        states[name] = [session.step(batch), session.state()["param/w"]][1]
    assert not np.allclose(states["all"], states["none"]), "ONNX Runtime has mended it: find another case"
    session = burnish.Session(program, OnnxRuntimeEngine(verify=True))
    with pytest.warns(
        OptimizationWarning, match=r"The step graph computes another '.*without TransposeOptimizer.* is right so"
    ) as warned:
        session.step(batch)
    assert len(warned) == 1
    np.testing.assert_allclose(session.state()["param/w"], states["none"], rtol=1e-5)
    model_engine = OnnxRuntimeEngine(verify=True)
    with pytest.warns(OptimizationWarning, match=r"The model graph computes another 'y'"):
        found = model_engine.run(burnish.load(model), {"x": batch["x"]})["y"]
    np.testing.assert_allclose(found, OnnxRuntimeEngine("none").run(burnish.load(model), {"x": batch["x"]})["y"], rtol=1e-5)


def test_nothing_is_said_of_a_graph_that_is_right(loads):
    program = burnish.compile(classifier(), optimizer="adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error", OptimizationWarning)
        session = burnish.Session(program, OnnxRuntimeEngine(verify=True))
        for _ in range(3):
            session.step(batch_of(4))
    assert [(graph, level) for graph, level, _ in loads] == [("step", "all"), ("step", "none")]


def test_outputs_part_by_more_than_rounding():
    exact = {"a": np.float32([1, np.nan, np.inf]), "b": np.float32([0, 0]), "c": np.float32([100.0])}
    assert optimizations.first_that_parts(exact, exact) is None
    assert optimizations.first_that_parts(exact | {"b": np.float32([1e-4, 0])}, exact) is None
    assert optimizations.first_that_parts(exact | {"b": np.float32([1e-2, 0])}, exact) == "b"
    assert optimizations.first_that_parts(exact | {"a": np.float32([1, 0, np.inf])}, exact) == "a"
    assert optimizations.first_that_parts(exact | {"c": np.float32([90])}, exact) == "c"
    assert optimizations.first_that_parts(exact | {"c": np.float32([[100]])}, exact) == "c"
