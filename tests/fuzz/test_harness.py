"""The harness sees what it is there to see, and the first of its cases lead to no defect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import onnx
import pytest

import burnish
from fuzz.format_course import FormatCourse
from fuzz.formats import SEALED, formats, make_of_format, read_mutant
from fuzz.mutants import FILES_OF, Mutant, make
from fuzz.mutations.registry import MUTATIONS
from fuzz.outcomes import Kind, kind_of
from fuzz.seeds import MODEL, seeds
from fuzz.tables import FAR, Tally

TESTS = Path(__file__).parent.parent
CASES = 120


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: workers are forked, and the tests have started threads."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=500)


@pytest.mark.slow
def test_the_first_cases_lead_to_no_defect(tmp_path: Path) -> None:
    """A small part of what ``make test-fuzz`` runs."""
    tally = tmp_path / "tally.json"
    done = python("-m", "fuzz", "run", "--cases", str(CASES), "--processes", "1", "--seconds", "30", "--tally", str(tally))
    assert done.returncode == 0, done.stdout + done.stderr
    counts = Tally()
    counts.read(tally)
    assert counts.total == CASES
    assert {seed for seed, _, _ in counts.counts} == set(seeds())
    assert counts.kinds[Kind.TRAINED] > 0
    assert counts.kinds[Kind.REFUSED] > 0


BROKEN = """
import ctypes, json, time, burnish
from fuzz.pool import Limits, run

def load(source):
    number = len(source)
    if number == 0:
        ctypes.string_at(0)
    if number == 1:
        while True:
            pass
    if number == 2:
        bytearray(1 << 32)
    if number == 3:
        raise KeyError("inside")
    if number == 4:
        raise burnish.errors.ModelError("something is wrong")
    if number == 5:
        raise burnish.errors.ModelError("the node 'dense' is wrong")
    if number == 6:
        time.sleep(1000)
    return None

def mutant(number):
    made = make(0, 0)
    made.seed, made.form, made.files = "made up", "bytes", {"model.onnx": bytes(number)}
    return made

