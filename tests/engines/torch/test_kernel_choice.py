"""The choice between ways: what is measured, what is remembered, and what a file may hold."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.bindings.convolution import algorithms as convolutions
from burnish.engines.torch.runtime import kernel_choice
from burnish.errors import EngineError
from oracles.combinations import spread

WAYS = ["usual", "other"]


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """Where choices are remembered in a test; nothing is, to begin with."""
    path = tmp_path / "folder" / "choices.json"
    monkeypatch.setenv(kernel_choice.VARIABLE, str(path))
    forget()
    yield path
    forget()


def forget():
    """What this process has read and found, as if another one began."""
    kernel_choice._remembered.clear()
    kernel_choice.circumstances.cache_clear()
    kernel_choice._warn.cache_clear()
    convolutions._known.clear()


class Measuring:
    """Finds a way, and counts how often it was asked."""

    def __init__(self, finds="other"):
        self.finds, self.count = finds, 0

    def __call__(self):
        self.count += 1
        return self.finds


def choose(measure, key="key", sources=()):
    return kernel_choice.choose(key, WAYS, sources, measure)


def test_a_choice_is_measured_once_and_remembered_by_other_processes(file):
    measure = Measuring()
    assert [choose(measure), choose(measure)] == ["other", "other"]
    forget()
    assert choose(measure) == "other"
    assert measure.count == 1
    assert choose(Measuring("usual"), "another key") == "usual"
    (choices,) = json.loads(file.read_text())["choices"].values()
    assert choices == {"key": "other", "another key": "usual"}
    assert [path.name for path in file.parent.iterdir() if path.suffix != ".lock"] == [file.name]


@pytest.mark.parametrize(
    "held",
    [
        "",
        "{",
        "[]",
        "null",
        "\x80\x04]q\x00.",
        '{"format": 2, "choices": {}}',
        '{"format": 1, "choices": []}',
        '{"format": 1, "choices": {"a": 1}}',
        '{"format": 1, "choices": {"a": {"key": 1}}}',
        "[" * 100_000,
    ],
)
def test_a_file_of_another_form_is_replaced(held, file):
    file.parent.mkdir()
    file.write_text(held, encoding="latin-1")
    measure = Measuring()
    assert choose(measure) == "other"
    assert measure.count == 1
    assert json.loads(file.read_text())["format"] == kernel_choice.FORMAT


def test_a_file_that_is_too_large_is_not_read(file, monkeypatch):
    choose(Measuring())
    forget()
    monkeypatch.setattr(kernel_choice, "LARGEST_FILE", 10)
    measure = Measuring()
    choose(measure)
    assert measure.count == 1


def test_a_way_that_there_is_not_is_measured_again(file):
    choose(Measuring())
    file.write_text(file.read_text().replace("other", "__import__"))
    forget()
    measure = Measuring()
    assert choose(measure) == "other"
    assert measure.count == 1


@pytest.mark.parametrize("change", ["processor", "PyTorch", "source", "setting"])
def test_other_circumstances_have_choices_of_their_own(change, tmp_path, monkeypatch):
    source = tmp_path / "ways.py"
    source.write_text("one")
    assert choose(Measuring(), sources=[source]) == "other"
    if change == "processor":
        monkeypatch.setattr(kernel_choice, "model_name", lambda: "another")
    elif change == "PyTorch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    elif change == "source":
        source.write_text("two")
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    forget()
    measure = Measuring("usual")
    assert choose(measure, sources=[source]) == "usual"
    monkeypatch.undo()
    monkeypatch.setenv(kernel_choice.VARIABLE, str(tmp_path / "folder" / "choices.json"))
    source.write_text("one")
    forget()
    assert choose(measure, sources=[source]) == "other"
    assert measure.count == 1


def test_the_latest_choices_are_kept(file, monkeypatch):
    monkeypatch.setattr(kernel_choice, "MOST_CHOICES", 3)
    for key in "abcde":
        choose(Measuring(), key)
    (choices,) = json.loads(file.read_text())["choices"].values()
    assert list(choices) == ["c", "d", "e"]


def test_without_a_file_the_usual_way_is_taken(monkeypatch):
    monkeypatch.setenv(kernel_choice.VARIABLE, "off")
    measure = Measuring()
    assert choose(measure) == "usual"
    assert measure.count == 0


def test_where_nothing_can_be_written_the_usual_way_is_taken_and_the_log_says_so(file, caplog):
    file.parent.write_text("a file in the place of the folder")
    measure = Measuring()
    with caplog.at_level("WARNING", "burnish"):
        assert [choose(measure), choose(measure, "another key")] == ["usual", "usual"]
    assert measure.count == 0
    assert caplog.text.count("the choices between kernels cannot be remembered") == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_what_others_have_written_is_read_where_nothing_can_be_written(file):
    choose(Measuring())
    forget()
    file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    file.with_suffix(".lock").chmod(stat.S_IRUSR)
    try:
        assert choose(Measuring("usual")) == "other"
        assert choose(Measuring("other"), "another key") == "usual"
    finally:
        file.parent.chmod(stat.S_IRWXU)


def test_the_file_lies_with_what_else_the_engine_keeps(monkeypatch, tmp_path):
    monkeypatch.delenv(kernel_choice.VARIABLE)
    monkeypatch.delenv("BURNISH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_choice.file() == tmp_path / "burnish" / "kernel-choices.json"


def test_threads_that_want_the_same_choice_measure_it_once():
    measure = Measuring()
    found = []
    threads = [threading.Thread(target=lambda: found.append(choose(measure))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["other"] * 8
    assert measure.count == 1


@pytest.mark.slow
def test_processes_that_want_the_same_choices_agree(file):
    """Each finds ways of its own; all end with those that were found first."""
    program = """
