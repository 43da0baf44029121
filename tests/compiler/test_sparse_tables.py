"""``compile(sparse=...)``: gradients of tables as the rows that a batch reads, and updates of these rows alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import burnish
from burnish import optim
from burnish.comparison import check_gradients, compare_engines
from burnish.engines.reference import ReferenceEngine
from burnish.errors import ConfigurationError, DenseGradientWarning, NonFiniteLossError
from burnish.program import Program, Signature
from oracles.combinations import diagonal, named

ROWS, WIDTH, CLASSES, SAMPLES, LENGTH = 9, 4, 3, 5, 3
INT64 = onnx.TensorProto.INT64
EXACT = [
    optim.sgd(lr=0.25),
    optim.adagrad(lr=0.25, initial_accumulator_value=0.1),
    optim.rowwise_adagrad(lr=0.25),
    optim.chain(optim.clip_by_value(0.05), optim.adagrad(lr=0.25)),
    optim.groups(optim.adagrad(lr=0.25), {"table": {"lr_scale": 0.5}, "head": optim.adam(lr=0.01)}),
]
exact = pytest.mark.parametrize("optimizer", EXACT, ids=[optimizer.name for optimizer in EXACT])


def classifier(dtype: str = "float64", lookup: str = "Gather", tied: bool = False, second: bool = False) -> onnx.ModelProto:
    """The sum of embeddings, classified: by a head of its own or, ``tied``, by the table; ``second``: looked up twice."""
    rng = np.random.default_rng(0)
    values = {"table": rng.standard_normal((ROWS, WIDTH)).astype(dtype), "axis": np.array([1])}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info("x", INT64, ["batch", LENGTH])]
    if lookup == "GatherND":
        values["last"] = np.array([2])
        nodes = [
            helper.make_node("Unsqueeze", ["x", "last"], ["places"]),
            helper.make_node(lookup, ["table", "places"], ["rows"]),
        ]
    else:
        nodes = [helper.make_node(lookup, ["table", "x"], ["rows"], axis=0)]
    nodes += [helper.make_node("ReduceSum", ["rows", "axis"], ["sum"], keepdims=0), helper.make_node("Tanh", ["sum"], ["hidden"])]
    if second:
        inputs.append(helper.make_tensor_value_info("z", INT64, ["batch"]))
        nodes += [
            helper.make_node("Gather", ["table", "z"], ["other"]),
            helper.make_node("Mul", ["hidden", "other"], ["features"]),
        ]
    features = "features" if second else "hidden"
    if tied:
        nodes += [helper.make_node("Transpose", ["table"], ["head"], name="tied_head", perm=[1, 0])]
    else:
        values["head"] = rng.standard_normal((WIDTH, CLASSES)).astype(dtype)
    nodes += [helper.make_node("MatMul", [features, "head"], ["logits"])]
    output = helper.make_tensor_value_info("logits", kind, ["batch", ROWS if tied else CLASSES])
    initializers = [numpy_helper.from_array(array, name) for name, array in values.items()]
    graph = helper.make_graph(nodes, "classifier", inputs, [output], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def batches(count: int = 4, second: bool = False, samples: int = SAMPLES) -> list[dict[str, np.ndarray]]:
    """Rows from the front and from the end, one of them often, and two that no batch reads."""
    rng = np.random.default_rng(1)
    chosen = []
    for _ in range(count):
        x = rng.integers(0, ROWS - 2, (samples, LENGTH))
        x[:, 0] = 1
        x[0, 1] = 2 - ROWS
        batch = {"x": x, "labels": rng.integers(0, CLASSES, samples)}
        chosen.append(batch | ({"z": rng.integers(0, ROWS, samples)} if second else {}))
    return chosen


def state_after(program: Program, engine: Any, steps: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    with burnish.Session(program, engine=engine) as session:
        for batch in steps:
            session.step(batch)
        return session.state()


def compiled(optimizer: Any, sparse: Any = "auto", **model: Any) -> Program:
    """A program that is compiled without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return burnish.compile(classifier(**model), optimizer=optimizer, sparse=sparse)


@pytest.mark.slow
@diagonal(("optimizer", named(EXACT, lambda optimizer: optimizer.name)), ("engine", ["reference", "onnxruntime", "torch"]))
def test_the_weights_are_those_of_a_dense_program_to_the_bit(optimizer: optim.Optimizer, engine: str) -> None:
    dense = state_after(compiled(optimizer, sparse=None), engine, batches())
    sparse = state_after(compiled(optimizer), engine, batches())
    assert sparse.keys() == dense.keys()
    for name, array in dense.items():
        assert array.tobytes() == sparse[name].tobytes(), name


