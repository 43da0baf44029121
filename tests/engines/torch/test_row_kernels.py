"""The kernels of embedding tables: sums of rows, lookups, and updates of rows in place; beside NumPy, and in programs."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import burnish
from burnish import optim
from burnish.data import synthetic_clicks
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.embedding import GRADIENT, SCALAR, STATE
from burnish.errors import EngineError
from burnish.kernels.elementwise.programs import OPERATIONS
from burnish.models import dlrm
from oracles.combinations import diagonal, spread

needs_kernels = pytest.mark.skipif(not kernels.available("rows"), reason="needs the engine's kernels")
pytestmark = needs_kernels

ROWS = [40, 7, 300]
EPS = 1e-4
"""So large that a gradient near zero, most of which was rounded, decides no step."""
OPTIMIZERS = {
    "sgd": optim.sgd(lr=0.1),
    "momentum": optim.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": optim.adagrad(lr=0.1, initial_accumulator_value=0.1),
    "rowwise_adagrad": optim.rowwise_adagrad(lr=0.1),
    "adam": optim.adam(lr=0.01, eps=EPS),
    "amsgrad": optim.adam(lr=0.01, eps=EPS, amsgrad=True),
    "adamw": optim.adamw(lr=0.01, eps=EPS, weight_decay=0.1),
    "sparse_adam": optim.sparse_adam(lr=0.01, eps=EPS),
    "clipped by value": optim.chain(optim.clip_by_value(0.01), optim.adagrad(lr=0.1)),
    "clipped by global norm": optim.chain(optim.clip_by_global_norm(0.05), optim.sgd(lr=0.1)),
    "scheduled": optim.adagrad(lr=optim.schedules.cosine(0.1, steps=10)),
}


def drawn(rows: int, count: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, of which some come often and some count from the end, and rows."""
    generator = np.random.default_rng(seed)
    indices = np.minimum(generator.zipf(1.3, count) - 1, rows - 1) if count else np.empty(0, np.int64)
    indices = np.where(generator.random(count) < 0.3, indices - rows, indices)
    return torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(
        generator.standard_normal((count, width)).astype(np.float32)
    )


