"""Inputs of programs, as the data tests want them."""

from __future__ import annotations

import onnx_ir as ir

from burnish.data import DataSpec
from burnish.program import Entry, Role


def data_entry(*shape: int | str | None, name: str = "x", dtype: ir.DataType = ir.DataType.FLOAT) -> Entry:
    return Entry(name, Role.DATA, dtype, ("batch", *shape))


def class_entry(classes: int = 3, *shape: int | str | None, ignored: int | None = None) -> Entry:
    return Entry("labels", Role.LABEL, ir.DataType.INT64, ("batch", *shape), minimum=0, maximum=classes - 1, ignored=ignored)


def value_entry(*shape: int | str | None) -> Entry:
    return Entry("targets", Role.LABEL, ir.DataType.FLOAT, ("batch", *shape))


def classification(*shape: int | str | None, classes: int = 3) -> DataSpec:
    return DataSpec((data_entry(*shape),), class_entry(classes))
