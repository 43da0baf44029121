"""Rows of state entries that a step writes: what leaves its graph, and that a runner writes these rows and copies no table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.data import synthetic_clicks
from burnish.engines.row_writes import signature_of_writes, take_row_writes, written_by_rows
from burnish.errors import EngineError
from burnish.models import dlrm

TABLES = {f"{kind}/table_{place}" for kind in ("param", "opt/sum_of_squares") for place in (1, 2)}


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    model = dlrm([6, 50], numbers=2, width=4, bottom=(3,), top=(3,))
    return burnish.compile(model, loss="bce_with_logits", optimizer=burnish.optim.adagrad(), metrics=[], sparse="auto")


def test_the_step_returns_rows_in_place_of_tables(program: burnish.Program) -> None:
    signature, model = program.signature["step"], program.step.clone()
    names = [entry.name for entry in signature.outputs]
    writes = take_row_writes(model.graph, names, signature)
    assert written_by_rows(signature) == {write.entry for write in writes} == TABLES
    assert (
        names
        == [value.name for value in model.graph.outputs]
        == [entry.name for entry in signature_of_writes(signature, writes).outputs]
    )
    assert "ScatterND" not in {node.op_type for node in model.graph}
    # A table and its slot are written in the same rows.
    assert len({write.indices for write in writes}) == 2
    assert len({write.rows for write in writes}) == 4


def test_a_graph_that_computes_a_table_in_another_way_is_refused(program: burnish.Program) -> None:
    signature, model = program.signature["step"], program.step.clone()
    outputs = tuple(replace(entry, by_rows=entry.updates == "param/top_1.bias") for entry in signature.outputs)
    names = [entry.name for entry in signature.outputs]
    with pytest.raises(EngineError, match=r"'next:param/top_1\.bias' .* no ScatterND of them: compile the program again"):
        take_row_writes(model.graph, names, replace(signature, outputs=outputs))


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_runner_writes_into_the_table_that_it_has(program: burnish.Program, engine: str) -> None:
    data = synthetic_clicks(24, [6, 50], numbers=2)
    with burnish.Session(program, engine=engine) as session:
        addresses, states = [], []
        for start in range(0, 24, 8):
            session.step(data.batch(np.arange(start, start + 8)))
            addresses.append(table_addresses(session))
            states.append(session.state())
    assert addresses[0] == addresses[1] == addresses[2]
    for name in TABLES:
        assert (states[0][name] != states[2][name]).any(), name
    unread = np.setdiff1d(np.arange(50), data.arrays["category_2"])
    assert states[2]["param/table_2"][unread].tobytes() == program.initial_state()["param/table_2"][unread].tobytes()


def table_addresses(session: burnish.Session) -> dict[str, set[int]]:
    """Where the tables lie, in each of the sets of buffers that a runner has."""
    runner = session._runner
    if hasattr(runner, "_sets"):
        return {name: {buffers[name].array.ctypes.data for buffers in runner._sets} for name in TABLES}
    return {name: {runner._state[name].data_ptr()} for name in TABLES}


def test_no_table_has_a_second_buffer_on_onnx_runtime(program: burnish.Program) -> None:
    with burnish.Session(program, engine="onnxruntime") as session:
        session.step(synthetic_clicks(8, [6, 50], numbers=2).arrays)
        assert all(len(places) == 1 for places in table_addresses(session).values())


def test_a_dense_program_says_nothing_of_rows() -> None:
    model = dlrm([6], numbers=2, width=4, bottom=(3,), top=(3,))
    dense = burnish.compile(model, loss="bce_with_logits", optimizer="adagrad", metrics=[])
    assert written_by_rows(dense.signature["step"]) == frozenset()
    names = [entry.name for entry in dense.signature["step"].outputs]
    graph: ir.Graph = dense.step.clone().graph
    assert take_row_writes(graph, list(names), dense.signature["step"]) == []
    assert [value.name for value in graph.outputs] == names