def summed(indices: torch.Tensor, rows: torch.Tensor, extent: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices that differ, ascending, and the sums in the order in which rows come."""
    distinct, places = np.unique(indices.numpy() % extent, return_inverse=True)
    sums = np.zeros((len(distinct), *rows.shape[1:]), rows.numpy().dtype)
    np.add.at(sums, places, rows.numpy())
    return distinct, sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("extent", "count", "width"), [(9, 40, 5), (1 << 20, 700, 16), (1 << 25, 5000, 3), (1, 6, 1), (5, 0, 4)])
def test_sums_of_rows_have_the_bits_of_additions_in_order(
    extent: int, count: int, width: int, dtype: torch.dtype, threads: int
) -> None:
    indices, rows = drawn(extent, count, width)
    rows = rows.to(dtype)
    distinct, sums = torch.ops.burnish.coalesce_rows(indices % extent, rows)
    expected, expected_sums = summed(indices, rows, extent)
    np.testing.assert_array_equal(distinct, expected)
    np.testing.assert_array_equal(sums, expected_sums)


def test_sums_take_rows_that_lie_apart() -> None:
    indices, rows = drawn(20, 30, 24)
    for part in (rows[:, 4:12], rows[:, ::2], rows.t().contiguous().t(), rows[:1].expand(30, 24)):
        _, sums = torch.ops.burnish.coalesce_rows(indices % 20, part)
        np.testing.assert_array_equal(sums, summed(indices, part.contiguous(), 20)[1])


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0,), (5000,)])
def test_lookups_are_rows_of_each_table(shape: tuple[int, ...], threads: int) -> None:
    generator = np.random.default_rng(0)
    tables = [
        generator.standard_normal((rows, *inner)) for rows, inner in ((50, (16,)), (7, (3,)), (9, (2, 5)), (11, ()), (4, (0,)))
    ]
    dtypes = (np.float32, np.float64, np.int64, np.float32, np.float32)
    tables = [table.astype(dtype) for table, dtype in zip(tables, dtypes, strict=True)]
    indices = [generator.integers(-len(table), len(table), shape) for table in tables]
    results = torch.ops.burnish.lookup_rows(
        [torch.from_numpy(table) for table in tables], [torch.from_numpy(np.asarray(places)) for places in indices]
    )
    for table, places, result in zip(tables, indices, results, strict=True):
        np.testing.assert_array_equal(result, table[places])


@pytest.mark.parametrize("index", [5, -6, 1 << 40])
def test_an_index_of_no_row_is_refused_with_its_value(index: int) -> None:
    tables = [torch.zeros(9, 2), torch.zeros(5, 2)]
    indices = [torch.tensor([1, -9]), torch.tensor([0, index])]
    with pytest.raises(RuntimeError, match=f"table 1 of this call has 5 rows, and none of index {index}"):
        torch.ops.burnish.lookup_rows(tables, indices)
    plan = torch.tensor([2, 2, 1, 0, 5, STATE, GRADIENT, 0, OPERATIONS["Add"], 2, 0, 1, -1])
    gradient = torch.ones(2, 2)
    operands = [indices[0], tables[0], gradient, indices[1], tables[1], gradient]
    with pytest.raises(RuntimeError, match=f"table 1 of this call has 5 rows, and none of index {index}"):
        torch.ops.burnish.update_rows_(operands, plan, torch.zeros(0, dtype=torch.float64))
    assert not any(table.any() for table in tables)  # neither was written


@diagonal(("count", [1, 90, 3000]), ("width", [1, 3, 16, 100, 700]))
def test_an_update_reads_and_writes_each_row_once(width: int, count: int, threads: int) -> None:
    """Row-wise Adagrad, with a number for each row beside its elements."""
    extent = 500 if width > 100 else 5000
    indices, gradient = drawn(extent, count, width)
    generator = np.random.default_rng(1)
    table, total = generator.standard_normal((extent, width)).astype(np.float32), generator.random(extent).astype(np.float32)
    names = ("Mul", "RowMean", "Add", "Sqrt", "Div", "SubMul")
    square, mean, add, root, divide, less = (OPERATIONS[name] for name in names)
    # Registers: table, total, gradient, rate; next table, next total; temporary.
    code = [square, 6, 2, 2, -1, mean, 7, 6, -1, -1, add, 5, 1, 7, -1, root, 7, 5, -1, -1, divide, 6, 2, 7, -1, less, 4, 6, 3, 0]
    plan = torch.tensor([1, 4, 2, 0, len(code), STATE, STATE, GRADIENT, SCALAR, 0, 1, *code])
    state, slot = torch.from_numpy(table.copy()), torch.from_numpy(total.copy())
    operands = [indices, state, slot, gradient, torch.tensor(0.1)]
    torch.ops.burnish.update_rows_(operands, plan, torch.zeros(0, dtype=torch.float64))
    distinct, sums = summed(indices, gradient, extent)
    total[distinct] += (sums.astype(np.float64) ** 2).mean(axis=1).astype(np.float32)
    table[distinct] -= np.float32(0.1) * (sums / np.sqrt(total[distinct])[:, None])
    np.testing.assert_allclose(slot, total, rtol=1e-6)
    np.testing.assert_allclose(state, table, rtol=1e-5, atol=1e-6)
    untouched = np.setdiff1d(np.arange(extent), distinct)
    np.testing.assert_array_equal(state[untouched], table[untouched])


@functools.cache
def program(optimizer: str) -> burnish.Program:
    model = dlrm(ROWS, numbers=3, width=8, bottom=(6,), top=(5,))
    tables = [f"table_{place}" for place, _ in enumerate(ROWS, 1)]
    return burnish.compile(model, loss="bce_with_logits", optimizer=OPTIMIZERS[optimizer], metrics=[], sparse=tables)


def batches(count: int = 4) -> Iterator[dict[str, np.ndarray]]:
    data = synthetic_clicks(16 * count, ROWS, numbers=3)
    for start in range(0, 16 * count, 16):
        batch = data.batch(np.arange(start, start + 16))
        batch["category_2"] = batch["category_2"] - ROWS[1]  # counted from the end
        yield batch


@spread("name", OPTIMIZERS, test=2)
def test_a_program_updates_its_rows_by_the_kernel(name: str) -> None:
    states = []
    for compiled in ("regions", "none"):
        with burnish.Session(program(name), engine=TorchEngine(compile=compiled)) as session:
            for batch in batches():
                session.step(batch)
            states.append(session.state())
            runner = session._runner
            assert (runner._row_updates is not None) == (compiled == "regions")
            assert bool(runner._row_writes) == (compiled == "none")
    for entry, expected in states[1].items():
        np.testing.assert_allclose(states[0][entry], expected, rtol=2e-5, atol=1e-6, err_msg=entry)
    for entry, start in program(name).initial_state().items():
        if entry.startswith("param/table"):
            assert (states[0][entry] != start).any(), entry


@pytest.mark.slow
def test_tables_that_are_alike_are_updated_by_one_program() -> None:
    with burnish.Session(program("adam"), engine=TorchEngine()) as session:
        session.step(next(batches()))
        updates = session._runner._row_updates
    assert len(updates.updates) == len(ROWS)
    assert len({update.program for update in updates.updates}) == 1
    assert len({update.indices for update in updates.updates}) == len(ROWS)


def test_what_the_kernel_does_not_compute_stays_in_the_graph() -> None:
    """A table of float64."""
    from compiler.test_sparse_tables import batches as lookups
    from compiler.test_sparse_tables import classifier

    double = burnish.compile(classifier("float64"), optimizer="adagrad", sparse="auto", metrics=[])
    states = []
    for engine in (TorchEngine(), "reference"):
        with burnish.Session(double, engine=engine) as session:
            for batch in lookups():
                session.step(batch)
            states.append(session.state())
            if engine != "reference":
                assert session._runner._row_updates is None
                assert session._runner._row_writes
    np.testing.assert_allclose(states[0]["param/table"], states[1]["param/table"], rtol=1e-12)


def test_a_kernel_that_refuses_says_that_the_state_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with burnish.Session(program("sgd"), engine=TorchEngine()) as session:
        first, second = list(batches(2))
        session.step(first)

        def run(*operands: object) -> None:
            raise RuntimeError("no memory left")

        monkeypatch.setattr(session._runner._row_updates, "run", run)
        with pytest.raises(
            EngineError, match=r"updated the state at 'param/table_\d': no memory left.*restore the last checkpoint"
        ):
            session.step(second)
