"""Embedding tables in mapped files: the bits of tables in memory, tables that a process may not hold, and what a kill leaves."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.data import synthetic_clicks
from burnish.engines.array_runner import ArrayRunner
from burnish.engines.reference import ReferenceEngine
from burnish.errors import CheckpointError, ConfigurationError, EngineError
from burnish.files.mapped_tables import LOG, MappedTables
from burnish.files.state_file import StateFile
from burnish.models import dlrm
from burnish.training import read_checkpoint
from burnish.training.callbacks import Callback
from burnish.training.checkpoint import place_of
from oracles.same_state import assert_same_state

ROWS = [40, 300]
DATA = synthetic_clicks(96, ROWS, numbers=2)
TABLES = {f"{kind}/table_{place}" for kind in ("param", "opt/sum_of_squares") for place in (1, 2)}


@functools.cache
def program() -> burnish.Program:
    model = dlrm(ROWS, numbers=2, width=4, bottom=(3,), top=(3,))
    adagrad = burnish.optim.adagrad(lr=0.1, initial_accumulator_value=0.1)
    return burnish.compile(model, loss="bce_with_logits", optimizer=adagrad, metrics=[], sparse="auto")


def step(session: burnish.Session, *numbers: int) -> None:
    for number in numbers:
        start = 8 * (number % 12)
        session.step(DATA.batch(np.arange(start, start + 8)))


@functools.cache
def in_memory(engine: str = "onnxruntime") -> dict[str, np.ndarray]:
    """The state after four steps."""
    with burnish.Session(program(), engine=engine, threads=1) as session:
        step(session, 0, 1, 2, 3)
        return session.state()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
def test_steps_write_into_the_files(engine: str, tmp_path: Path) -> None:
    with burnish.Session(program(), engine=engine, threads=1, tables=tmp_path) as session:
        assert_same_state(session.state(), program().initial_state())
        step(session, 0, 1, 2, 3)
        assert_same_state(session.state(), in_memory(engine))
        session.save_checkpoint(tmp_path.with_suffix(".safetensors"))
    assert_same_state(session.state(), in_memory(engine))
    assert_same_state(read_checkpoint(tmp_path.with_suffix(".safetensors")).state, in_memory(engine))
    files = [np.fromfile(path, np.float32) for path in sorted(tmp_path.glob("*.bin"))]
    for name, content in zip(sorted(TABLES), files, strict=True):
        np.testing.assert_array_equal(content.reshape(-1), in_memory(engine)[name].reshape(-1))


@pytest.mark.slow
def test_a_state_that_is_given_or_loaded_is_written(tmp_path: Path) -> None:
    start = program().initial_state(seed=5)
    with burnish.Session(program(), state=start, tables=tmp_path) as session:
        expected = {name: array.copy() for name, array in start.items()}
        start["param/table_1"][:] = 0
        assert_same_state(session.state(), expected)
        session.load_state(in_memory())
        assert_same_state(session.state(), in_memory())
        assert not np.shares_memory(session.state()["param/table_1"], session.state()["param/table_1"])
    with burnish.Session(program(), tables=tmp_path) as again:
        assert_same_state(again.state(), program().initial_state())
        with pytest.raises(EngineError, match=r"of this session, which is closed, were in .* another session has that now"):
            session.state()


@pytest.mark.parametrize("scheme", [None, "xavier"])
def test_initial_entries_are_the_initial_state(scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = program().initial_state(3, scheme)
    monkeypatch.setattr("burnish.program.initialization.DRAWN_AT_ONCE", 50)
    entries = program().initial_entries(3, scheme)
    for name, array in expected.items():
        target = np.empty_like(array)
        entries.read_into(name, target)
        assert target.tobytes() == array.tobytes(), name
    with burnish.Session(program(), state=program().initial_entries(3, scheme), tables=tmp_path) as session:
        assert_same_state(session.state(), expected)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The checkpoint after four steps, of a session that took two more before it was gone."""
    path = tmp_path / "checkpoints/last.safetensors"
    session = burnish.Session(program(), tables=tmp_path / "tables")
    session.save_checkpoint(path, journal=True)
    for number in range(4):
        step(session, number)
        session.save_checkpoint(path, journal=True)
    step(session, 7, 8)
    assert session.state()["param/table_2"].tobytes() != in_memory()["param/table_2"].tobytes()
    session._tables._mapped._lock.close()  # as the system does when a process is killed
    return path


