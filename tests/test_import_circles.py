"""No two files of the package import each other, directly or by way of others."""

import tomllib
from pathlib import Path

import grimp
import pytest

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def listed_imports():
    """The imports from a lower layer that ``pyproject.toml`` lists: methods of a program whose work is done above it."""
    (layers, *_) = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return [tuple(line.split(" -> ")) for line in layers["ignore_imports"]]


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("burnish", cache_dir=None)


def circles(imports):
    """The groups of modules of which each leads to all others."""
    reached = {module: reachable(module, imports) for module in imports}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in imports}
    return sorted(sorted(group) for group in groups if group)


def reachable(module, imports):
    """The modules that a module imports, directly or by way of others; itself is one of them where it is in a circle."""
    found, pending = set(), [*imports[module]]
    while pending:
        other = pending.pop()
        if other not in found:
            found.add(other)
            pending += imports[other]
    return found


def test_a_circle_is_seen():
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": []}) == [["b", "c"]]


def test_no_file_leads_to_itself(graph):
    """Imports inside of functions and for types alone count as well, but for those that are listed."""
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    for importer, imported in listed_imports():
        imports[importer].remove(imported)
    assert circles(imports) == []
