"""What burnish says of the machine it runs on, and what a run says of its session."""

from __future__ import annotations

import json
import os

import pytest

from burnish.engines import available
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.kernels import building, compiling
from burnish.training import environment
from burnish.version import __version__

needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs files with owners")


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "nothing-installed")
    monkeypatch.delenv("BURNISH_KERNELS", raising=False)


def test_doctor_says_what_sessions_run_on(run):
    library = OnnxRuntimeEngine(kernels=True).kernels
    found = json.loads(run("doctor", "--json").stdout)
    assert list(found) == [
        *("burnish", "python", "platform", "cpu", "level", "engines"),
        *("compiler", "cache", "threads", "memory_limit", "advice"),
    ]
    assert set(found["engines"]) == set(available())
    assert found["burnish"] == __version__
    assert found["level"] == compiling.cpu_level()
    assert found["engines"]["onnxruntime"] == {
        "version": environment.sys.modules["onnxruntime"].__version__,
        "kernels": str(library),
        "reason": None,
    }
    assert found["engines"]["reference"]["reason"] == "this engine has none"
    assert found["memory_limit"] > 1e8
    text = run("doctor").stdout
    assert f"kernels in {library}\n" in text
    assert f"processor: {found['cpu']}, {found['level']}, {found['threads']} cores\n" in text
    assert "advice" not in text


def test_doctor_names_the_remedy_for_missing_kernels_and_it_works(run, nothing_installed, monkeypatch):
    monkeypatch.setattr(environment.engines, "available", lambda: ("onnxruntime",))
    text = run("doctor").stdout
    assert "): no kernels: no library for this processor (" in text
    assert "advice: Build them once with OnnxRuntimeEngine(kernels=True) or --kernels\n" in text
    monkeypatch.setattr(compiling, "find_compiler", lambda: None)
    assert "advice: Install g++ or clang++, and build them once with" in run("doctor").stdout


def test_doctor_says_that_kernels_are_switched_off(run, monkeypatch):
    monkeypatch.setattr(environment.engines, "available", lambda: ("onnxruntime",))
    monkeypatch.setenv("BURNISH_KERNELS", "off")
    found = json.loads(run("doctor", "--json").stdout)
    assert found["engines"]["onnxruntime"]["reason"] == "BURNISH_KERNELS=off switches them off"
    assert "unset BURNISH_KERNELS" in found["advice"][0]


@needs_owners
def test_doctor_names_a_cache_that_others_can_write(run, nothing_installed, monkeypatch):
    monkeypatch.setattr(environment.engines, "available", lambda: ("reference",))
    building.cache_folder().mkdir(parents=True)
    building.cache_folder().chmod(0o777)
    assert "can be written by other users" in json.loads(run("doctor", "--json").stdout)["advice"][0]


def test_doctor_says_which_engine_is_missing(run, monkeypatch):
    from burnish.engines import registry

    monkeypatch.setattr(environment.engines, "available", lambda: ("torch",))
    monkeypatch.setitem(registry.BUILT_IN, "torch", "no_such_module:TorchEngine")
    text = run("doctor").stdout
    assert "engine torch: The engine 'torch' cannot be loaded: No module named 'no_such_module'" in text
    assert json.loads(run("doctor", "--json").stdout)["engines"]["torch"]["version"] is None


@pytest.mark.slow
def test_a_run_says_what_it_computes_on(run, folder):
    OnnxRuntimeEngine(kernels=True)
    options = ("--data", "data.npz", "--epochs", "1", "--output", "runs/first")
    text = run("train", "model.onnx", *options, "--threads", "2").stdout
    level = kernels.find_library().level
    assert f"onnxruntime: kernels for {level}; 2 threads; float32\n" in text
    session = json.loads((folder / "runs/first/run.json").read_text())["session"]
    assert session["kernels"] == str(kernels.find_library().path)
    assert (session["engine"], session["threads"], session["precision"]) == ("onnxruntime", 2, "float32")
    options = ("--data", "data.npz", "--epochs", "2", "--output", "runs/first", "--resume")
    text = run("train", "model.onnx", *options, "--no-kernels", "--threads", "1").stdout
    assert "onnxruntime: no kernels, as kernels=False goes without them; 1 thread; float32\n" in text
    session = json.loads((folder / "runs/first/run.json").read_text())["session"]
    assert (session["kernels"], session["threads"]) == (None, 1)
