"""The package from the outside: what importing it costs, and which names it promises."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import burnish

LIBRARIES = ("numpy", "onnx", "onnx_ir", "onnxruntime", "safetensors", "sympy")
HEAVY = ("torch", "sklearn", "matplotlib", "pyarrow", "PIL", "pandas", "scipy")
PUBLIC = (
    "Program",
    "Session",
    "Trainer",
    "compile",
    "errors",
    "grad",
    "load",
    "losses",
    "metrics",
    "optim",
)


LAZY = (burnish.data, burnish.distributed, burnish.finetuning, burnish.training)
NOT_AT_FIRST = {
    "burnish.autodiff": "compiling differentiates",
    "burnish.cli": "the command alone has it",
    "burnish.compiler.prepare": "compiling does the work",
    "burnish.compiler.lowered_graphs": "a session that is opened lowers graphs",
    "burnish.data": "a trainer reads data",
    "burnish.distributed.options": "workers exchange",
    "burnish.engines.onnxruntime": "a session that is opened has an engine",
    "burnish.engines.torch": "a session that is opened has an engine",
    "burnish.files.export": "Session.export writes models",
    "burnish.importer": "compiling reads models",
    "burnish.losses": "compiling looks them up",
    "burnish.metrics": "compiling looks them up",
    "burnish.models": "a user asks for one",
    "burnish.operators.families": "compiling looks them up",
    "burnish.optim": "compiling looks them up",
    "burnish.rewriting": "compiling rewrites graphs",
    "burnish.program.initialization": "a session that is opened starts from a state",
    "burnish.surgery": "a user asks for it",
    "burnish.training.trainer": "burnish.Trainer",
    "numpy.random": "an initial state draws",
    "onnx.reference": "an initial state is computed",
    "onnxruntime": "a session that is opened has an engine",
    "torch": "optional",
}
"""Modules that the names ``burnish.compile`` and ``burnish.Session`` leave unloaded, and the call that loads each."""


def names_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the modules it left imported."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def modules_after(code: str) -> set[str]:
    """The same of the top-level modules."""
    return {name.partition(".")[0] for name in names_after(code)}


def test_importing_burnish_imports_no_library():
    assert modules_after("import burnish; dir(burnish); burnish.__version__").isdisjoint((*LIBRARIES, *HEAVY))


def test_a_public_name_is_imported_when_it_is_used():
    code = "from burnish import Session; import burnish; burnish.optim.sgd(lr=0.1); burnish.training.read_checkpoint"
    modules = modules_after(code)
    assert "onnx_ir" in modules
    assert modules.isdisjoint(HEAVY)


def test_what_compiles_and_opens_is_loaded_when_it_is_called():
    """Their imports once took more than half as long as those of onnx, onnx_ir and onnxruntime together."""
    loaded = names_after("import burnish; burnish.compile; burnish.Session")
    assert {"burnish.compiler.compile", "burnish.training.session"} <= loaded
    assert sorted(loaded & NOT_AT_FIRST.keys()) == []
    # Each module is a file to find and to read. A few more do no harm; a package of rules does.
    assert sum(name.partition(".")[0] == "burnish" for name in loaded) < 100
    for name in NOT_AT_FIRST.keys() - {"torch"}:
        assert importlib.util.find_spec(name) is not None, "a name that has moved would be missed above"


@pytest.mark.parametrize("package", [burnish.training, burnish.distributed])
def test_names_of_a_package_are_imported_when_they_are_used(package):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'burnish' has no attribute 'trainer'"):
        burnish.trainer  # noqa: B018
    assert not hasattr(burnish, "_private")


def test_dir_lists_what_is_public_and_nothing_else():
    import burnish.lazy_imports
    import burnish.stopping

    for package in (burnish, *LAZY):
        assert dir(package) == sorted(package.__all__)


def test_type_checkers_see_the_names_of_lazy_packages_and_no_others():
    """To a type checker a module's ``__getattr__`` has every name, so that it is hidden, and names are imported for it."""
    for package in (burnish, *LAZY):
        tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
        branches = {ast.unparse(node.test): node for node in tree.body if isinstance(node, ast.If)}
        assert branches.keys() == {"TYPE_CHECKING", "not TYPE_CHECKING"}
        imported = [node for node in branches["TYPE_CHECKING"].body if isinstance(node, ast.ImportFrom)]
        names = {name.name for node in imported for name in node.names}
        assert names == set(package.__all__) - {"__version__"}


SNIPPET = """\
import burnish
import burnish.torch
from burnish import data, distributed, finetuning, training

reveal_type(burnish.compile("model.onnx"))
reveal_type(burnish.Session(burnish.compile("model.onnx")).step_count)
reveal_type(burnish.data.open_dataset("data.npz", data.DataSpec.by(burnish.compile("model.onnx"))))
reveal_type(distributed.join())
reveal_type(burnish.optim.sgd(lr=0.1))
burnish.nonexistent
burnish.sessions
data.nonexistent
distributed.nonexistent
finetuning.nonexistent
training.nonexistent
burnish.Session(burnish.compile("model.onnx"), thread=1)
"""


@pytest.mark.slow
def test_mypy_finds_a_name_that_is_not_there_and_the_types_of_those_that_are(tmp_path):
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(snippet)]
    source = str(Path(burnish.__file__).resolve().parents[1])
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "MYPYPATH": source})
    found = re.findall(r'snippet\.py:(\d+): (?:error|note): (?:Revealed type is "([\w.]+)"|(.*)  \[)', done.stdout)
    assert [(int(line), kind or problem) for line, kind, problem in found] == [
        (5, "burnish.program.program.Program"),
        (6, "int"),
        (7, "burnish.data.dataset.Dataset"),
        (8, "burnish.distributed.connection.process_group.ProcessGroup"),
        (9, "burnish.optim.sgd.SGD"),
        (10, 'Module has no attribute "nonexistent"'),
        (11, 'Module has no attribute "sessions"; maybe "Session"?'),
        *((line, 'Module has no attribute "nonexistent"') for line in (12, 13, 14, 15)),
        (16, 'Unexpected keyword argument "thread" for "Session"; did you mean "threads"?'),
    ], done.stdout


def test_compiling_and_training_imports_no_optional_package():
    code = """
import numpy, burnish
from burnish.models import residual_network
program = burnish.compile(residual_network(width=2, blocks=(1,)), optimizer=burnish.optim.sgd(lr=0.1))
session = burnish.Session(program)
session.step({"x": numpy.zeros((2, 1, 8, 8), "float32"), "labels": numpy.array([0, 1])})
"""
    assert modules_after(code).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_there_and_listed(name):
    assert hasattr(burnish, name)
    assert name in burnish.__all__


def test_public_names_are_all_there():
    assert [name for name in burnish.__all__ if not hasattr(burnish, name)] == []


def test_errors_share_one_base():
    raised = [item for item in vars(burnish.errors).values() if isinstance(item, type) and issubclass(item, Exception)]
    errors = [error for error in raised if not issubclass(error, Warning)]
    assert len(errors) >= 9
    assert all(issubclass(error, burnish.errors.BurnishError) and error.__doc__ for error in errors)
    assert all(issubclass(warning, UserWarning) and warning.__doc__ for warning in raised if warning not in errors)


def test_version_is_that_of_the_distribution():
    assert burnish.__version__ == importlib.metadata.version("burnish")


def test_the_package_is_typed():
    files = importlib.resources.files("burnish")
    assert files.joinpath("py.typed").is_file()
