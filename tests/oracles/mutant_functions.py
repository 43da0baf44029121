"""Functions with one piece of their source replaced: what shows that a test can fail."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def mutant_of(rule: Callable[..., Any], original: str, replacement: str) -> Callable[..., Any]:
    """The same function with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(rule))
    assert original in source, f"{rule.__name__} has no '{original}' any more: write the mutation anew"
    lines = source.replace(original, replacement).splitlines()
    while not lines[0].startswith("def "):
        lines.pop(0)
    namespace = dict(rule.__globals__)
    exec("from __future__ import annotations\n" + "\n".join(lines), namespace)
    return namespace[rule.__name__]
