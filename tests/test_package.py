"""The package from the outside: what importing it costs, and which names it promises."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import inspect
import json
import subprocess
import sys

import pytest

import burnish
from burnish import provided

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


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level modules it left imported."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_importing_burnish_imports_no_library():
    assert modules_after("import burnish; dir(burnish); burnish.__version__").isdisjoint((*LIBRARIES, *HEAVY))


def test_a_public_name_is_imported_when_it_is_used():
    code = "from burnish import Session; import burnish; burnish.optim.sgd(lr=0.1); burnish.training.read_checkpoint"
    modules = modules_after(code)
    assert "onnx_ir" in modules
    assert modules.isdisjoint(HEAVY)


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


@pytest.mark.parametrize("name", provided.PROVIDED)
def test_what_does_the_work_of_a_method_is_there(name):
    """It takes the arguments of the method, the object itself being the first."""
    owner, _, method = name.partition(".")
    asked, done = (
        inspect.signature(function) for function in (getattr(getattr(burnish, owner), method), provided.provided(name))
    )
    assert len(done.parameters) == len(asked.parameters)


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
