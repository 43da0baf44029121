"""Messages and pages name commands that install what is missing, whether or not an index has burnish."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import burnish
from burnish import distributed
from burnish.errors import ConfigurationError, EngineError
from burnish.installing import REQUIREMENTS, install_command

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {requirement for name, extra in PROJECT["optional-dependencies"].items() if name != "test" for requirement in extra}
WITHOUT_EXTRA = {"mlflow-skinny", "triton", "wandb"}
"""Packages whose versions burnish leaves to its users."""
SOURCES = sorted((ROOT / "src" / "burnish").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]


def asked_modules(path: Path) -> list[str]:
    """The modules that a file asks the command of by their names."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    commands = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "install_command"]
    return [node.args[0].value for node in commands if isinstance(node.args[0], ast.Constant)]


def installed_by(command: str) -> set[str]:
    """The requirements of what follows ``pip install``, up to the end of the command."""
    words = re.match(r"""(?:\s*(?:"[^"]+"|'[^']+'|[\w.>=\[\],-]+))+""", command)
    return {word.strip("\"',.") for word in words[0].split()} if words else set()


def test_a_command_names_the_package_and_its_version():
    assert install_command("sklearn") == install_command("sklearn.datasets") == 'pip install "scikit-learn>=1.5"'
    assert install_command("mlflow") == "pip install mlflow-skinny"
    assert install_command("a_library") == "pip install a_library"


def test_every_requirement_is_one_of_an_extra():
    """Whoever raises a version in ``pyproject.toml`` is led here."""
    assert set(REQUIREMENTS.values()) - EXTRAS == {"mlflow-skinny"}


def test_every_extra_can_be_named():
    assert {requirement for requirement in EXTRAS if not requirement.startswith("burnish")} <= set(REQUIREMENTS.values())


def test_every_message_asks_for_a_known_module():
    asked = [module for path in SOURCES for module in asked_modules(path)]
    assert len(asked) >= 12
    assert {module for module in asked if module not in REQUIREMENTS} <= WITHOUT_EXTRA


def test_no_message_spells_the_command_out():
    """But in a docstring, where the command cannot be computed: there it is compared with the extras."""
    spelled = {}
    for path in SOURCES:
        if path.name != "installing.py":
            for command in re.findall(r"pip install (.*)", path.read_text(encoding="utf-8")):
                spelled[path.name] = installed_by(command)
    assert spelled == {"flower.py": {"flwr>=1.41"}}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_installs_burnish_from_an_index(page):
    """Until there is a release. Requirements with a version are those of the extras."""
    for command in re.findall(r"pip install ([^`#\n]*)", page.read_text(encoding="utf-8")):
        requirements = installed_by(command)
        assert not [name for name in requirements if re.match(r"burnish\b(?!.*@)", name)], command
        assert {name for name in requirements if ">=" in name} <= EXTRAS, command


def test_modules_without_onnxscript_name_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("burnish.importer.pytorch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigurationError, match=r'onnxscript, which is not installed: pip install "onnxscript>=0\.5"'):
        burnish.compile(torch.nn.Linear(3, 2), example_inputs=(torch.zeros(2, 3),))


def test_workers_without_mpi4py_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(EngineError, match=r'MPI cannot be used here .*: pip install "mpi4py>=4", and an MPI such as mpich'):
        distributed.mpi()
