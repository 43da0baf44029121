"""JSON and TOML from elsewhere, and limits of memory: one kind of error for all that can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from burnish.errors import ConfigurationError
from burnish.untrusted_files import (
    DEEPEST,
    LEAST,
    MEMORY_LIMIT,
    allowed_memory,
    memory_excess,
    read_json,
    read_json_file,
    read_toml,
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" * 100_000 + "]" * 100_000, "in one another"),
        ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "in one another"),
        ('{"a": ' * 500 + "1" + "}" * 500, "in one another"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        (r'{"a": "\ud800"}', "surrogates not allowed"),
        (r'{"\uDFFF": 1}', "surrogates not allowed"),
        (b'"\xff"', "can't decode"),
        ("9" * 5000, "digits"),
        ("[" + "[]," * (LEAST // 100) + "[]]", MEMORY_LIMIT),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_of_a_reasonable_form_is_a_value_error(text: str | bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_json(text)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "ä"], "b": {}}, [[]] * 1000, "🔥", "\udcff"])
def test_other_json_is_read(value: object) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value).encode()) == value


def test_toml_has_the_same_depth() -> None:
    with pytest.raises(ValueError, match="in one another"):
        read_toml("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match="in one another"):
        read_toml("a." * 300 + "b = 1")
    assert read_toml("[a]\nb = [1]") == {"a": {"b": [1]}}


def test_toml_has_integers_of_64_bits() -> None:
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="an integer of 64 bits besides its sign, and TOML's have 63"):
            read_toml(f"a = [{number}]")
    assert read_toml(f"a = [{-(2**63)}, {2**63 - 1}]") == {"a": [-(2**63), 2**63 - 1]}


def test_a_file_may_be_too_large_and_a_pipe_is_none(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("[1, 2, 3]", encoding="utf-8")
    assert read_json_file(path) == [1, 2, 3]
    with pytest.raises(ValueError, match="larger than 8 bytes"):
        read_json_file(path, 8)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="a pipe or a device"):
            read_json_file(other)


def test_memory_has_a_limit_that_a_variable_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    assert allowed_memory(10) == LEAST
    assert allowed_memory(LEAST) == 8 * LEAST
    assert memory_excess(LEAST, 10) is None
    told = memory_excess(LEAST + 1, 10)
    assert told is not None
    assert f"{LEAST + 1:,}" in told
    assert f"{LEAST:,}" in told
    monkeypatch.setenv(MEMORY_LIMIT, told.rpartition(f"{MEMORY_LIMIT}=")[2])
    assert memory_excess(LEAST + 1, 10) is None
    monkeypatch.setenv(MEMORY_LIMIT, "much")
    with pytest.raises(ConfigurationError, match="4GiB"):
        allowed_memory(10)
