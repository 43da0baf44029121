"""Functions fit on a screen, and files are read in one sitting."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
LONGEST_FUNCTION, LONGEST_FILE = 60, 500


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every function of a file, with its lines beside the docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield f"{path.relative_to(SOURCE)}: {node.name}", lines


def test_no_function_is_longer_than_a_screen():
    lengths = [function for path in SOURCE.rglob("*.py") for function in functions(path)]
    assert [(name, lines) for name, lines in lengths if lines > LONGEST_FUNCTION] == []
    assert len(lengths) > 1000


def test_no_file_is_too_long_to_read_at_once():
    lengths = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8").count("\n") for path in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}
