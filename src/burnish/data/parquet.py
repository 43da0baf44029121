"""Parquet tables, read with pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from burnish.errors import DataError


def read_parquet(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a file by name: numbers or text.

    Raises:
        DataError: as ``read_columns``, or a nested column.
    """
    return {name: _column(column, name, path) for name, column in read_columns(path).items()}


def read_columns(path: Path) -> dict[str, Any]:
    """Return the columns of a file by name, as pyarrow has them.

    Raises:
        DataError: pyarrow is missing, no Parquet file, or a missing value.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: Parquet files are read with pyarrow, which is not installed; pip install pyarrow") from error
    try:
        table = pyarrow.parquet.read_table(path)
        names = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last from a name that is not UTF-8
        raise DataError(f"{path}: damaged, or no Parquet file ({error})") from error
    for name, column in zip(names, table.columns, strict=True):
        if column.null_count:
            raise DataError(f"{path}: column '{name}' has {column.null_count} missing values; fill them in or remove the rows")
    return dict(zip(names, table.columns, strict=True))


def _column(column: Any, name: str, path: Path) -> np.ndarray:
    array = np.asarray(column.to_numpy())
    if array.dtype != object:
        return array
    values = array.tolist()
    if all(isinstance(value, str) for value in values):
        return np.asarray(values, dtype=str)
    raise DataError(f"{path}: column '{name}' is of type {column.type}; burnish reads columns of numbers and of text")