@pytest.mark.slow
def test_a_run_goes_on_in_the_files_by_what_was_written_since(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    whole = StateFile.read_into
    monkeypatch.setattr(StateFile, "read_into", lambda self, name, *rest: (read.append(name), whole(self, name, *rest)))
    checked = []
    check_digest = StateFile.check_digest
    monkeypatch.setattr(StateFile, "check_digest", lambda self: (checked.append(self._path.name), check_digest(self))[1])
    for _ in range(2):
        with burnish.Session(program(), tables=saved.parents[1] / "tables") as session:
            session.restore(saved)
            assert not TABLES & set(read), "tables were copied"
            assert set(checked) == {saved.name}, "the base was read"
            assert_same_state(session.state(), in_memory())
            step(session, 5, 6)
            session._tables._mapped.release = session._tables._mapped._lock.close


@pytest.mark.slow
@pytest.mark.parametrize("why", ["another start of the system", "no log", "a whole checkpoint", "an earlier checkpoint"])
def test_where_that_is_not_known_the_checkpoint_is_copied(saved: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, expected = saved.parents[1] / "tables", in_memory()
    if why == "another start of the system":
        monkeypatch.setattr("burnish.files.mapped_tables._boot", lambda: "another")
    elif why == "no log":
        (tables / LOG).unlink()
    elif why == "a whole checkpoint":
        with burnish.Session(program(), state=expected) as session:
            session.save_checkpoint(saved)
    else:
        with burnish.Session(program()) as session:
            session.restore(saved)
            step(session, 9)
            session.save_checkpoint(saved, journal=True)
            expected = session.state()
    with burnish.Session(program(), tables=tables) as session:
        session.restore(saved)
        assert_same_state(session.state(), expected)
        step(session, 10)
        if why != "a whole checkpoint":
            session.save_checkpoint(saved, journal=True)
            assert_same_state(read_checkpoint(saved).state, session.state())


@pytest.mark.slow
def test_a_log_that_is_cut_short_says_nothing_of_its_last_record(saved: Path) -> None:
    mapped = saved.parents[1] / "tables"
    content = (mapped / LOG).read_bytes()
    tables = MappedTables(mapped, {name: (array.dtype, array.shape) for name, array in in_memory().items() if name in TABLES})
    whole = tables._written_since(place_of(saved))
    for cut in (1, 9, 40):
        (mapped / LOG).write_bytes(content[:-cut])
        fewer = tables._written_since(place_of(saved))
        assert all(set(rows) <= set(whole[name]) for name, rows in fewer.items())
        assert sum(rows.size for rows in fewer.values()) < sum(rows.size for rows in whole.values())
    (mapped / LOG).write_bytes(content[:3])
    assert tables._written_since(place_of(saved)) is None


@pytest.mark.slow
def test_a_log_that_grows_too_long_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program(), tables=tmp_path / "tables") as session:
        session.save_checkpoint(path, journal=True)
        assert (tmp_path / "tables" / LOG).exists()
        step(session, *range(12))
        assert not (tmp_path / "tables" / LOG).exists()
        session.restore(path)
        assert_same_state(session.state(), program().initial_state())


@pytest.mark.slow
def test_a_filling_that_fails_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program(), state=in_memory()) as session:
        session.save_checkpoint(path)
    with burnish.Session(program(), tables=tmp_path / "tables") as session:
        step(session, 0)

        def fail(self, name, *rest):
            raise CheckpointError("the disk is gone")

        with monkeypatch.context() as broken:
            broken.setattr(StateFile, "read_into", fail)
            with pytest.raises(CheckpointError, match="the disk is gone"):
                session.restore(path)
        with pytest.raises(EngineError, match=r"were filled in part, and then that failed: restore a checkpoint"):
            step(session, 1)
        session.restore(path)
        assert_same_state(session.state(), in_memory())


class Copying(ReferenceEngine):
    name = "copying"

    def open(self, graphs, state, **options):
        return ArrayRunner(graphs, state, lambda graph: None)


@pytest.mark.slow
def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match="tables: the engine 'copying' does not work on tables in files: use engine='onnxruntime'"
    ):
        burnish.Session(program(), engine=Copying(), tables=tmp_path / "copying")
    dense = burnish.compile(dlrm([6], numbers=2, width=4), loss="bce_with_logits", metrics=[])
    with pytest.raises(ConfigurationError, match="tables: no table of this program is updated by rows"):
        burnish.Session(dense, tables=tmp_path / "dense")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"holds something else already, such as 'notes\.txt': name a folder for tables"):
        burnish.Session(program(), tables=tmp_path / "used")
    open_session = burnish.Session(program(), tables=tmp_path / "tables")
    with pytest.raises(ConfigurationError, match="another session keeps its tables in"):
        burnish.Session(program(), tables=tmp_path / "tables")
    open_session.close()
    other = burnish.compile(
        dlrm([41, 300], numbers=2, width=4), loss="bce_with_logits", metrics=[], optimizer="sgd", sparse="auto"
    )
    with pytest.raises(ConfigurationError, match="holds the tables of another program: name another folder, or remove this one"):
        burnish.Session(other, tables=tmp_path / "tables")
    with pytest.raises(ConfigurationError, match="tables: several workers do not keep their tables in files"):
        burnish.Session(program(), tables=tmp_path / "workers", parallel=burnish.DataParallel())
    with pytest.raises(CheckpointError, match=r"The tables cannot be kept in .*: .* Choose a folder .* room for [\d,]+ bytes"):
        MappedTables(tmp_path / "large", {"param/t": (np.dtype(np.float32), (1 << 40, 16))})


