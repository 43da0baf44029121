"""The documentation is true: its snippets run, its links lead somewhere, its generated page is up to date."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.models import residual_network

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES_WITH_SNIPPETS = [page for page in PAGES if re.search(r"^```(python|sh)$", page.read_text(encoding="utf-8"), re.MULTILINE)]
EXAMPLES = [file for file in sorted((ROOT / "src").rglob("*.py")) if ">>> " in file.read_text(encoding="utf-8")]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ".json", ".csv", ""}
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|work|opt|mnt|srv)/\w|(?<!\w)[A-Z]:\\\w")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def outside_fences(text: str) -> str:
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """The anchors that a viewer gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", outside_fences(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def write_inputs(folder: Path) -> None:
    """Write what the snippets take for granted: a model and a data set of the user's."""
    ir.save(residual_network(width=4, blocks=(1, 1)), folder / "model.onnx")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(96, 1, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=generator.integers(0, 10, 96))


@pytest.mark.parametrize("page", PAGES_WITH_SNIPPETS, ids=map(relative, PAGES_WITH_SNIPPETS))
@pytest.mark.slow
def test_snippets_run(page, tmp_path, monkeypatch):
    """Run the Python snippets and the burnish commands of a page from top to bottom, in one folder and one namespace.

    A page that makes its model (``burnish new``) makes its data too.
    """
    text = page.read_text(encoding="utf-8")
    if not re.search(r"^burnish new", text, re.MULTILINE):
        write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Drawing takes longer than the rest of so small a run.
    monkeypatch.setattr("burnish.training.run_folder.draw_curves", lambda rows, path, names: None)
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses of a snippet look
    namespace = vars(module)
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("body"))
        if fence["language"] == "python":
            code = "\n" * line + fence["body"]
            exec(compile(code, relative(page), "exec"), namespace)
        elif fence["language"] == "sh":
            for command in fence["body"].replace("\\\n", " ").splitlines():
                words = shlex.split(command, comments=True)
                if words[:1] != ["burnish"] or words[1:2] == ["demo"]:
                    continue
                # In this process, as a new one would take longer to import PyTorch; workers are processes of their own.
                result = CliRunner().invoke(app, words[1:])
                assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"


@pytest.mark.parametrize("file", EXAMPLES, ids=map(relative, EXAMPLES))
def test_examples_of_docstrings_run(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = import_module(".".join(file.relative_to(ROOT / "src").with_suffix("").parts))
    tried = doctest.testmod(module, extraglobs={"burnish": burnish})
    assert (tried.attempted > 0, tried.failed) == (True, 0)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page):
    broken = []
    for target in LINK.findall(outside_fences(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_tables_have_headers(page):
    """A blank line cuts a table in two, and viewers show the rest as text."""
    lines = outside_fences(page.read_text(encoding="utf-8")).splitlines()
    firsts = [
        number for number, line in enumerate(lines) if line.startswith("|") and not (number and lines[number - 1].startswith("|"))
    ]
    assert [lines[number] for number in firsts if not re.match(r"\|[ :]*---", "".join(lines[number + 1 : number + 2]))] == []


def test_every_page_is_linked_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"]
    assert [page for page in pages if f"({page})" not in index] == []


def test_every_error_and_warning_is_documented():
    errors = {name for name, item in vars(burnish.errors).items() if isinstance(item, type) and issubclass(item, Exception)}
    assert errors == set(
        re.findall(r"^## (\w+(?:Error|Warning))$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    )


@pytest.mark.slow
def test_operator_table_is_up_to_date():
    """In a process of its own: other tests register rules too."""
    code = "from generate_operator_table import operator_page; print(operator_page(), end='')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT / "docs", check=True)
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    assert page == result.stdout, "run `make docs` and commit docs/operators.md"


def test_the_page_of_commands_is_up_to_date():
    code = "from generate_command_page import command_page; print(command_page(), end='')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT / "docs", check=True)
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert page == result.stdout, "run `make docs` and commit docs/commands.md"


def test_every_path_that_contributing_and_the_table_of_changes_name_exists():
    """A word in angle brackets stands for any name; a file named without a folder is somewhere in the repository."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in ("CONTRIBUTING.md", "docs/architecture.md"))
    named = set(re.findall(r"`([\w.<>-]+(?:/[\w.<>-]+)*)`", text))
    top = {path.name for path in ROOT.iterdir() if path.is_dir()}
    paths = {name for name in named if "/" in name and name.split("/")[0] in top}
    files = {name for name in named - paths if name.endswith((".md", ".py", ".toml", ".txt"))}
    assert len(paths) > 30
    assert "registry.py" in files

    def exists(path: str, folders: tuple[str, ...] = ("",)) -> bool:
        pattern = re.sub(r"<\w+>", "*", path)
        return any(any(ROOT.glob(folder + pattern)) for folder in folders)

    missing = [path for path in paths if not exists(path)]
    missing += [name for name in files if not exists(name, ("", "src/**/", "tests/**/", "docs/", "benchmarks/**/"))]
    assert sorted(missing) == []


def test_the_calls_from_compile_to_the_runtime_are_where_the_architecture_page_says():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("### The calls, in order\n")[2].partition("\n### ")[0]
    calls = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", section, re.MULTILINE)
    assert 20 < len(calls) <= 40
    sources = {path: (ROOT / "src" / "burnish" / path).read_text(encoding="utf-8") for _, path in calls}
    assert [call for call, path in calls if not re.search(rf"^ *(def|class) {call}\b", sources[path], re.MULTILINE)] == []


def test_every_folder_of_the_package_is_in_the_architecture_page():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "burnish"
    folders = [path.parent.name for path in package.glob("*/__init__.py")]
    modules = [path.name for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py", "errors.py")]
    assert [name for name in folders + modules if f"`{name}`" not in text] == []


def test_every_folder_of_the_package_says_what_lives_there():
    packages = (ROOT / "src" / "burnish").rglob("__init__.py")
    assert [relative(path) for path in packages if not path.read_text(encoding="utf-8").startswith('"""')] == []


@pytest.mark.slow
def test_no_file_names_a_path_of_somebodys_machine():
    folders = [ROOT / name for name in ("src", "tests", "docs", "examples", "benchmarks", "wheels", ".ci", ".github")]
    files = [path for folder in folders for path in folder.rglob("*") if not is_cached(path)]
    files += [path for path in ROOT.iterdir() if path.name not in ("LICENSE", ".git")]
    found = []
    for path in files:
        if not path.is_file() or path.suffix not in TEXT_SUFFIXES or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{relative(path)}:{number}")
    assert found == []


def is_cached(path: Path) -> bool:
    """Whether a tool wrote the file: bytecode, or something in a hidden folder."""
    parts = path.relative_to(ROOT).parts[1:]
    return any(part == "__pycache__" or part.startswith(".") for part in parts)
