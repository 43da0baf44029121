"""The package from the outside: what importing it costs, and which names it promises."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import json
import subprocess
import sys

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


def test_every_public_name_is_listed_by_dir():
    assert set(burnish.__all__) <= set(dir(burnish))


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
