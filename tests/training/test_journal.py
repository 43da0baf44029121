"""Checkpoints with a journal: the bits of a whole checkpoint, by what changed alone; what is not whole is refused by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.data import synthetic_clicks
from burnish.engines.row_writes import RowChanges, RowWrite
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.state_file import read_state_file
from burnish.models import dlrm
from burnish.training import read_checkpoint, tables
from burnish.training.checkpoint import open_checkpoint, place_of
from files.stamping import write_arrays
from oracles.same_state import assert_same_state

ROWS = [400, 3000]
DATA = synthetic_clicks(96, ROWS, numbers=2)
ENGINES = ["onnxruntime", "torch", "reference"]


@pytest.fixture(autouse=True)
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.training.run_folder.draw_curves", lambda *arguments: None)


@functools.cache
def program() -> burnish.Program:
    model = dlrm(ROWS, numbers=2, width=4, bottom=(3,), top=(3,))
    return burnish.compile(model, loss="bce_with_logits", optimizer=burnish.optim.adagrad(lr=0.1), metrics=[], sparse="auto")


def step(session: burnish.Session, number: int) -> None:
    start = 8 * (number % 12)
    session.step(DATA.batch(np.arange(start, start + 8)))


def journal_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "journal").glob("*.journal"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_checkpoint_is_the_whole_state(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program(), engine=engine, threads=1) as session:
        for number in range(4):
            step(session, number)
            step(session, number + 4)
            session.save_checkpoint(path, {"at": number}, journal=True)
            session.save_checkpoint(tmp_path / f"whole-{number}.safetensors", {"at": number})
            written, whole = read_checkpoint(path), read_checkpoint(tmp_path / f"whole-{number}.safetensors")
            assert_same_state(whole.state, written.state)
            assert (written.step, written.extra, written.engine) == (whole.step, whole.extra, whole.engine)
            assert_same_state(session.state(), written.state)
    assert len(list((tmp_path / "journal").glob("base-*"))) == 1
    assert 0 < journal_bytes(tmp_path) < 8 * 2 * 8 * 2 * (8 + 2 * 16) + 4000
    with burnish.Session(program(), engine="onnxruntime", seed=9) as other:
        assert other.restore(path) == {"at": 3}
        assert_same_state(other.state(), whole.state)


@pytest.mark.slow
def test_a_restored_session_goes_on_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program()) as session:
        session.save_checkpoint(path, journal=True)
        step(session, 0)
        session.save_checkpoint(path, journal=True)
    for number in range(1, 3):
        with burnish.Session(program()) as session:
            session.restore(path)
            before = journal_bytes(tmp_path)
            step(session, number)
            session.save_checkpoint(path, journal=True)
            assert journal_bytes(tmp_path) > before
            state = session.state()
    assert_same_state(read_checkpoint(path).state, state)
    assert len(list((tmp_path / "journal").iterdir())) == 2


def test_a_closed_session_writes_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program()) as session:
        session.save_checkpoint(path, journal=True)
        step(session, 0)
    session.save_checkpoint(path, journal=True)
    assert 0 < journal_bytes(tmp_path) < 8000
    assert_same_state(read_checkpoint(path).state, session.state())


@pytest.mark.slow
def test_a_journal_that_has_grown_becomes_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SHARE", 0.02)
    path = tmp_path / "last.safetensors"
    bases = set()
    with burnish.Session(program()) as session:
        for number in range(8):
            step(session, number)
            session.save_checkpoint(path, journal=True)
            files = {file.name for file in (tmp_path / "journal").iterdir()}
            bases |= {name for name in files if name.startswith("base")}
            assert len(files) <= 2
            assert_same_state(read_checkpoint(path).state, session.state())
    assert 2 <= len(bases) < 8


def test_a_state_that_was_loaded_begins_a_base(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program()) as session:
        session.save_checkpoint(path, journal=True)
        session.load_state(program().initial_state(seed=3))
        step(session, 0)
        session.save_checkpoint(path, journal=True)
        assert journal_bytes(tmp_path) == 0
        assert_same_state(read_checkpoint(path).state, session.state())


@pytest.mark.slow
def test_an_earlier_checkpoint_goes_on_without_harm_to_a_later_one(tmp_path: Path) -> None:
    early, late = tmp_path / "early.safetensors", tmp_path / "late.safetensors"
    with burnish.Session(program()) as session:
        session.save_checkpoint(early, journal=True)
        step(session, 0)
        session.save_checkpoint(late, journal=True)
        expected = session.state()
    with burnish.Session(program()) as session:
        session.restore(early)
        step(session, 5)
        session.save_checkpoint(early, journal=True)
        assert_same_state(read_checkpoint(early).state, session.state())
    assert_same_state(read_checkpoint(late).state, expected)


@pytest.mark.slow
def test_a_torn_tail_is_dropped_and_said(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    (rows,) = (tmp_path / "checkpoints/journal").glob("*.journal")
    size = rows.stat().st_size
    with rows.open("ab") as file:
        file.write(b"BNRJ torn")
    resumed = train(tmp_path, epochs=2, resume=True, run=False)
    (note,) = (note for note in resumed._notes if "Dropped" in note)
    assert f"the last 9 bytes of the journal '{rows}', of a checkpoint that was not finished" in note
    resumed.run()
    assert rows.stat().st_size > size
    train(tmp_path / "whole", epochs=2)
    whole = read_checkpoint(tmp_path / "whole/checkpoints/latest.safetensors").state
    assert_same_state(read_checkpoint(tmp_path / "checkpoints/latest.safetensors").state, whole)


def train(folder: Path, epochs: int, run: bool = True, **options) -> burnish.Trainer:
    settings = {"batch_size": 16, "checkpoint_every": 1, "threads": 1, "progress": False, "journal": True}
    trainer = burnish.Trainer(program(), DATA, run_directory=folder, epochs=epochs, **{**settings, **options})
    if run:
        trainer.run()
    return trainer


@pytest.mark.slow
def test_a_trainer_keeps_the_rolling_set_and_the_best(tmp_path: Path) -> None:
    train(tmp_path / "whole", epochs=2, journal=False)
    trainer = train(tmp_path / "run", epochs=2, keep_checkpoints=3)
    folder = tmp_path / "run/checkpoints"
    kept = [f"step-{number:08d}.safetensors" for number in (10, 11, 12)]
    assert sorted(path.name for path in folder.iterdir()) == ["best.safetensors", "journal", "latest.safetensors", *kept]
    assert [read_checkpoint(folder / name).step for name in kept] == [10, 11, 12]
    for name in ("latest", "best"):
        whole = read_checkpoint(tmp_path / f"whole/checkpoints/{name}.safetensors").state
        assert_same_state(read_checkpoint(folder / f"{name}.safetensors").state, whole)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < 40_000
    # One that goes on without journals writes whole checkpoints, and one that starts anew removes what was there.
    train(tmp_path / "run", epochs=3, resume=True, journal=False)
    assert place_of(trainer.latest) is None
    train(tmp_path / "run", epochs=1, overwrite=True, journal=False)
    assert not (folder / "journal").exists()


@pytest.mark.slow
def test_a_damaged_record_falls_back_on_the_checkpoint_before_it(tmp_path: Path) -> None:
    train(tmp_path, epochs=1, keep_checkpoints=3)
    (rows,) = (tmp_path / "checkpoints/journal").glob("*.journal")
    content = bytearray(rows.read_bytes())
    content[place_of(tmp_path / "checkpoints/step-00000005.safetensors").end.size + 60] ^= 1
    rows.write_bytes(content)
    resumed = train(tmp_path, epochs=2, keep_checkpoints=3, resume=True, run=False)
    assert resumed.session.step_count == 5
    assert any("is not the one that was written" in note for note in resumed._notes)
    resumed.run()
    train(tmp_path / "whole", epochs=2)
    whole = read_checkpoint(tmp_path / "whole/checkpoints/latest.safetensors").state
    assert_same_state(read_checkpoint(tmp_path / "checkpoints/latest.safetensors").state, whole)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program()) as session:
        session.save_checkpoint(path, journal=True)
        for number in range(2):
            step(session, number)
            session.save_checkpoint(path, journal=True)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "change", "message"),
    [
        ("base-*", lambda content: None, r"goes on from '.*base-.*', which is not there: keep the folder 'journal' beside it"),
        ("base-*", lambda content: content[: len(content) // 2], "is not a whole base of a journal"),
        (
            "base-*",
            lambda content: content[:-1] + b"\1",
            "is not a whole base of a journal: .*it has changed since it was written",
        ),
        ("*.journal", lambda content: None, r"The journal '.*' is not whole: .*No such file"),
        ("*.journal", lambda content: content[:-1], r"is not whole: it has [\d,]+ bytes in place of"),
        ("*.journal", lambda content: content[:-1] + b"\xff", r"the record at byte [\d,]+ is not the one that was written"),
        ("*.journal", lambda content: b"NONE" + content[4:], "at byte 0 begins no record"),
    ],
)
def test_what_is_not_whole_is_refused_by_name(written: Path, pattern: str, change, message: str) -> None:
    (path,) = (written.parent / "journal").glob(pattern)
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    with burnish.Session(program()) as session:
        before = session.state()
        with pytest.raises(CheckpointError, match=message):
            session.restore(written)
        assert_same_state(session.state(), before)


@pytest.mark.slow
def test_a_journal_of_another_base_is_refused(written: Path) -> None:
    (base,) = (written.parent / "journal").glob("base-*")
    with burnish.Session(program(), seed=4) as session:
        step(session, 7)
        session.save_checkpoint(base)
    with pytest.raises(CheckpointError, match=r"is not the base that the checkpoint '.*last\.safetensors' goes on from"):
        read_checkpoint(written)


@pytest.mark.parametrize("base", ["../last.safetensors", "base-0123456.safetensors", "/etc/passwd", 3])
def test_a_base_outside_of_the_folder_is_refused(written: Path, base: object) -> None:
    rewrite_header(written, lambda place: {**place, "base": base})
    with pytest.raises(CheckpointError, match="header of the checkpoint"):
        read_checkpoint(written)


def rewrite_header(path: Path, change) -> None:
    arrays, metadata = read_state_file(path, "checkpoint")
    write_arrays(path, arrays, {**metadata, "journal": json.dumps(change(json.loads(metadata["journal"])))})


def test_a_base_by_itself_is_a_checkpoint(written: Path) -> None:
    (base,) = (written.parent / "journal").glob("base-*")
    assert read_checkpoint(base).step == 0


def test_nothing_is_written_of_values_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    with burnish.Session(program()) as session:
        session.save_checkpoint(path, journal=True)
        step(session, 0)
        runner = session._runner
        row = int(next(iter(runner.row_changes.changed().values()))[0])
        name = next(iter(runner.row_changes.changed()))[0]
        present = runner._sets[0][name].array[row].copy()
        runner._sets[0][name].array[row] = np.nan
        with pytest.raises(CheckpointError, match=f"'{name}' holds NaN or infinite values"):
            session.save_checkpoint(path, journal=True)
        assert read_checkpoint(path).step == 0
        runner._sets[0][name].array[row] = present
        session.save_checkpoint(path, journal=True)
        assert_same_state(read_checkpoint(path).state, session.state())


def test_a_program_without_such_tables_is_refused(tmp_path: Path) -> None:
    model = dlrm([6], numbers=2, width=4, bottom=(3,), top=(3,))
    dense = burnish.compile(model, loss="bce_with_logits", optimizer="sgd", metrics=[])
    with pytest.raises(ConfigurationError, match=r"no table of this program is updated by rows.*compile with sparse='auto'"):
        burnish.Session(dense).save_checkpoint(tmp_path / "last.safetensors", journal=True)
    with pytest.raises(ConfigurationError, match="no table of this program is updated by rows"):
        burnish.Trainer(dense, synthetic_clicks(8, [6], numbers=2), run_directory=tmp_path / "run", journal=True, progress=False)


@pytest.mark.slow
def test_frozen_weights_are_in_the_base_alone(tmp_path: Path) -> None:
    model = dlrm(ROWS, numbers=2, width=4, bottom=(3,), top=(3,))
    frozen = burnish.compile(
        model, loss="bce_with_logits", optimizer="sgd", metrics=[], sparse="auto", trainable=["table_*", "top_2*"]
    )
    path = tmp_path / "last.safetensors"
    with burnish.Session(frozen) as session:
        session.save_checkpoint(path, journal=True)
        step(session, 0)
        session.save_checkpoint(path, journal=True)
        with open_checkpoint(path) as opened:
            assert "param/top_1.weight" in opened.state
        assert_same_state(read_checkpoint(path).state, session.state())


def test_rows_are_merged_as_they_come() -> None:
    changes = RowChanges()
    writes = [RowWrite("param/t", "i", "r"), RowWrite("opt/s/t", "i", "s")]
    changes.note(writes, {"i": np.array([[3]])})
    assert changes.changed() == {}
    changes.begin()
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 500, (64, 1)) for _ in range(400)]
    for rows in drawn:
        changes.note(writes, {"i": rows})
    ((entries, rows),) = changes.changed().items()
    assert entries == ("param/t", "opt/s/t")
    np.testing.assert_array_equal(rows, np.unique(np.concatenate(drawn)))
    assert sum(part.size for part in changes._noted["i"]._parts) < 5000