import sys
from burnish.engines.torch.runtime import kernel_choice
name = sys.argv[1]
print([kernel_choice.choose(str(key), ["0", "1", "2"], [], lambda: name) for key in range(20)])
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(index)], stdout=subprocess.PIPE, text=True) for index in range(2)
    ]
    outputs = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert len(set(outputs)) == 1
    (choices,) = json.loads(file.read_text())["choices"].values()
    assert str(list(choices.values())) == outputs[0].strip()


class Clock:
    """Ways that take as long as they are told, and a clock that shows it."""

    def __init__(self, monkeypatch, **seconds):
        self.now, self.runs = 0.0, dict.fromkeys(seconds, 0)
        self.ways = {name: lambda name=name, taken=taken: self._run(name, taken) for name, taken in seconds.items()}
        monkeypatch.setattr(kernel_choice, "_clock", lambda: self.now)

    def _run(self, name, taken):
        self.runs[name] += 1
        if taken is None:
            raise RuntimeError("no memory")
        self.now += taken


def test_the_quickest_way_is_taken(monkeypatch):
    clock = Clock(monkeypatch, usual=0.010, slow=0.015, fast=0.005)
    assert kernel_choice.quickest(clock.ways) == "fast"


def test_the_usual_way_stays_where_another_is_hardly_faster(monkeypatch):
    assert kernel_choice.quickest(Clock(monkeypatch, usual=0.010, other=0.0085).ways) == "usual"


def test_what_takes_no_time_is_not_measured_further(monkeypatch):
    clock = Clock(monkeypatch, usual=0.0001, other=0.00001)
    assert kernel_choice.quickest(clock.ways) == "usual"
    assert clock.runs["other"] == 2


def test_the_usual_way_stays_without_all_runs_where_no_other_is_much_quicker(monkeypatch):
    clock = Clock(monkeypatch, usual=0.010, other=0.009)
    assert kernel_choice.quickest(clock.ways) == "usual"
    assert clock.runs == {"usual": 1 + kernel_choice.ENOUGH, "other": 1 + kernel_choice.ENOUGH}
    clock = Clock(monkeypatch, usual=0.010, other=0.007)
    assert kernel_choice.quickest(clock.ways) == "other"
    assert clock.runs == {"usual": 1 + kernel_choice.ROUNDS, "other": 1 + kernel_choice.ROUNDS}


def test_a_way_far_behind_runs_once(monkeypatch):
    clock = Clock(monkeypatch, usual=0.010, other=5.0)
    assert kernel_choice.quickest(clock.ways) == "usual"
    assert clock.runs["other"] == 1


def test_a_way_far_behind_in_a_trial_does_not_run_as_a_whole(monkeypatch):
    trials = Clock(monkeypatch, usual=0.1, other=0.001)
    clock = Clock(monkeypatch, usual=50.0, other=0.010)
    monkeypatch.setattr(kernel_choice, "_clock", lambda: trials.now + clock.now)
    assert kernel_choice.quickest(clock.ways, trials.ways) == "other"
    assert clock.runs["usual"] == 0


def test_a_way_that_fails_is_out(monkeypatch):
    assert kernel_choice.quickest(Clock(monkeypatch, usual=0.010, other=None).ways) == "usual"
    assert kernel_choice.quickest(Clock(monkeypatch, usual=None, other=0.010).ways) == "other"
    with pytest.raises(RuntimeError, match="no memory"):
        kernel_choice.quickest(Clock(monkeypatch, usual=None, other=None).ways)


def network(convolution, weight, rank):
    kernel = ", ".join(map(str, weight))
    count = int(np.prod(weight))
    values = ", ".join(map(str, np.random.default_rng(0).uniform(-0.5, 0.5, count).round(3)))
    space = ", ".join("20" for _ in range(rank))
    return onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 22]>
