"""Embedding tables that a run updates by rows, by the command line."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from burnish.models import dlrm
from burnish.program import Program

LOSS = ("--loss", "bce_with_logits", "--optimizer", "adagrad")


@pytest.fixture
def clicks(folder):
    ir.save(dlrm([6, 50], numbers=2, width=4, bottom=(3,), top=(3,)), folder / "clicks.onnx")
    return "clicks.onnx"


@pytest.mark.parametrize(
    ("given", "option", "tables"),
    [
        (("auto",), "auto", {"table_1", "table_2"}),
        (("table_2",), ["table_2"], {"table_2"}),
        (("*_1", "table_2"), ["*_1", "table_2"], None),
    ],
    ids=["auto", "name", "patterns"],
)
def test_compile_keeps_the_gradients_of_tables_as_rows(run, folder, clicks, given, option, tables):
    run("compile", clicks, "-o", "program", *LOSS, *(part for table in given for part in ("--sparse", table)))
    program = Program.load(folder / "program")
    assert program.options["sparse"] == option
    rows = {entry.name.removeprefix("rows:") for entry in program.signature["grad"].outputs if entry.role == "rows"}
    assert rows == (tables or {"table_1", "table_2"})


def test_a_table_that_the_model_does_not_have_is_named(run, folder, clicks):
    printed = run("compile", clicks, "-o", "program", *LOSS, "--sparse", "table_9", code=1).stderr
    assert "error: sparse: the pattern 'table_9' matches no parameter that trains; did you mean 'table_" in printed
