"""Parquet tables, read with pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.csv import LeftOut
from burnish.data.missing_values import KEPT, Columns, Missing, text_array, without_missing
from burnish.errors import DataError
from burnish.installing import install_command
from burnish.untrusted_files import allowed_memory, memory_excess

WIDTHS = {"BOOLEAN": 2, "INT32": 5, "INT64": 9, "INT96": 9, "FLOAT": 5, "DOUBLE": 9}
"""Bytes per value by physical type, with one for the missing mask."""
TEXT_WIDTH = 5
ROWS_AT_ONCE = 65536


def read_parquet(path: Path, missing: Missing = "error", left_out: LeftOut = lambda names: ()) -> tuple[Columns, list[str]]:
    """Return the columns of a file by name, as numbers or text, and notes on its rows.

    Args:
        path: the file.
        missing: ``error``, or ``drop`` to leave out and count rows with a missing value.
        left_out: function from all column names to those that are not read.

    Raises:
        DataError: pyarrow is missing, the file is not Parquet, a column is nested, or a value is missing (by row and column).
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
    # Rows are dropped in pyarrow, which would convert integer columns with gaps to floating point.
    whole = {name: column.filter(~together) if notes else column for name, column in read.items()}
    if missing == KEPT:
        whole = {name: _filled(column) if gaps[name].any() else column for name, column in whole.items()}
    arrays = {name: _array(column, name, path) for name, column in whole.items()}
    return Columns(arrays, kept.rows, gaps if missing == KEPT else None, cells), notes


def _filled(column: Any) -> Any:
    """Fill the gaps of a column, so that integers stay integers."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_boolean(column.type):
        return column.fill_null(False)
    return column.fill_null(0 if types.is_integer(column.type) or types.is_floating(column.type) else "")


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Return the columns of a file by name, with None for missing values.

    Raises:
        DataError: pyarrow is missing, or the file is not Parquet.
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
        with pyarrow.parquet.ParquetFile(path) as file:
            table = _bounded(file, path)
        names = table.column_names
    except MemoryError as error:
        raise DataError(f"{path}: larger than it looks: {error}") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: a column name is not UTF-8
        raise DataError(
            f"{path}: damaged, or no Parquet file ({error}); write it again, or check that it was copied whole"
        ) from error
    return dict(zip(names, table.columns, strict=True))


def _bounded(file: Any, path: Path) -> Any:
    """Read a table: at once if its declared size fits into memory, or in counted parts if repeated texts might not.

    Raises:
        MemoryError: it takes too much memory.
    """
    import pyarrow

    size, metadata = path.stat().st_size, file.metadata
    # Reading one row first raises an error for a damaged column description; access to its metadata would crash.
    for group in range(metadata.num_row_groups):
        next(file.iter_batches(batch_size=1, row_groups=[group]), None)
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(metadata.num_columns)]
    plain = sum(chunk.num_values * WIDTHS.get(chunk.physical_type, TEXT_WIDTH) for chunk in chunks)
    _check_memory(plain, size)
    texts = [chunk for chunk in chunks if chunk.physical_type not in WIDTHS]
    longest = max((chunk.total_uncompressed_size for chunk in texts), default=0)
    if memory_excess(sum(chunk.num_values * chunk.total_uncompressed_size for chunk in texts), size) is None:
        return file.read()
    batches, used = [], 0
    for batch in file.iter_batches(batch_size=max(1, min(ROWS_AT_ONCE, allowed_memory(size) // 2 // longest))):
        used += sum(map(_size, batch.columns))
        _check_memory(used, size)
        batches.append(batch)
    return pyarrow.Table.from_batches(batches, file.schema_arrow)


def _size(column: Any) -> int:
    """Return the bytes of a column part, with each repeated text counted in full."""
    import pyarrow
    import pyarrow.compute

    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pyarrow.compute.binary_length(column.dictionary.cast(pyarrow.large_binary()))
    return int(pyarrow.compute.sum(lengths.take(column.indices)).as_py() or 0)


def _check_memory(needed: int, size: int) -> None:
    excess = memory_excess(needed, size)
    if excess is not None:
        raise MemoryError(excess)


def _array(column: Any, name: str, path: Path) -> np.ndarray:
    array = np.asarray(column.to_numpy())
    if array.dtype != object:
        return array
    values = array.tolist()
    if all(isinstance(value, str) for value in values):
        return text_array(values)
    raise DataError(f"{path}: column '{name}' is of type {column.type}; burnish reads columns of numbers and of text")