from fuzz.mutants import make
burnish.load = load
outcomes = run(range(8), 0, 2, Limits(seconds=2.0, memory=1 << 29), lambda number: False, mutant)
print(json.dumps({outcome.number: [outcome.kind, outcome.error, outcome.place] for outcome in outcomes}))
"""


@pytest.mark.campaign
def test_every_kind_of_end_is_told_from_the_others() -> None:
    done = python("-c", BROKEN)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert {number: outcome[0] for number, outcome in outcomes.items()} == {
        "0": Kind.CRASH,
        "1": Kind.HANG,
        "2": Kind.MEMORY,
        "3": Kind.FOREIGN,
        "4": Kind.UNNAMED,
        "5": Kind.REFUSED,
        "6": Kind.HANG,
        "7": Kind.LOADED,
    }
    assert outcomes["0"][1:] == ["SIGSEGV", "__init__.py:string_at < "]
    assert outcomes["3"][1] == "KeyError"


@pytest.mark.parametrize("number", [0, 1, 2, 3, 50, 51])
def test_a_case_is_a_function_of_its_number(number: int) -> None:
    one, other = make(7, number), make(7, number)
    assert (one.seed, one.form, one.files, one.mutations) == (other.seed, other.form, other.files, other.mutations)
    assert one.options.random() == other.options.random()
    assert make(8, number).mutations != one.mutations


def test_mutations_can_be_left_out() -> None:
    number = next(number for number in range(200) if len(make(0, number).mutations) > 2 and not make(0, number).is_program)
    assert make(0, number, {1}).mutations[0] == make(0, number).mutations[0]
    assert len(make(0, number, {1}).mutations) == len(make(0, number).mutations) - 1


@pytest.mark.parametrize("rule", dict.fromkeys(MUTATIONS), ids=lambda rule: rule.__name__)
def test_every_mutation_changes_a_model(rule) -> None:
    changed = 0
    for number in range(60):
        name = list(seeds())[number % len(seeds())]
        if seeds()[name].is_program:
            continue
        model = onnx.ModelProto.FromString(seeds()[name].files[MODEL])
        before = model.SerializeToString(deterministic=True)
        if rule(Random(number), model) is not None:
            changed += model.SerializeToString(deterministic=True) != before
    assert changed > 2


def test_every_seed_is_whole(tmp_path: Path) -> None:
    for name, seed in seeds().items():
        folder = tmp_path / name
        folder.mkdir()
        for file, content in seed.files.items():
            (folder / file).write_bytes(content)
        if seed.is_program:
            assert burnish.Program.load(folder).step.graph.num_nodes()
        else:
            assert burnish.load(folder / MODEL).graph.num_nodes()


def test_an_error_that_names_nothing_is_a_defect() -> None:
    errors = burnish.errors
    assert kind_of(errors.ModelError("Relu 'a' (output 'b') is wrong")) is Kind.REFUSED
    assert kind_of(errors.ModelError("(op_type:Relu, node name: a): wrong")) is Kind.REFUSED
    assert kind_of(errors.ModelError("it is wrong")) is Kind.UNNAMED
    assert kind_of(errors.ModelError("'a' cannot be read all the same, a defect of burnish worth reporting")) is Kind.UNNAMED
    assert kind_of(ValueError("'a' is wrong")) is Kind.FOREIGN
    assert kind_of(MemoryError()) is Kind.MEMORY


def test_every_seed_of_a_format_is_whole(tmp_path: Path) -> None:
    for name, each in formats().items():
        folder = tmp_path / name
        folder.mkdir()
        read_mutant(Mutant(name, each.files, FILES_OF, [], Random(0)), folder)


def test_every_format_is_broken_in_many_ways() -> None:
    for name in formats():
        mutants = [make_of_format(0, number, name) for number in range(30)]
        assert len({tuple(mutant.files.items()) for mutant in mutants}) > 12, name
        assert mutants[7].files == make_of_format(0, 7, name).files
        assert any(mutant.form == SEALED for mutant in mutants) is formats()[name].is_sealed


@pytest.mark.slow
def test_the_first_cases_of_formats_lead_to_no_defect(tmp_path: Path) -> None:
    tally = tmp_path / "tally.json"
    done = python("-m", "fuzz", "formats", "--cases", "75", "--budget", "300", "--processes", "1", "--tally", str(tally))
    assert done.returncode == 0, done.stdout + done.stderr
    counts = Tally()
    counts.read(tally)
    assert {seed for seed, _, _ in counts.counts} == set(formats())


def test_a_file_that_is_read_against_its_digest_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(number for number in range(50) if make_of_format(0, number, "checkpoint").form == SEALED)
    mutant = make_of_format(0, number, "checkpoint")
    assert FormatCourse(mutant, tmp_path, print).run(number, True).kind is Kind.REFUSED
    monkeypatch.setattr("fuzz.format_course.read_mutant", lambda mutant, folder: {})
    assert FormatCourse(mutant, tmp_path, print).run(number, True).kind is Kind.SILENT


def test_a_run_that_trains_otherwise_than_its_file_says_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = Mutant("run.toml", dict(formats()["run.toml"].files), FILES_OF, [], Random(0))
    assert read_mutant(mutant, tmp_path)["lr"] == 0.1
    monkeypatch.setattr("burnish.cli.repetition._text", lambda value: "0.2" if value == 0.1 else str(value))
    with pytest.raises(AssertionError, match=r"lr = 0\.1, and the run has 0\.2"):
        read_mutant(mutant, tmp_path)


def test_tallies_add_up(tmp_path: Path) -> None:
    counts = Tally()
    counts.counts["old", FAR, Kind.TRAINED] = 3
    counts.write(tmp_path / "one.json", 1.4)
    both = Tally()
    for _ in range(2):
        both.read(tmp_path / "one.json")
    assert (both.total, both.kinds[Kind.TRAINED], both.seconds) == (6, 6, 2)


@pytest.mark.slow
def test_replay_says_what_was_done(tmp_path: Path) -> None:
    done = python("-m", "fuzz", "replay", "12", "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    mutant = make(0, 12)
    assert done.stdout.startswith(f"{mutant.seed}, given as {mutant.form}:")
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()} == mutant.files
