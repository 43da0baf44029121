"""The comparison with peers runs, counts no time where losses disagree, and its tables are those of the results."""

from __future__ import annotations

import importlib
import math

import numpy as np
import onnxruntime
import pytest
import torch

import architecture_table
import compare
import compare_architectures
import comparison_table
import environments
import profile_step
import quantization
import wrapped_cost
from architectures.catalogue import ARCHITECTURES
from architectures.sizes import SIZED
from burnish.engines.torch import native as kernels
from burnish.engines.torch.runtime.autograd_node import NAME
from contender_kinds import Kind
from installation import NOT_INSTALLED
from workloads import ARCHITECTURE, prepare


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
    running = compare.Entrant("eager", {}, Running())
    left_out = compare._admitted("burnish-torch", {}, tmp_path, "float32", [running])
    assert left_out.contender is None
    assert "2.5 GB are free" in left_out.row["refused"]


@pytest.mark.slow
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


def test_every_architecture_has_a_size_to_be_timed_in():
    assert list(SIZED) == list(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inputs", "fed"),
    [
        ("bert", ["input_ids", "attention_mask"], ["input_ids", "attention_mask", "labels"]),
        ("ssd", ["x", "classes", "wanted"], ["x", "classes", "wanted"]),
    ],
)
def test_an_architecture_is_prepared_with_all_its_inputs(name, inputs, fed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(environments.PEERS)
    read_feeds = importlib.import_module("job").read_feeds
    job = prepare(tmp_path, ARCHITECTURE + name, 3)
    session = onnxruntime.InferenceSession(job["onnx"], providers=["CPUExecutionProvider"])
    batches = read_feeds(job)
    assert [list(feeds) for feeds in batches] == [fed] * 3
    assert [entry.name for entry in session.get_inputs()] == inputs
    (output,) = session.run(None, {key: batches[0][key] for key in inputs})
    assert output.shape == ((3, 5) if name == "bert" else ())
    assert (job["loss"], job["optimizer"]["name"]) == (("cross_entropy", "adamw") if name == "bert" else (None, "sgd"))
    module = SIZED[name][0].module(**({"style": "sdpa"} if name == "bert" else {}))
    assert len(job["trainable"]) == len(list(module.parameters()))


@pytest.mark.campaign
def test_an_architecture_trains_alike_in_every_contender():
    (case,) = compare_architectures.measured("mnist", [1], rounds=2, warmup=0, turn_seconds=0.01)
    assert [row["name"] for row in case["contenders"]] == list(compare_architectures.CONTENDERS)
    assert architecture_table.refusals(case) == []
    assert architecture_table.ratio(case, "eager") == 1.0
    assert architecture_table.ratio(case, "burnish-torch", "cpu") > 0
    assert architecture_table.line(case).startswith("mnist ")


def architecture_case(name, threads, seconds):
    """What would have been saved, with the seconds of three rounds or the reason why there are none for each contender."""
    rows = [
        {"name": contender, "title": contender, "refused": taken}
        if isinstance(taken, str)
        else {
            "name": contender,
            "seconds": taken,
            "median_seconds": sorted(taken)[1],
            "first_step_seconds": 2.0,
            "versions": {"torch" if contender == "eager" else "onnxruntime": "1.0"},
        }
        for contender, taken in seconds.items()
    ]
    described = {"date": "2026-01-01", "rounds": 3, "batch": 4, "machine": {"processor": "a processor"}}
    return {**described, "model": ARCHITECTURE + name, "threads": threads, "contenders": rows}


def test_the_table_of_architectures_has_ratios_of_rounds_and_names_the_slower(tmp_path):
    eager = [0.1, 0.2, 0.4]
    quick = {"eager": eager, "burnish-torch": [0.05, 0.1, 0.4], "burnish-onnxruntime": [0.2, 0.4, 0.4]}
    slow = {"eager": eager, "burnish-torch": [0.11, 0.22, 0.3], "burnish-onnxruntime": "out of memory"}
    cases = [architecture_case(name, threads, quick) for name in ("bert", "vit") for threads in (1, 2)]
    path = architecture_table.save([*cases[:3], architecture_case("vit", 2, slow)], tmp_path)
    assert path == architecture_table.latest(tmp_path)
    text = architecture_table.table(path)
    assert "| bert | 4 | 200 ms | 0.50 | 2.00 | 200 ms | 0.50 | 2.00 | 2.00 s | 2.00 s | 2.00 s |" in text
    assert "| vit | 4 | 200 ms | 0.50 | 2.00 | 200 ms | 1.10 | no time | 2.00 s | 2.00 s |  |" in text
    assert "Slower than eager on the torch engine: vit." in text
    assert text.splitlines()[2] == NOT_INSTALLED
    assert architecture_table.refusals(architecture_case("vit", 2, slow)) == ["vit on 2: burnish-onnxruntime: out of memory"]
    architecture_table.save([case | {"doctor": {"level": "avx2"}} for case in cases], tmp_path)
    text = architecture_table.table(path)
    assert "None is slower on the torch engine." in text
    assert "a processor, level avx2, torch 1.0" in text
    assert NOT_INSTALLED not in text


def test_the_documentation_has_the_table_of_architectures():
    text = architecture_table.DOCUMENT.read_text(encoding="utf-8")
    between = text.split(architecture_table.BEGIN)[1].split(architecture_table.END)[0]
    expected = architecture_table.table(architecture_table.latest())
    assert between.strip() == expected, "run `python benchmarks/compare_architectures.py --table`"


@pytest.mark.slow
def test_a_step_is_profiled_operator_by_operator():
    text = profile_step.profiled("mlp", threads=1, rows=5)
    assert "Input Shapes" in text
    assert "burnish::" in text or "aten::" in text


@pytest.mark.slow
def test_the_cost_of_wrapping_is_told_beside_what_pytorch_takes_itself():
    pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")
    threads = torch.get_num_threads()
    try:
        least = wrapped_cost.measured(rounds=2)
    finally:
        torch.set_num_threads(threads)
    node = ["an empty node"] if kernels.available(NAME) else []
    assert list(least) == ["wrapped", "its two graphs", "eager", *node, "an empty function", "one sum"]
    assert 0 < least["its two graphs"] < least["wrapped"] < math.inf
    above = least["wrapped"] - least["its two graphs"]
    assert f"Above its graphs: {above:.0f} us" in wrapped_cost.text(least)


@pytest.mark.campaign
def test_quantization_is_measured_after_training_and_in_it(tmp_path):
    train, test = quantization.tested(1, seed=0)
    data = quantization.Pictures(train.x[:3200], train.labels[:3200]), quantization.Pictures(test.x[:500], test.labels[:500])
    ((kind, row),) = quantization.measure("resnet", ["int4"], 0, 4, data, tmp_path)
    assert kind == "int4"
    assert row.trained == row.simulated
    assert min(row.longer, row.trained) > 0.1  # a hundredth is chance
    assert row.trained > row.after
    assert row.steps <= 1.01
    assert row.differ == 0
    assert row.integer_layers == row.layers == 10
    assert row.faster > 0
    assert quantization.Row(0.97, 0.97, 0.93, 0.96, 0.96, 1.0, 0.0, 9, 9, 1.2).recovered.strip() == "75%"
    assert quantization.Row(0.97, 0.97, 0.969, 0.96, 0.96, 1.0, 0.0, 9, 9, 1.2).recovered.strip() == "-"
