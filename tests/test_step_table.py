"""The table of steps: its rows, its time, what is kept of a run that is cut off, and what is told of a result."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest
import torch

import table
import table_plan
import table_report
import table_rows
import workloads
from table_plan import Place, Schedule, places
from table_rows import Choice
from workloads import ClicksWorkload, prepare


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_every_model_has_a_row_for_each_batch_and_number_of_workers_once():
    ordered = places(table.MODELS, table_plan.BATCHES)
    assert len(ordered) == len(set(ordered)) == len(table.MODELS) * len(table_plan.BATCHES) * 2
    assert ordered[0] == Place("resnet50", 1, 1)
    assert {place.model for place in ordered[-4:]} == {"bert-base"}
    assert places(["mlp"], [3, 16], [1]) == [Place("mlp", 1, 16), Place("mlp", 1, 3)]


def test_rounds_are_spread_over_the_rows_that_fit_into_the_time():
    clock = Clock()
    schedule = Schedule(10, rounds=50, now=clock)
    first, second, third = (Place("mlp", 1, batch) for batch in (16, 4, 1))
    assert schedule.fits(first)
    clock.seconds = 100
    schedule.note(first, opening=70, rounds=6, of_rounds=60)
    assert schedule.expected(second) == 70 + 30
    # 500 s are left for two rows of 100 s: each gets 150 s more than it needs.
    assert schedule.end_of_rounds(second, [third]) == pytest.approx(100 + 100 + 150)
    assert schedule.goes_on(2, end=0.0)
    assert not schedule.goes_on(3, end=0.0)
    assert schedule.goes_on(3, end=101.0)
    assert not schedule.goes_on(50, end=101.0)
    clock.seconds = 510
    assert not schedule.fits(second)
    # The row after it does not fit beside it any more, so that the first may take what is left.
    clock.seconds = 450
    assert schedule.end_of_rounds(second, [third]) == pytest.approx(600)


def test_without_a_limit_a_row_takes_all_its_rounds():
    schedule = Schedule(None, rounds=5)
    place = Place("mlp", 1, 4)
    assert schedule.fits(place)
    assert schedule.left is schedule.end_of_rounds(place, []) is None
    assert [schedule.goes_on(done, None) for done in (4, 5)] == [True, False]


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (Place("resnet50", 1, 16), ["eager", "burnish-kernels", "channels_last+pages", "compile"]),
        (Place("resnet50", 1, 8), ["eager", "burnish-kernels", "channels_last+pages"]),
        (Place("bert-base", 1, 8), ["eager", "burnish-kernels", "fused+pages"]),
        (Place("dlrm", 1, 8), ["eager", "burnish-kernels-sparse", "sparse+pages"]),
        (Place("resnet50", 2, 16), ["ddp", "burnish-kernels", "ddp+pages"]),
    ],
)
def test_the_contenders_are_those_that_a_model_is_tuned_by(place, names):
    assert table_rows.contenders_of(place, Choice(["kernels"], ["tuned+pages", "compile"])) == names


def row_of(place, **seconds):
    """What would have been measured: the seconds of each contender, or why it has none."""
    contenders = [
        {"name": name.replace("_pages", "+pages"), "title": name, "refused": taken}
        if isinstance(taken, str)
        else {
            "name": name.replace("_pages", "+pages").replace("burnish_", "burnish-"),
            "title": name,
            "second_least_seconds": taken,
            "peak_bytes": 2e9,
            "first_step_seconds": 3.0,
            "versions": {"torch": "1.0"},
        }
        for name, taken in seconds.items()
    ]
    described = {"date": "2026-01-01", "rounds": 3, "threads": 2, "machine": {"processor": "a processor"}}
    return {
        **described,
        "model": place.model,
        "workers": place.workers,
        "batch": place.batch,
        "total": place.total,
        "contenders": contenders,
    }


ALONE = row_of(Place("mlp", 1, 4), eager=0.4, channels_last=0.3, channels_last_pages=0.2, burnish_torch=0.1)
HALF = row_of(Place("mlp", 1, 2), eager=0.2, channels_last="the loss of step 2 is 1 < 2", burnish_torch=0.05)
TOGETHER = row_of(Place("mlp", 2, 2), ddp=0.16, ddp_pages=0.12, burnish_torch=0.08)


def test_a_run_that_is_cut_off_keeps_its_rows_and_goes_on(tmp_path, monkeypatch):
    path, measured = tmp_path / "result.json", []

    def measure(place, choice, schedule, ahead):
        if place.batch == 2 and not measured.count(place):
            measured.append(place)
            raise KeyboardInterrupt
        measured.append(place)
        return row_of(place, eager=0.1)

    monkeypatch.setattr(table, "measure", measure)
    wanted = [Place("mlp", 1, batch) for batch in (4, 2, 1)]
    with pytest.raises(KeyboardInterrupt):
        table.run(wanted, Choice(), Schedule(None, 3), path)
    assert [row["batch"] for row in table_report.load(path)] == [4]
    assert table.run(wanted, Choice(), Schedule(None, 3), path, resume=True) == []
    assert [row["batch"] for row in table_report.load(path)] == [4, 2, 1]
    assert [place.batch for place in measured] == [4, 2, 2, 1]


def test_rows_that_there_is_no_time_for_are_left_out(tmp_path, monkeypatch):
    clock = Clock()

    def measure(place, choice, schedule, ahead):
        clock.seconds += 40
        schedule.note(place, 40, 3, 0)
        return row_of(place, eager=0.1)

    monkeypatch.setattr(table, "measure", measure)
    wanted = [Place("mlp", 1, batch) for batch in (4, 2, 1)]
    assert table.run(wanted, Choice(), Schedule(1.5, 3, clock), tmp_path / "result.json") == wanted[2:]


def test_the_tables_have_ratios_to_the_best_of_pytorch_and_name_who_has_no_time():
    text = table_report.tables([TOGETHER, HALF, ALONE])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| mlp")]
    assert lines[0] == ["mlp", "4", "400", "300", "200", "100", "2.00"]
    assert lines[1] == ["mlp", "2", "200", "–", "–", "50", "4.00"]
    assert lines[2] == ["mlp", "4", *["2.00 GB, 3.0 s"] * 4]
    # Two workers take 0.08 s for four samples: one process takes 0.1 s for four, and 0.05 s for two.
    assert lines[4] == ["mlp", "2 x 2", "160", "120", "80", "1.50", "1.25, 1.25"]
    assert "- No time for channels_last (mlp 2): the loss of step 2 is 1 &lt; 2" in text
    assert "Not measured (workers x batch of each): ResNet-50 1 x 1; " in text


def test_a_gain_over_one_process_of_another_machine_is_not_told():
    elsewhere = ALONE | {"machine": ALONE["machine"] | {"processor": "another"}}
    text = table_report.tables([TOGETHER, HALF, elsewhere])
    row = next(line for line in text.splitlines() if line.startswith("| mlp | 2 x 2 |"))
    assert row.split("|")[-2].strip() == "–, 1.25"


def test_the_picture_is_the_same_for_the_same_rows(tmp_path):
    for name in ("first.svg", "second.svg"):
        table_report.picture([ALONE, HALF], tmp_path / name)
    text = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "second.svg").read_text(encoding="utf-8")
    assert "burnish, torch engine" in text
    assert "onnxruntime-training" not in text


def test_the_documentation_has_the_table_of_the_latest_result():
    path = table_report.latest()
    text = table_report.DOCUMENT.read_text(encoding="utf-8")
    between = text.split(table_report.BEGIN)[1].split(table_report.END)[0]
    assert between.strip() == table_report.published(path), "run `python benchmarks/table.py --table`"
    page = table_report.PAGE.read_text(encoding="utf-8")
    between = page.split(table_report.SUMMARY)[1].split(table_report.SUMMARY_END)[0]
    assert path is not None
    assert between.strip() == table_report.summary(table_report.load(path)), "run `python benchmarks/table.py --table`"
    assert table_report.PICTURE.exists()


def test_the_summary_has_the_best_of_pytorch_and_the_speed_beside_it():
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table_report.summary([TOGETHER, HALF, ALONE]).splitlines()
    ]
    assert lines[2:] == [["mlp", "4", "400", "200", "100 (2.00)"], ["mlp", "2", "200", "200", "50 (4.00)"]]


def test_a_result_is_written_between_the_marks(tmp_path):
    result, document, page = tmp_path / "result.json", tmp_path / "document.md", tmp_path / "page.md"
    table_report.save([ALONE], result)
    document.write_text(f"before\n{table_report.BEGIN}\nold\n{table_report.END}\nafter\n", encoding="utf-8")
    page.write_text(f"before\n{table_report.SUMMARY}\nold\n{table_report.SUMMARY_END}\nafter\n", encoding="utf-8")
    table_report.write(result, document, page, tmp_path / "steps.svg")
    for path in (document, page):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "| mlp | 4 |" in text
        assert "old" not in text
    assert (tmp_path / "steps.svg").exists()


def test_the_last_result_of_each_other_processor_is_published_after_the_latest(tmp_path):
    for day, processor in enumerate(["older", "older", "a processor", "a processor"], start=1):
        rows = [{**ALONE, "date": f"day {day}", "machine": {"processor": processor}}]
        table_report.save(rows, tmp_path / f"2026-01-0{day}-table.json")
    text = table_report.published(table_report.latest(tmp_path))
    assert [line[:5] for line in text.splitlines() if line.startswith("day ")] == ["day 4", "day 2"]
    assert "### Before that, on older\n\nday 2, older" in text
    assert text.count("![Steps a second") == text.count("Not measured (") == 1
    assert table_report.published(None) == "No result is saved yet."


def test_a_recommendation_model_is_prepared_with_all_its_inputs(tmp_path, monkeypatch):
    workload = ClicksWorkload(rows=20, tables=3)
    monkeypatch.setattr(workloads, "WORKLOADS", {"clicks": workload})
    job = prepare(tmp_path, "clicks", 4)
    module = workload.build()
    module.load_state_dict(torch.load(job["weights"], weights_only=True))
    session = onnxruntime.InferenceSession(job["onnx"], providers=["CPUExecutionProvider"])
    with np.load(job["data"]) as data:
        feeds = {name: data[f"{name}0"] for name in ("numbers", "categories")}
        assert data["targets0"].shape == (4, 1)
    (logits,) = session.run(None, feeds)
    expected = module(*map(torch.from_numpy, feeds.values())).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert (job["loss"], job["optimizer"]["name"]) == ("bce_with_logits", "adagrad")


@pytest.mark.campaign
def test_a_tiny_table_is_measured_in_one_process_and_in_two(tmp_path, capsys):
    path = tmp_path / "tiny.json"
    table.main(["--tiny", "--working-tree", "--output", str(path)])
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["workers"], row["batch"], row["rounds"]) for row in rows] == [(1, 4, 2), (2, 4, 2)]
    for row, reference in zip(rows, ("eager", "ddp"), strict=True):
        theirs, ours = row["contenders"]
        assert (theirs["name"], ours["name"]) == (reference, "burnish-standard")
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        for contender in row["contenders"]:
            assert contender["second_least_seconds"] > 0
            assert contender["first_step_seconds"] > 0
            assert contender["peak_bytes"] > 10e6
    assert "mlp, 2 x 4: PyTorch DDP" in capsys.readouterr().out
    assert "| mlp | 2 x 4 |" in table_report.tables(rows)