@pytest.mark.slow
@diagonal(("optimizer", named(EXACT[:3], [optimizer.name for optimizer in EXACT[:3]])), ("engine", ["onnxruntime", "torch"]))
def test_float32_keeps_its_digits(optimizer: optim.Optimizer, engine: str) -> None:
    dense = state_after(compiled(optimizer, sparse=None, dtype="float32"), engine, batches())
    sparse = state_after(compiled(optimizer, dtype="float32"), engine, batches())
    for name, array in dense.items():
        np.testing.assert_allclose(sparse[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"second": True}, {"lookup": "GatherND"}], ids=["two_lookups", "gather_nd"])
def test_other_lookups_keep_their_rows_too(model: dict[str, Any]) -> None:
    steps = batches(second="second" in model)
    dense = state_after(compiled(optim.adagrad(), sparse=None, **model), "reference", steps)
    program = compiled(optim.adagrad(), **model)
    assert "rows:table" in [entry.name for entry in program.signature["grad"].outputs]
    sparse = state_after(program, "reference", steps)
    for name, array in dense.items():
        np.testing.assert_allclose(sparse[name], array, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("engine", ["reference", "onnxruntime", "torch"])
def test_lazy_adam_is_that_of_pytorch(engine: str) -> None:
    program = burnish.compile(classifier(), optimizer=optim.sparse_adam(lr=2.0**-6), sparse=["table"], trainable=["table"])
    start = program.initial_state()
    table, head = torch.tensor(start["param/table"], requires_grad=True), torch.tensor(start["param/head"])
    sparse = torch.optim.SparseAdam([table], lr=2.0**-6)
    for batch in batches(20):
        rows = torch.nn.functional.embedding(torch.tensor(batch["x"] % ROWS), table, sparse=True)
        logits = torch.tanh(rows.sum(1)) @ head
        sparse.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.tensor(batch["labels"])).backward()
        sparse.step()
    state = state_after(program, engine, batches(20))
    np.testing.assert_allclose(state["param/table"], table.detach().numpy(), rtol=0, atol=1e-10)
    moments = sparse.state[table]
    np.testing.assert_allclose(state["opt/first_moment/table"], moments["exp_avg"].numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["opt/second_moment/table"], moments["exp_avg_sq"].numpy(), rtol=0, atol=1e-12)


