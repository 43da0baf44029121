"""Messages and pages name commands that install a missing package, with or without an index that has burnish."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import burnish
from burnish import distributed
from burnish.errors import ConfigurationError, EngineError
from burnish.installing import EXTRAS, install_command, installed_extras

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = PROJECT["optional-dependencies"]
REQUIREMENTS = {requirement for name, extra in DECLARED.items() if name != "test" for requirement in extra}
WITHOUT_EXTRA = {"triton"}
"""A package that comes with PyTorch for CUDA."""
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


def test_a_command_names_an_extra_of_the_installed_burnish(monkeypatch):
    monkeypatch.setattr("burnish.installing.installed_extras", lambda: [*DECLARED])
    assert install_command("sklearn") == install_command("sklearn.datasets") == 'pip install "burnish[demo]"'
    assert install_command("PIL") == 'pip install "burnish[images]"'
    assert install_command("a_library") == "pip install a_library"


def test_a_command_names_the_package_if_the_installed_burnish_lacks_the_extra(monkeypatch):
    monkeypatch.setattr("burnish.installing.installed_extras", lambda: ["demo"])
    assert install_command("PIL") == 'pip install "Pillow>=10.3"'
    assert install_command("mlflow") == "pip install mlflow-skinny"


def test_a_burnish_that_is_not_installed_has_no_extras(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.metadata", missing)
    assert installed_extras() == []
    assert install_command("PIL") == 'pip install "Pillow>=10.3"'


def test_every_extra_that_a_message_names_exists_and_installs_the_package():
    for module, (extra, requirement) in EXTRAS.items():
        assert requirement in DECLARED[extra], module


@pytest.mark.parametrize("extra", ["text", "demo"])
def test_pip_takes_the_extra_of_the_installed_burnish_without_an_index(extra):
    if extra not in installed_extras():
        pytest.skip("burnish is not installed here with this extra")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--dry-run", f"burnish[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"already satisfied: burnish[{extra}]" in done.stdout
    assert "does not provide" not in done.stdout + done.stderr


def test_every_requirement_of_an_extra_can_be_named():
    """Whoever raises a version in ``pyproject.toml`` is led here."""
    named = {requirement for _, requirement in EXTRAS.values()}
    assert {requirement for requirement in REQUIREMENTS if not requirement.startswith("burnish")} == named


def test_all_are_the_extras_that_install_anywhere():
    named = re.fullmatch(r"burnish\[([a-z,]+)\]", *DECLARED["all"])[1].split(",")
    assert {*named} == DECLARED.keys() - {"all", "flower", "mpi", "test"}
    assert DECLARED["images"] == ["Pillow>=10.3"]
    assert DECLARED["text"] == ["tokenizers>=0.20"]


def test_every_message_asks_for_a_known_module():
    asked = [module for path in SOURCES for module in asked_modules(path)]
    assert len(asked) >= 12
    assert {module for module in asked if module not in EXTRAS} <= WITHOUT_EXTRA


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
        assert {name for name in requirements if ">=" in name} <= REQUIREMENTS, command


def command(module):
    """The command that installs a module, for a regular expression."""
    return re.escape(install_command(module))


def test_modules_without_onnxscript_name_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("burnish.importer.pytorch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigurationError, match=f"onnxscript, which is not installed: {command('onnxscript')}"):
        burnish.compile(torch.nn.Linear(3, 2), example_inputs=(torch.zeros(2, 3),))


def test_workers_without_mpi4py_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(EngineError, match=f"MPI cannot be used here .*: {command('mpi4py')}, and an MPI such as mpich"):
        distributed.mpi()
