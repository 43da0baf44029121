"""Where the time of a step goes: every node belongs to a node of the model, times add up, the trace is one."""

from __future__ import annotations

import csv
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.engines.onnxruntime.profiling import KERNEL
from burnish.engines.profiling import NodeRun, Recording, updated_entries
from burnish.errors import ConfigurationError, EngineError
from burnish.models import residual_network
from burnish.training import Profile, profile
from burnish.training.profiling import BETWEEN, COLUMNS, shortened

BATCH = {"x": np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype(np.float32), "labels": np.arange(4)}


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="adam")


@pytest.fixture(scope="module", params=["onnxruntime", "torch"])
def measured(request, program) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            pytest.importorskip("torch")
            from burnish.engines.torch import profiling

            ticks = itertools.count()
            patch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks)))
        else:
            from burnish.engines.onnxruntime import profiling

            patch.setattr(profiling, "recording_of", recorded_at_an_even_pace(profiling.recording_of))
        return profile(program, BATCH, request.param, threads=1, steps=4)


def recorded_at_an_even_pace(recording_of):
    """The same of ONNX Runtime's events as if each node took a millisecond: a fast machine runs some within none of its ticks."""

    def recorded(events, *arguments):
        clock, run = 0, {}
        for event in sorted(events, key=lambda event: (event["ts"], event["name"] != "model_run")):
            if event["name"] == "model_run":
                run = event
                event |= {"ts": clock, "dur": 1000}
                clock += 1000
            elif event["name"].endswith(KERNEL):
                event |= {"ts": clock, "dur": 1000}
                run["dur"] += 1000
                clock += 1000
        return recording_of(events, *arguments)

    return recorded


@pytest.mark.slow
def test_every_node_belongs_to_one_of_the_model(measured):
    rows = {row.source: row for row in measured.sources}
    # ONNX Runtime's optimizer puts transpositions in, of which it does not say for which node.
    unknown = {run.operator for run in measured.recording.runs if run.source is None}
    assert unknown <= ({"Transpose"} if measured.engine == "onnxruntime" else set())
    operators = [source.split()[0] for source in rows if source.endswith(")")]
    assert operators.count("Conv") == 3
    assert operators.count("BatchNormalization") == 3
    assert {"the loss", BETWEEN} <= rows.keys()
    for source, row in rows.items():
        if source.startswith("Conv"):
            assert row.seconds["forward"] > 0
            assert row.seconds["backward"] > 0
            assert row.bytes["forward"] >= 4 * 4 * 8 * 8 * 4  # at least what it writes
            assert row.between == 0


def test_an_update_belongs_to_the_node_that_reads_the_parameter(measured, program):
    rows = {row.source: row for row in measured.sources}
    weights = [entry for entry in program.signature["step"].updates if entry.startswith("param/") and "convolution" in entry]
    convolutions = {measured.owners[entry]: measured.sizes[entry] for entry in weights}
    assert len(convolutions) == 3
    for source, size in convolutions.items():
        assert source.startswith("Conv")
        assert rows[source].seconds["update"] > 0
        # Adam reads and writes the weight and two slots.
        assert rows[source].bytes["update"] >= 6 * size
    elsewhere = rows["the optimizer"].bytes["update"] if "the optimizer" in rows else 0
    assert elsewhere <= 24  # the step's number
    assert {source.split()[0] for source, row in rows.items() if row.seconds["update"]} - {"the"} == {
        "BatchNormalization",
        "Conv",
        "Gemm",
    }


def test_a_call_that_updates_several_parameters_is_divided_by_their_sizes():
    owners = {"param/a": "Conv 'a'", "opt/momentum/a": "Conv 'a'", "param/b": "Gemm 'b'", "stat/m": "BatchNormalization 'm'"}
    sizes = {"param/a": 8, "opt/momentum/a": 8, "param/b": 4, "stat/m": 4}
    entries = ("param/a", "opt/momentum/a", "param/b", "step")
    runs = (
        NodeRun(0, "update", "", "the optimizer", 0.0, 5.0, 100, entries),
        NodeRun(0, "Mul", "n", "the updates of several layers", 5.0, 1.0, 8, ("stat/m",)),
        NodeRun(0, "Add", "n", "the optimizer", 6.0, 1.0, 8, ("step",)),
    )
    rows = {row.source: row for row in Profile("some", Recording(runs, (7.0,)), owners, sizes).sources}
    assert (rows["Conv 'a'"].seconds["update"], rows["Conv 'a'"].bytes["update"]) == (4, 80)
    assert (rows["Gemm 'b'"].seconds["update"], rows["Gemm 'b'"].bytes["update"]) == (1, 20)
    assert rows["BatchNormalization 'm'"].seconds == {"forward": 1, "backward": 0, "update": 0}
    assert rows["the optimizer"].seconds["update"] == 1


