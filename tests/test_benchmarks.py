"""The comparison with peers runs, counts no time where losses disagree, and its tables are those of the results."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime
import pytest

import compare
import comparison_table
from compare import Kind
from workloads import prepare


@pytest.fixture(scope="module")
def case():
    """The perceptron in PyTorch and burnish, beside a contender that trains at another rate and one that fails."""
    other_rate = {"engine": "onnxruntime", "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.9}}
    kinds = {
        "burnish-other-rate": Kind("at another rate", "with_burnish.py", other_rate),
        "broken": Kind("broken", "with_burnish.py", {"engine": "onnxruntime", "onnx": "nowhere.onnx"}),
        "not-installed": Kind("not installed", "with_jax.py", {}, "an environment that is not there"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "KINDS", compare.KINDS | kinds)
        names = ["burnish-onnxruntime", *kinds]
        return compare.compare("mlp", 4, names, threads=1, rounds=2, warmup=1, turn_seconds=0.01)


def row(case, name):
    return next(row for row in case["contenders"] if row["name"] == name)


@pytest.mark.parametrize("name", ["eager", "burnish-onnxruntime"])
@pytest.mark.slow
def test_a_contender_is_timed(case, name):
    measured = row(case, name)
    assert len(measured["seconds"]) == 2
    assert 0 < measured["minimum_seconds"] <= measured["median_seconds"] <= measured["maximum_seconds"]
    assert measured["first_step_seconds"] > measured["build_seconds"] > 0
    assert measured["peak_bytes"] > 10e6
    assert measured["samples_per_second"] == pytest.approx(4 / measured["median_seconds"])


@pytest.mark.slow
def test_contenders_train_alike(case):
    losses, expected = row(case, "burnish-onnxruntime")["losses"], row(case, "eager")["losses"]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 3) for loss in losses}) == 3


@pytest.mark.slow
def test_no_time_counts_where_losses_disagree(case):
    refused = row(case, "burnish-other-rate")
    assert "the loss of step" in refused["refused"]
    assert "no time counts" in refused["refused"]
    assert not {"median_seconds", "seconds", "first_step_seconds", "losses"} & set(refused)


@pytest.mark.slow
def test_a_contender_that_fails_says_why(case):
    assert "nowhere.onnx" in row(case, "broken")["refused"]
    assert "--install" in row(case, "not-installed")["refused"]


@pytest.mark.slow
def test_the_table_says_who_was_refused(case):
    text = comparison_table.case_text(case)
    assert "no time: at another rate: the loss of step" in text
    ours, theirs = (row(case, name)["median_seconds"] for name in ("burnish-onnxruntime", "eager"))
    assert f"{theirs / ours:.2f} times as fast as the best of PyTorch" in comparison_table.summary(case)
    cells = {cells[0]: cells for cells in comparison_table.rows_of(case)}
    assert set(cells) == {"PyTorch eager", "burnish on onnxruntime"}
    assert cells["burnish on onnxruntime"][-1] == "1.00"


@pytest.mark.parametrize(
    ("losses", "step"), [([2.0, 1.0, 0.5], None), ([2.0, 1.0011, 0.5], 2), ([2.0, 1.0, math.nan], 3), ([math.inf, 1.0, 0.5], 1)]
)
def test_disagreement_names_the_step(losses, step):
    found = compare.disagreement(losses, [2.0, 1.0, 0.5], 1e-3)
    assert found is None if step is None else f"step {step}" in found


@pytest.mark.slow
def test_a_result_replaces_the_one_of_the_same_kind(case, tmp_path):
    comparison_table.save(case, tmp_path)
    comparison_table.save(case | {"batch": 8}, tmp_path)
    path = comparison_table.save(case | {"rounds": 9}, tmp_path)
    saved = comparison_table.latest_cases(tmp_path)
    assert path.name == f"{case['date']}-mlp.json"
    assert [(other["batch"], other["rounds"]) for other in saved] == [(8, 2), (4, 9)]


@pytest.mark.slow
def test_a_result_of_another_processor_is_kept_beside_it(case, tmp_path):
    other = case | {"machine": case["machine"] | {"processor": "another"}}
    for each in (case, other, case):
        comparison_table.save(each, tmp_path)
    processors = [saved["machine"]["processor"] for saved in comparison_table.latest_cases(tmp_path)]
    assert sorted(processors) == sorted(["another", case["machine"]["processor"]])
    assert ", another\n" in comparison_table.tables(tmp_path)


def test_a_contender_is_left_out_where_memory_would_not_do(monkeypatch, tmp_path):
    class Running:
        def memory(self):
            return 2_000_000_000

    monkeypatch.setattr(compare, "_available_memory", lambda: 2_500_000_000)
    running = compare.Entrant("eager", compare.KINDS["eager"], {}, Running())
    left_out = compare._admitted("burnish-torch", {}, tmp_path, "float32", [running])
    assert left_out.contender is None
    assert "2.5 GB are free" in left_out.row["refused"]


def test_a_network_that_labels_pixels_has_a_label_for_each(tmp_path):
    job = prepare(tmp_path, "unet", 2, size=16)
    session = onnxruntime.InferenceSession(job["onnx"], providers=["CPUExecutionProvider"])
    with np.load(job["data"]) as data:
        (logits,) = session.run(None, {"x": data["x0"]})
        assert logits.shape == (2, 4, 16, 16)
        assert data["labels0"].shape == (2, 16, 16)
        assert set(np.unique(data["labels0"])) <= set(range(4))


def test_a_network_over_audio_takes_samples_of_any_length(tmp_path):
    job = prepare(tmp_path, "audio", 2, size=4000)
    session = onnxruntime.InferenceSession(job["onnx"], providers=["CPUExecutionProvider"])
    with np.load(job["data"]) as data:
        assert data["x0"].shape == (2, 1, 4000)
        (logits,) = session.run(None, {"x": data["x0"]})
        assert logits.shape == (2, 35)


def test_unknown_contenders_are_named():
    assert compare.wanted_names("eager,compile+pages", "torch") == ["burnish-torch", "eager", "compile+pages"]
    with pytest.raises(ValueError, match="there is no contender 'tensorflow'"):
        compare.wanted_names("eager,tensorflow", "")


def test_the_documentation_has_the_tables_of_the_results():
    text = comparison_table.DOCUMENT.read_text(encoding="utf-8")
    between = text.split(comparison_table.BEGIN)[1].split(comparison_table.END)[0]
    assert between.strip() == comparison_table.tables().strip(), "run `python benchmarks/compare.py --table`"
