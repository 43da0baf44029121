"""Fixtures of the C client's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import c_library
import programs
import pytest


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> c_library.Client:
    return c_library.Client(c_library.build(tmp_path_factory.mktemp("c"), "libburnish.so"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """Where a program is saved."""
    root = tmp_path_factory.mktemp("programs")

    def saved(name: str) -> Path:
        if not (root / name).exists():
            programs.program(name)[0].save(root / name)
        return root / name

    return saved


@pytest.fixture
def session(client, folder) -> Iterator[c_library.Session]:
    """A session of the program with dropout, a schedule and an average."""
    opened = client.open(folder("dropout"))
    yield opened
    opened.close()