@pytest.mark.slow
def test_a_table_that_is_cut_short_ends_the_step_and_not_the_process(tmp_path: Path) -> None:
    options = {"epochs": 1, "batch_size": 8, "run_directory": tmp_path / "run", "tables": tmp_path / "tables", "progress": False}

    class Cut(Callback):
        def on_step_end(self, run, step):
            if step.step == 5:
                os.truncate(tmp_path / "tables" / "table-0001.bin", 100)

    run = burnish.Trainer(program(), DATA, checkpoint_every=4, callbacks=[Cut()], **options)
    said = (
        r"table-0001\.bin' holds 100 of its 4,800 bytes: .* batch 6; '.*latest\.safetensors' holds the last state that was whole"
    )
    with pytest.raises(CheckpointError, match=said):
        run.run()
    run.session.close()
    with pytest.raises(CheckpointError, match="go on from the last checkpoint"):
        run.session.state()
    burnish.Trainer(program(), DATA, resume=True, **options).run()
    whole = burnish.Trainer(program(), DATA, **{**options, "run_directory": tmp_path / "whole", "tables": None})
    whole.run()
    assert_same_state(read_checkpoint(run.latest).state, whole.session.state())


@pytest.mark.slow
def test_a_session_that_nothing_refers_to_holds_no_folder(tmp_path: Path) -> None:
    gc.disable()
    try:
        lost = burnish.Session(program(), tables=tmp_path / "tables")
        lost.itself = lost  # as a circle that Python collects only now and then
        del lost
        burnish.Session(program(), tables=tmp_path / "tables").close()
    finally:
        gc.enable()


def killed_in_a_step(folder: Path, after: int) -> None:
    """A process that is killed while a step writes its rows."""
    with burnish.Session(program(), tables=folder / "tables") as session:
        session.save_checkpoint(folder / "last.safetensors", journal=True)
        step(session, 0, 1, 2, 3)
        session.save_checkpoint(folder / "last.safetensors", journal=True)
        step(session, 4)
        note = session._runner.row_changes.log
        left = [after]

        def dying(entries, rows):
            note(entries, rows)
            for table, name in ((session._tables._mapped.tables[name], name) for name in entries):
                if not left[0]:
                    table[rows[: len(rows) // 2]] = np.nan
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                assert name in TABLES

        session._runner.row_changes.log = dying
        step(session, 5)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
@pytest.mark.parametrize("after", [0, 3])
def test_a_kill_among_the_rows_of_a_step_leaves_no_trace(after: int, tmp_path: Path) -> None:
    program()
    process = multiprocessing.get_context("fork").Process(target=killed_in_a_step, args=(tmp_path, after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    torn = np.concatenate([np.fromfile(path, np.float32) for path in (tmp_path / "tables").glob("*.bin")])
    assert np.isnan(torn).any()
    with burnish.Session(program(), tables=tmp_path / "tables") as session:
        assert session._tables.agrees_with(place_of(tmp_path / "last.safetensors"))
        session.restore(tmp_path / "last.safetensors")
        assert_same_state(session.state(), in_memory())


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np, onnx
import burnish
import onnxruntime, torch  # their libraries are no part of what is counted
from onnx import helper, numpy_helper

folder, engine = Path(sys.argv[1]), sys.argv[2]
rows, width = 4_000_000, 64  # a gigabyte, and a slot of as many
with (folder / "table.data").open("wb") as file:
    file.truncate(4 * rows * width)
table = onnx.TensorProto(name="table", data_type=1, dims=(rows, width), data_location=1)
for key, value in (("location", "table.data"), ("offset", "0"), ("length", str(4 * rows * width))):
    table.external_data.add(key=key, value=value)
head = numpy_helper.from_array(np.tile(np.float32([1, -1]), (width, 1)) / width, "head")
nodes = [helper.make_node("Gather", ["table", "x"], ["looked_up"]), helper.make_node("MatMul", ["looked_up", "head"], ["logits"])]
inputs = [helper.make_tensor_value_info("x", 7, ["batch"])]
graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("logits", 1, ["batch", 2])], [table, head])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "model.onnx")
with open("/proc/self/statm") as file:
    data = int(file.read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (data + (1 << 29), data + (1 << 29)))
optimizer = burnish.optim.adagrad(lr=0.1)
program = burnish.compile(folder / "model.onnx", optimizer=optimizer, metrics=[], sparse="auto")
try:
    program.initial_state()["param/table"].sum()
except (MemoryError, burnish.errors.BurnishError):
    print("the table alone does not fit")
rng = np.random.default_rng(0)
with burnish.Session(program, engine=engine, threads=1, tables=folder / "tables") as session:
    drawn = rng.integers(0, rows, (3, 64))
    for x in drawn:
        session.step({"x": x, "labels": rng.integers(0, 2, 64)})
    table = session._tables._mapped.tables["param/table"]
    others = np.setdiff1d(np.arange(10**6), drawn)[::1000]
    print("rows", int(table[drawn.reshape(-1)].any(axis=1).sum()), "others", int(table[others].any()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the system that counts anonymous memory alone")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_table_that_the_process_may_not_hold(engine: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path), engine]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == ["the table alone does not fit", "rows 192 others 0"]
