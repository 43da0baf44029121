"""Parquet tables, read with pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.csv import LeftOut
from burnish.data.missing import Columns, Missing, without_missing
from burnish.errors import DataError
from burnish.installing import install_command


def read_parquet(path: Path, missing: Missing = "error", left_out: LeftOut = lambda names: ()) -> tuple[Columns, list[str]]:
    """Return the columns of a file by name, numbers or text; and notes on its rows.

    Args:
        path: the file.
        missing: ``error``, or ``drop``: leave out and count the rows in which a value is missing.
        left_out: which columns are not read, by the names of all.

    Raises:
        DataError: pyarrow is missing, no Parquet file, a nested column, or a missing value, by row and column.
    """
    read = _table(path)
    read = {name: column for name, column in read.items() if name not in left_out(list(read))}
    gaps = {name: np.asarray(column.is_null(nan_is_null=True)) for name, column in read.items()}
    for name, column in read.items():
        if str(column.type) in ("float", "double", "halffloat"):
            gaps[name] |= ~np.isfinite(column.fill_null(0).to_numpy())
    cells = {name: column.to_pylist() for name, column in read.items() if gaps[name].any()}
    together = np.logical_or.reduce(list(gaps.values())) if gaps else np.zeros(0, bool)
    rows = [f"row {row}" for row in range(len(together))]
    kept, notes = without_missing({}, gaps, missing, str(path), rows, cells)
    # pyarrow leaves the rows out: it makes floating point of a column of integers with gaps.
    whole = {name: column.filter(~together) if notes else column for name, column in read.items()}
    return Columns({name: _array(column, name, path) for name, column in whole.items()}, kept.rows), notes


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Return the columns of a file by name, None where there is no value.

    Raises:
        DataError: pyarrow is missing, or no Parquet file.
    """
    return {name: column.to_pylist() for name, column in _table(path).items()}


def _table(path: Path) -> dict[str, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet files are read with pyarrow, which is not installed; {install_command('pyarrow')}"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
        names = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last from a name that is not UTF-8
        raise DataError(f"{path}: damaged, or no Parquet file ({error})") from error
    return dict(zip(names, table.columns, strict=True))


def _array(column: Any, name: str, path: Path) -> np.ndarray:
    array = np.asarray(column.to_numpy())
    if array.dtype != object:
        return array
    values = array.tolist()
    if all(isinstance(value, str) for value in values):
        return np.asarray(values, dtype=str)
    raise DataError(f"{path}: column '{name}' is of type {column.type}; burnish reads columns of numbers and of text")