def test_what_an_update_is_computed_from_belongs_to_it():
    runs = [("rate", ["lr"], ["r"]), ("one", ["g", "r"], ["p"]), ("two", ["h", "r"], ["q"]), ("other", ["p0"], ["z"])]
    found = updated_entries(runs, {"p": ["param/p"], "q": ["param/q"]})
    assert found == {"rate": ("param/p", "param/q"), "one": ("param/p",), "two": ("param/q",)}


def test_times_add_up_to_the_step(measured):
    rows = measured.sources
    assert sum(row.total for row in rows) == pytest.approx(measured.step_seconds)
    assert [row.total for row in rows] == sorted((row.total for row in rows), reverse=True)
    assert sum(measured.phases.values()) < measured.step_seconds
    assert len(measured.recording.steps) == 4


def test_the_table_and_the_trace(measured, tmp_path):
    measured.write_table(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
    measured.write_trace(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    updates = [event["args"] for event in events if event["cat"] == "update"]
    assert any("param/classifier.weight" in told.get("entries", ()) and told["bytes"] > 0 for told in updates)
    assert len(events) == len(measured.recording.runs)
    assert {event["cat"] for event in events} == {"forward", "backward", "update"}
    assert all(lanes[event["tid"]] == event["cat"] for event in events)
    assert min(event["ts"] for event in events) >= 0
    for lane in lanes:  # one after the other
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == lane)
        assert all(after[0] >= before[1] - 1 for before, after in itertools.pairwise(own))


def test_the_quicker_half_of_the_steps_counts():
    source = "Conv 'a' (output 'y')"
    runs = [NodeRun(step, "Conv", "a", source, float(step), seconds, 8) for step, seconds in enumerate((1.0, 9.0, 3.0))]
    measured = Profile("some", Recording(tuple(runs), (2.0, 10.0, 4.0)))
    assert measured.step_seconds == 3
    rows = {row.source: row for row in measured.sources}
    assert (rows[source].total, rows[source].bytes["forward"], rows[source].runs) == (2, 8, 1)
    assert rows[BETWEEN].total == 1


def test_profiling_leaves_the_session_as_it_was(program):
    session = burnish.Session(program, threads=1)
    before = session.state()
    profile(program, BATCH, session.engine, threads=1, steps=1)
    after = session.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert session.engine.profile_prefix is None


def test_what_cannot_be_profiled_is_named(program):
    with pytest.raises(
        EngineError, match="The engine 'reference' cannot tell where the time of a step goes: profile on onnxruntime or"
    ):
        profile(program, BATCH, "reference")
    with pytest.raises(ConfigurationError, match="steps=0: give a whole number of at least one"):
        profile(program, BATCH, steps=0)


def test_a_long_table_is_shortened():
    rows = [[f"row {number}", 1.0, number] for number in range(6)]
    assert shortened(rows, 5) == rows
    assert shortened(rows, 3) == [*rows[:3], ["3 others", 3.0, 12]]


@pytest.mark.slow
def test_the_command_writes_a_profile(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.training.run_folder.draw_curves", lambda rows, path, names: None)
    monkeypatch.chdir(tmp_path)
    import onnx_ir as ir

    ir.save(residual_network(width=4, blocks=(1,)), "model.onnx")
    np.savez("data.npz", x=BATCH["x"], y=BATCH["labels"])
    command = ["train", "model.onnx", "--data", "data.npz", "--threads", "1", "--output"]
    plain = CliRunner().invoke(app, [*command, "plain"])
    profiled = CliRunner().invoke(app, [*command, "profiled", "--profile"])
    assert plain.exit_code == profiled.exit_code == 0, profiled.output
    assert "node of the model" in profiled.output
    assert "ms a step while it is timed (forward" in profiled.output
    assert (tmp_path / "profiled" / "profile.trace.json").exists()
    assert "the optimizer" in (tmp_path / "profiled" / "profile.csv").read_text()
    assert (tmp_path / "plain" / "tuned.onnx").read_bytes() == (tmp_path / "profiled" / "tuned.onnx").read_bytes()
