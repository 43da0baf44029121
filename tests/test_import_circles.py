"""No two files of the package import each other, directly or by way of others."""

import grimp
import pytest


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
    """Imports inside of functions and for types alone count as well."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circles(imports) == []
