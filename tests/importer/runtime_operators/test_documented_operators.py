"""The page of runtimes' operators names each that has a rewrite, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from burnish.importer.runtime_operators import rewritten_operators

PAGE = Path(__file__).parents[3] / "docs" / "runtime-operators.md"


def test_the_table_names_every_operator() -> None:
    table = PAGE.read_text().partition("## Supported operators")[2].partition("\n\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == rewritten_operators().keys()