network (float[batch, 2, {space}] x) => (float[batch, features] y)
<float[{kernel}] w = {{{values}}}> {{
    t = {convolution} (x, w)
    y = Flatten (t)
}}""")


def losses(source, engine, rank, steps=2):
    program = burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    session = burnish.Session(program, engine)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(3, 2, *[20] * rank)).astype(np.float32)
    (shape,) = [predicted.shape for predicted in session.predict({"x": x}).values()]
    batch = {"x": x, "targets": generator.normal(size=shape).astype(np.float32)}
    return [session.step(batch)["loss"] for _ in range(steps)]


FORMS = {
    "signal": ("Conv<pads=[4, 4]>", (3, 2, 9), 1),
    "uneven padding": ("Conv<pads=[1, 3]>", (3, 2, 5), 1),
    "as long as before": ('Conv<auto_pad="SAME_UPPER", strides=[3]>', (3, 2, 4), 1),
    "wide": ("Conv", (3, 2, 3, 9), 2),
    "dilated": ("Conv<dilations=[2, 3]>", (3, 2, 3, 3), 2),
    "grouped": ("Conv<group=2>", (4, 1, 3, 3), 2),
    "volume": ("Conv<strides=[2, 1, 2]>", (3, 2, 3, 2, 1), 3),
    "transposed": ("ConvTranspose<strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]>", (2, 3, 4, 4), 2),
    "transposed signal": ("ConvTranspose<strides=[4], pads=[2, 2]>", (2, 3, 8), 1),
}


@spread("form", FORMS, test=3)
def test_programs_train_alike_whichever_way_is_chosen(form, file):
    convolution, weight, rank = FORMS[form]
    source = network(convolution, weight, rank)
    expected = losses(source, TorchEngine(compile="none"), rank)
    assert losses(source, TorchEngine(kernel_choice="fixed"), rank) == pytest.approx(expected, rel=1e-5)
    assert not file.exists()
    assert losses(source, TorchEngine(), rank) == pytest.approx(expected, rel=1e-5)
    (choices,) = json.loads(file.read_text())["choices"].values()
    assert all(key.startswith("convolution ") for key in choices)
    assert choices


def test_a_session_says_that_the_file_decides(file, monkeypatch):
    program = burnish.compile(network(*FORMS["signal"]), loss="mse", optimizer="sgd")
    batch = {"x": np.ones((2, 2, 20), np.float32), "targets": np.ones((2, 60), np.float32)}
    session = burnish.Session(program, "torch")
    assert session.describe()["route"] == "regions"
    session.step(batch)
    assert session.describe()["route"] == f"regions, some convolutions in the way that was the quickest here ('{file}')"
    monkeypatch.setenv(kernel_choice.VARIABLE, "off")
    assert session.describe()["route"] == "regions"


def test_layers_of_image_networks_are_not_measured(file):
    losses(network("Conv<pads=[1, 1, 1, 1]>", (3, 2, 3, 3), 2), TorchEngine(), 2)
    losses(network("Conv<strides=[2, 2]>", (3, 2, 5, 5), 2), TorchEngine(), 2)
    assert not file.exists()


def test_sizes_up_to_twice_as_large_are_measured_once(file, monkeypatch):
    asked = []
    monkeypatch.setattr(kernel_choice, "quickest", lambda ways, trials=None: asked.append(ways) or "channels_last")
    weight = torch.randn(4, 2, 5)
    for length in (40, 50, 64, 65):
        convolutions.convolve(torch.randn(3, 2, length), weight, None, [1], [2], [1], 1, True)
    assert len(asked) == 2


def test_numbers_of_threads_are_measured_each(file, monkeypatch, threads):
    convolutions.convolve(torch.randn(3, 2, 40), torch.randn(4, 2, 5), None, [1], [2], [1], 1, True)
    (choices,) = json.loads(file.read_text())["choices"].values()
    assert [key.split()[-1] for key in choices] == [f"t{threads}"]


def test_a_run_that_is_resumed_takes_the_ways_that_it_took(file):
    source = network(*FORMS["wide"])
    first = losses(source, TorchEngine(), 2, steps=3)
    forget()
    before = file.read_text()
    assert losses(source, TorchEngine(), 2, steps=3) == first
    assert file.read_text() == before


def test_a_choice_that_there_is_not_is_refused():
    with pytest.raises(EngineError, match="kernel_choice='fast': the torch engine takes 'measured' or 'fixed'; leave it out for"):
        TorchEngine(kernel_choice="fast")  # type: ignore[arg-type]


def test_the_folder_may_be_any_file_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_choice.VARIABLE, str(tmp_path / "a" / "b.json"))
    assert kernel_choice.file() == Path(tmp_path / "a" / "b.json")
