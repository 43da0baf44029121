"""Benchmarks run in an installation of the commit, and say so; figures of a working tree are not published."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

import compare
import compare_architectures
import comparison_table
import environments
import installation
import table
import table_report
from burnish.engines.onnxruntime import kernels as kernels_of_onnxruntime
from burnish.errors import EngineError
from burnish.kernels import compiling
from contender_kinds import KINDS

DOCTOR = {
    "level": "x86-64-v3",
    "cache": "/users/someone/.cache/burnish",
    "engines": {"onnxruntime": {"version": "1.0", "kernels": "/usr/lib/burnish_operators_1.so", "reason": None}},
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment that burnish was installed into, which this process runs in."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / installation.MARK).write_text("c0ffee\ntree", encoding="utf-8")
    spec = ModuleSpec("burnish", None, origin=str(tmp_path / "burnish" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    installation.described.cache_clear()
    yield tmp_path
    installation.described.cache_clear()


@pytest.mark.parametrize("benchmark", [table, compare, compare_architectures])
def test_figures_of_a_working_tree_are_not_published(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--working-tree", "--save"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "an installation: leave out --working-tree" in capsys.readouterr().err


def options(*arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    installation.add_options(parser)
    return parser, parser.parse_args(arguments)


def test_without_the_working_tree_figures_are_published(installed):
    assert installation.enter(*options("--save")) is None
    assert installation.commit() == "c0ffee"


def test_a_working_tree_has_no_environment(capsys):
    with pytest.raises(SystemExit, match="2"):
        installation.enter(*options("--working-tree", "--environment", "somewhere"))
    assert "leave it out, or --environment" in capsys.readouterr().err


def test_the_command_runs_in_the_installation_with_empty_caches(tmp_path, monkeypatch):
    script, told = tmp_path / "script.py", tmp_path / "told.json"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps([sys.executable, dict(os.environ)]))\n"
        "sys.exit(7)\n"
    )
    made = []
    monkeypatch.setattr(installation, "install", lambda environment: made.append(environment) or sys.executable)
    monkeypatch.setattr(sys, "argv", [str(script), "never read"])
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="7"):
        installation.enter(*options("--environment", str(tmp_path / "kept")), [str(told)])
    python, variables = json.loads(told.read_text())
    assert (python, made) == (sys.executable, [tmp_path / "kept"])
    assert "PYTHONPATH" not in variables
    folders = [variables[name] for name in installation.CACHES]
    assert len(set(folders)) == len(folders) == 4
    assert not any(os.path.exists(folder) or folder.startswith(str(tmp_path)) for folder in folders)
    with pytest.raises(SystemExit, match="7"):
        installation.enter(*options(), [str(told)])
    assert not made[1].parent.exists()


def test_an_environment_that_imports_burnish_from_elsewhere_is_refused(installed, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="/checkout/src/__init__.py"))
    with pytest.raises(SystemExit, match=r"imported from /checkout/src.*: unset PYTHONPATH"):
        installation.commit()


def test_no_folder_of_something_else_is_cleared(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit, match=r"holds other files.*name another --environment"):
        installation.install(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_command_that_fails_is_reported_with_its_reason():
    with pytest.raises(SystemExit, match=r"(?s)git nonsense failed: .*nonsense.*--working-tree"):
        installation._run("git", "nonsense")


def test_a_result_says_what_was_installed_and_names_no_folders(installed, monkeypatch):
    asked = []
    monkeypatch.setattr(installation, "_run", lambda *command: asked.append(command) or json.dumps(DOCTOR))
    case = compare.described([], "mlp", 4, None, "float32", 2, 3)
    assert asked == [(str(installation.Path(sys.executable).with_name("burnish")), "doctor", "--json")]
    assert case["commit"] == "c0ffee"
    assert case["doctor"]["engines"]["onnxruntime"]["kernels"] == "burnish_operators_1.so"
    assert "someone" not in json.dumps(case)


def test_a_working_tree_has_nothing_to_say_of_an_installation():
    assert installation.commit() is None
    assert not {"commit", "doctor"} & set(compare.described([], "mlp", 4, None, "float32", 2, 3))


def test_a_comparison_is_headed_by_its_level_and_an_older_one_by_the_mark():
    older = compare.described([], "mlp", 4, None, "float32", 2, 3) | {"machine": {"processor": "a processor"}}
    text = comparison_table.case_markdown(older)
    assert text.splitlines()[0].endswith(", a processor")
    assert text.splitlines()[2] == installation.NOT_INSTALLED
    text = comparison_table.case_markdown(older | {"doctor": DOCTOR})
    assert text.splitlines()[0].endswith(", a processor, level x86-64-v3")
    assert installation.NOT_INSTALLED not in text


def row(batch, **entries):
    described = {"date": "2026-01-01", "rounds": 3, "threads": 2, "machine": {"processor": "a processor"}, "contenders": []}
    return {**described, "model": "mlp", "workers": 1, "batch": batch, "total": batch, **entries}


def test_the_table_is_headed_by_the_level_and_an_older_one_by_the_mark():
    assert table_report.tables([row(4)]).splitlines()[2] == installation.NOT_INSTALLED
    text = table_report.tables([row(4, doctor=DOCTOR)])
    assert text.startswith("2026-01-01, a processor, level x86-64-v3, 2 threads, onnxruntime 1.0, 3 rounds:")
    assert installation.NOT_INSTALLED not in text
    mixed = table_report.tables([row(4, doctor=DOCTOR), row(2)]).splitlines()
    assert mixed[0].endswith(": mlp 1 x 4.")
    assert mixed[1].endswith(f": mlp 1 x 2. {installation.NOT_INSTALLED}")


@pytest.fixture
def engine_of(monkeypatch):
    monkeypatch.syspath_prepend(environments.PEERS)
    return importlib.import_module("burnish_step").engine_of


def test_a_contender_with_kernels_builds_none(engine_of, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "BUILT", tmp_path / "built")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(EngineError, match=r"no kernels for ONNX Runtime: no library for this .*`burnish doctor` says how"):
        engine_of(dict(KINDS["burnish-kernels"].settings))
    assert engine_of(dict(KINDS["burnish-onnxruntime"].settings)).kernels is None
    assert not list(tmp_path.iterdir())


def test_contenders_have_the_kernels_that_are_installed_unless_they_are_to_have_none(engine_of, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "BUILT", tmp_path)
    library = tmp_path / compiling.library_name(kernels_of_onnxruntime.SOURCE, compiling.native())
    library.touch()
    monkeypatch.setattr(kernels_of_onnxruntime, "_check_loads", lambda path: None)
    default, kernels, standard = (
        engine_of(dict(KINDS[f"burnish-{name}"].settings)).kernels for name in ("onnxruntime", "kernels", "standard")
    )
    assert (default, kernels, standard) == (library, library, None)


@pytest.mark.slow
@pytest.mark.skipif(not (installation.CHECKOUT / ".git").exists(), reason="there is nothing to clone in a source distribution")
def test_burnish_is_installed_from_a_clone_once(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_INSTALLED_KERNELS", "none")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = installation.install(tmp_path / "environment", requirements=None, options=["--no-deps"])
    found = "import importlib.util; print(importlib.util.find_spec('burnish').origin)"
    origin = subprocess.run([python, "-c", found], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert origin.startswith(str(tmp_path / "environment"))
    folder = str(installation.REQUIREMENTS.parent)
    ask = f"import sys; sys.path.append({folder!r}); import installation; print(installation.commit())"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip()
    assert told == installation._run("git", "-C", str(installation.CHECKOUT), "rev-parse", "HEAD")
    monkeypatch.setattr(installation.venv, "create", None)
    assert installation.install(tmp_path / "environment") == python
