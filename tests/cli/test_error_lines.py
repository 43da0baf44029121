"""Errors in lines: the first says the fact in 200 characters at most, and what is left follows."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import burnish
from burnish import errors
from burnish.cli.console import LONGEST_FIRST_LINE, message_lines, print_error

SOURCES = sorted(Path(burnish.__file__).parent.rglob("*.py"))
RAISED = {name for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, Exception)} | {"BadParameter"}
ASSUMED = "a_name_of_20_letters"


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("short: leave it out", ["short: leave it out"]),
        ("The fact of it. Then do this. Or that", ["The fact of it.", "Then do this.", "Or that"]),
        ("the fact of it all; take another one of these", ["the fact of it all;", "take another one of these"]),
        ("'x' is no file at all: take another one of these", ["'x' is no file at all:", "take another one of these"]),
        ("there is no such thing, so take another one", ["there is no such thing,", "so take another one"]),
        ("words without a mark of any kind in them", ["words without a mark of any", "kind in them"]),
        ("a version 1.5 and a path a. b go on and on", ["a version 1.5 and a path a. b", "go on and on"]),
        ("x" * 40, ["x" * 40]),
    ],
)
def test_a_long_message_is_split_at_a_sentence(message, lines):
    assert message_lines(message, 30) == lines


def test_nothing_of_a_message_is_lost():
    message = "One fact, and its reason; a remedy: take this. Or take that, as you like. See the page"
    for longest in range(10, 100):
        assert " ".join(message_lines(message, longest)) == message


def test_an_error_is_printed_with_its_details_below(capsys):
    print_error(f"The file is broken. {' '.join(['Export it again.'] * 20)}", "[rank 1] error: ")
    first, *details = capsys.readouterr().err.splitlines()
    assert first == "[rank 1] error: The file is broken."
    assert details == ["  Export it again."] * 20


def messages() -> list[tuple[str, str]]:
    """The messages of all errors that are raised with a text, with a word for each value, and where they stand."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            name = node.exc.func.attr if isinstance(node.exc.func, ast.Attribute) else getattr(node.exc.func, "id", "")
            text = _text(node.exc.args[0])
            if name in RAISED and text:
                found.append((f"{path.name}:{node.lineno}", text))
    return found


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else ASSUMED for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ASSUMED if isinstance(node, ast.IfExp | ast.Name | ast.Call | ast.Attribute) else ""


def test_every_error_has_a_short_first_line_that_ends_with_a_part_of_the_sentence():
    """Most messages of burnish are read here as they stand in the source."""
    found = messages()
    assert len(found) > 800
    cut = [
        (place, first)
        for place, text in found
        if len(first := message_lines(text, LONGEST_FIRST_LINE - len("error: "))[0]) > LONGEST_FIRST_LINE
        or (first != text and first[-1] not in ".;:,?!)")
    ]
    assert cut == []


def test_no_error_begins_with_a_part_that_says_nothing():
    """A first line that is cut after ``loss:`` would hide the fact."""
    short = [(place, first) for place, text in messages() if (first := message_lines(text)[0]) != text and len(first) < 25]
    assert short == []