def adafactor_of_rows(start: dict[str, np.ndarray], steps: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The table, and what Adafactor keeps for it, where its formulas see the rows of each batch as if they were the table."""
    table, head = start["param/table"].copy(), start["param/head"]
    row, column = np.zeros((ROWS, 1)), np.zeros((1, WIDTH))
    root = np.finfo(np.float64).eps
    for t, batch in enumerate(steps, 1):
        variable = torch.tensor(table, requires_grad=True)
        rows = torch.nn.functional.embedding(torch.tensor(batch["x"] % ROWS), variable)
        logits = torch.tanh(rows.sum(1)) @ torch.tensor(head)
        torch.nn.functional.cross_entropy(logits, torch.tensor(batch["labels"])).backward()
        read = np.unique(batch["x"] % ROWS)
        p, g = table[read], variable.grad.numpy()[read]
        share = t**-0.8
        row[read] = (1 - share) * row[read] + share * (g * g).mean(1, keepdims=True)
        column = (1 - share) * column + share * (g * g).mean(0, keepdims=True)
        variance = row[read] / max(row[read].mean(), root) * column
        u = g / np.maximum(np.sqrt(variance), root)
        alpha = max(1e-3, np.sqrt((p * p).mean())) * min(0.0625, t**-0.5)
        table[read] = p * (1 - 0.0625 * 0.1) - alpha * u / max(1.0, np.sqrt((u * u).mean()))
    return {"param/table": table, "opt/row_variance/table": row, "opt/column_variance/table": column}


@pytest.mark.parametrize("engine", ["reference", "onnxruntime", "torch"])
def test_adafactor_takes_the_rows_of_a_batch_for_the_table(engine: str) -> None:
    optimizer = optim.adafactor(lr=0.0625, weight_decay=0.1)
    program = burnish.compile(classifier(), optimizer=optimizer, sparse=["table"], trainable=["table"])
    by_rows = {entry.updates for entry in program.signature["step"].outputs if entry.by_rows}
    assert by_rows == {"param/table", "opt/row_variance/table"}
    state = state_after(program, engine, batches(8))
    for name, array in adafactor_of_rows(program.initial_state(), batches(8)).items():
        np.testing.assert_allclose(state[name], array, rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "onnxruntime", "torch"])
def test_adafactor_where_a_batch_reads_nothing_but_padding(engine: str) -> None:
    optimizer = optim.adafactor(lr=0.05)
    program = burnish.compile(classifier(), optimizer=optimizer, sparse=["table"], hold_rows={"table": [3]})
    padding = {"x": np.full((2, LENGTH), 3), "labels": np.array([0, 1])}
    state = state_after(program, engine, [*batches(2), padding, *batches(1)])
    assert all(np.isfinite(array).all() for array in state.values())
    np.testing.assert_array_equal(state["param/table"][3], program.initial_state()["param/table"][3])


def test_adafactor_is_dense_unless_the_table_is_named() -> None:
    with pytest.warns(DenseGradientWarning, match=r"adafactor moves every row in every step; sparse=\['table'\]"):
        burnish.compile(classifier(), optimizer=optim.adafactor(), sparse="auto")


@pytest.mark.parametrize("optimizer", [optim.sgd(momentum=0.9), optim.adamw(), optim.sgd(weight_decay=0.1)], ids=str)
def test_rows_that_no_batch_reads_stay_where_the_optimizer_is_lazy(optimizer: optim.Optimizer) -> None:
    program = compiled(optimizer, sparse=["tab*"])
    start, state = program.initial_state(), state_after(program, "onnxruntime", batches())
    read = {int(row) % ROWS for batch in batches() for row in batch["x"].flat}
    unread = [row for row in range(ROWS) if row not in read]
    assert unread
    for name in ("param/table", *(name for name in state if name.startswith("opt/") and name.endswith("/table"))):
        assert state[name][unread].tobytes() == start[name][unread].tobytes(), name
        assert (state[name][sorted(read)] != start[name][sorted(read)]).any(axis=1).all(), name


def test_grad_gives_rows_and_apply_takes_them() -> None:
    program = compiled(optim.adagrad())
    (indices,) = (entry for entry in program.signature["grad"].outputs if entry.name == "indices:table")
    (rows,) = (entry for entry in program.signature["grad"].outputs if entry.name == "rows:table")
    assert (indices.role, indices.dtype.name, indices.extents) == ("indices", "INT64", (None,))
    assert (rows.role, rows.dtype.name, rows.extents) == ("rows", "DOUBLE", (None, WIDTH))
    assert {entry.updates for entry in program.signature["step"].outputs if entry.by_rows} == {
        "param/table",
        "opt/sum_of_squares/table",
    }
    assert Signature.from_dict(program.signature.to_dict()) == program.signature


def test_apply_adds_up_rows_that_come_twice() -> None:
    program = compiled(optim.adagrad(lr=0.5))
    state = program.initial_state()
    run = ReferenceEngine().load(program.apply)
    scalars = {entry.name: state[entry.name] for entry in program.signature["apply"].inputs if entry.is_state}
    common = {**scalars, "lr": np.float32(0.5), "grad:head": np.zeros((WIDTH, CLASSES))}
    twice = {"indices:table": np.array([3, 0, 3]), "rows:table": np.array([[1.0] * WIDTH, [2.0] * WIDTH, [4.0] * WIDTH])}
    once = {"indices:table": np.array([0, 3]), "rows:table": np.array([[2.0] * WIDTH, [5.0] * WIDTH])}
    for name, array in run({**common, **twice}).items():
        assert array.tobytes() == run({**common, **once})[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "onnxruntime", "torch"])
def test_held_rows_keep_their_bits_and_count_for_nothing(engine: str) -> None:
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.adagrad(lr=0.25))
    held = {"table": [1, 4]}
    dense = burnish.compile(classifier(), optimizer=optimizer, hold_rows=held)
    sparse = burnish.compile(classifier(), optimizer=optimizer, hold_rows=held, sparse="auto")
    start, expected, state = sparse.initial_state(), *(state_after(program, engine, batches()) for program in (dense, sparse))
    assert state["param/table"][[1, 4]].tobytes() == start["param/table"][[1, 4]].tobytes()
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("engine", ["reference", "onnxruntime", "torch"])
def test_a_loss_that_is_not_finite_leaves_the_table_as_it_was(engine: str) -> None:
    program = compiled(optim.adagrad())
    state = program.initial_state()
    state["param/table"][3, 0] = np.nan
    with burnish.Session(program, engine=engine, state=state) as session:
        session.step({"x": np.full((2, LENGTH), 1), "labels": np.zeros(2, np.int64)})
        before = session.state()
        with pytest.raises(NonFiniteLossError):
            session.step({"x": np.full((2, LENGTH), 3), "labels": np.zeros(2, np.int64)})
        after = session.state()
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_step_whose_scaled_gradients_overflow_leaves_the_table_as_it_was(engine: str) -> None:
    precision = burnish.MixedPrecision("float16", loss_scale=2.0**127)
    program = burnish.compile(classifier("float32"), optimizer=optim.adagrad(), precision=precision, sparse="auto")
    state = program.initial_state()
    state["param/head"] *= 100
    with burnish.Session(program, engine=engine, state=state) as session:
        before = session.state()
        assert session.step(batches()[0])["skipped"] == 1
        after = session.state()
        for name in ("param/table", "opt/sum_of_squares/table", "param/head"):
            assert before[name].tobytes() == after[name].tobytes(), name
        while session.step(batches()[0])["skipped"]:
            pass
        assert (session.state()["param/table"] != before["param/table"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "onnxruntime", "torch"])
def test_an_empty_batch_of_lookups_moves_nothing_in_the_table(engine: str) -> None:
    held = burnish.compile(classifier(), optimizer=optim.sgd(), sparse="auto", hold_rows={"table": list(range(ROWS - 1))})
    start = held.initial_state()
    state = state_after(held, engine, [{"x": np.zeros((2, LENGTH), np.int64), "labels": np.zeros(2, np.int64)}])
    assert state["param/table"].tobytes() == start["param/table"].tobytes()
    assert (state["param/head"] != start["param/head"]).any()


@pytest.mark.slow
def test_a_saved_program_goes_on_by_rows(tmp_path: Path) -> None:
    program = compiled(optim.rowwise_adagrad())
    program.save(tmp_path / "program")
    loaded = Program.load(tmp_path / "program")
    assert loaded.options["sparse"] == "auto"
    expected, state = (state_after(each, "onnxruntime", batches()) for each in (program, loaded))
    for name, array in expected.items():
        assert array.tobytes() == state[name].tobytes(), name


@pytest.mark.parametrize(
    ("model", "optimizer", "sparse", "reason"),
    [
        ({"tied": True}, optim.sgd(), "auto", "'table': Transpose 'tied_head' .* reads it too"),
        ({}, optim.adam(), "auto", r"'table': adam moves every row in every step; sparse=\['table'\] updates the rows"),
        ({}, optim.sgd(weight_decay=0.1), "auto", "'table': sgd moves every row in every step"),
        ({}, optim.lamb(), ["table"], "'table': lamb needs the gradient of every row"),
        ({}, optim.ema(optim.sgd()), "auto", "'table': ema needs the gradient of every row"),
        ({}, optim.chain(optim.add_decayed_weights(0.1), optim.sgd()), "auto", "add_decayed_weights moves every row"),
        ({}, optim.sgd(), ["head"], "'head': MatMul .* reads it, which is no lookup of rows"),
    ],
    ids=["tied", "adam", "decay", "lamb", "ema", "decayed_weights", "no_table"],
)
def test_what_stays_dense_is_warned_of_with_the_reason(model: Any, optimizer: Any, sparse: Any, reason: str) -> None:
    with pytest.warns(DenseGradientWarning, match=reason):
        program = burnish.compile(classifier(**model), optimizer=optimizer, sparse=sparse)
    assert not any(entry.by_rows for entry in program.signature["step"].outputs)


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        (["tabel"], "sparse: the pattern 'tabel' matches no parameter that trains; did you mean 'table'"),
        (3, "sparse must be None, 'auto', or names or patterns of embedding tables, .* not 3"),
    ],
)
def test_options_that_do_not_fit(sparse: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(classifier(), sparse=sparse)


@pytest.mark.slow
def test_engines_and_central_differences_agree_on_the_gradients_of_rows() -> None:
    program = compiled(optim.adagrad(), dtype="float32")
    assert compare_engines(program, ("reference", "onnxruntime", "torch"), batches()).agrees
    checked = {tensor.name: tensor for tensor in check_gradients(program).tensors}
    assert checked["param/table"].shape == (ROWS, WIDTH)
    assert all(tensor.agrees and not tensor.is_zero for tensor in checked.values())


@pytest.mark.slow
def test_another_optimizer_has_to_go_on_from_rows() -> None:
    program = compiled(optim.sgd())
    with pytest.raises(ConfigurationError, match="lamb needs that of every row: compile without sparse"):
        program.with_optimizer(optim.lamb())
    with pytest.raises(ConfigurationError, match=r"adam moves every row in every step: compile with sparse=\['table'\]"):
        program.with_optimizer(optim.adam())
    expected = state_after(compiled(optim.adagrad()), "reference", batches())
    state = state_after(program.with_optimizer(optim.adagrad()), "reference", batches())
    assert all(array.tobytes() == state[name].tobytes() for name, array in expected.items())
