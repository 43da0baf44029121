"""Tables as data sets: feature columns and one label column, whatever file they are from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from burnish.data.data_spec import DataSpec, cast, remedy_of_cast
from burnish.data.dataset import ArrayDataset, group_values
from burnish.data.missing_values import Columns, alike_but_for_case, marks_among
from burnish.data.model_metadata import DataDescription
from burnish.data.preprocessing import PixelsLike
from burnish.data.splitting import EvalSplit
from burnish.data.table_coding import TableDescription
from burnish.errors import DataError
from burnish.program import Entry
from burnish.settings import suggestion

INPUT_IDS = "input_ids"
LABEL_COLUMNS = ("label", "labels", "y", "target", "targets")


def label_column(columns: Sequence[str], asked_for: str | None, source: str) -> str:
    """Return the column with the labels: the one asked for, else one with a usual name, such as ``label``, else the last.

    Raises:
        DataError: there is no such column, or fewer than two columns.
    """
    if len(columns) < 2:
        raise DataError(f"{source}: {len(columns)} columns; a table needs feature columns and a label column")
    if asked_for is not None:
        if asked_for not in columns:
            raise DataError(
                f"{source}: no column '{asked_for}'{suggestion(asked_for, columns)}; choose among {', '.join(columns)}"
            )
        return asked_for
    return next((name for name in columns if name.lower() in LABEL_COLUMNS), columns[-1])


def table_dataset(
    columns: Mapping[str, np.ndarray],
    spec: DataSpec,
    label: str | None,
    source: str,
    classes: Sequence[str] | None,
    notes: Sequence[str] = (),
    pixels: PixelsLike | None = None,
    split: EvalSplit | None = None,
) -> ArrayDataset:
    """Make a data set of a table's columns (each [rows]): every column but the label's is a feature.

    They fill a model's one input in their order; text becomes indices or places, as ``TableDescription`` says. One alone may hold
    an array for each row; of bytes, it holds pixels, of which ``pixels`` says what is done to them. Of several inputs,
    each takes the column of its name, of text too, and columns that are left over are named in the data set's note; so is a label
    column that was only guessed, as the last.

    What is computed of the columns beside the names of categories and classes is computed again for a part of the data set, of
    the rows of that part, or is taken over from another part (``ArrayDataset.part``).

    Args:
        columns: by name, [rows].
        spec: what the program takes.
        label: the column with the labels; None for one with a usual name, or the last.
        source: what to call the data in an error.
        classes: names of the classes in the order of their indices.
        notes: what a person should know of the columns.
        pixels: what is done to arrays of bytes.
        split: what is to be held out; its column of groups is no feature.

    Raises:
        DataError: a feature that is neither a number nor text, no rows, or what does not fit the model.
    """
    groups, said, named = None, list(notes), source
    rows = columns.rows if isinstance(columns, Columns) else None
    group = None if split is None else split.group
    if group is not None:
        groups = group_values(columns.get(group), group, source, ", ".join(map(repr, columns)))
        columns = {name: column for name, column in columns.items() if name != group}
    if group is not None and group == label:
        raise DataError(f"{source}: '{group}' is the column with the labels, and cannot say which rows belong together too")
    chosen = label_column(list(columns), label, source)
    if label is None and chosen.lower() not in LABEL_COLUMNS:
        _check_guessed(columns[chosen], chosen, spec, source)
        said.append(f"no column is called label, y or target; '{chosen}', the last, is taken for the label (--label: another)")
        source = f"{source} (with the last column, '{chosen}', as label)"
    rows = [f"row {row}" for row in range(len(columns[chosen]))] if rows is None else rows
    features = Columns({name: column for name, column in columns.items() if name != chosen}, rows)
    if spec.label is not None:
        _check_held(Columns({chosen: columns[chosen]}, rows), {chosen: spec.label}, named)
    table = spec.described.table or TableDescription.of(features, spec.data, source)
    filled, unseen = filled_inputs(features, spec, source, table)
    said += unseen
    if table is not None and table is not spec.described.table:
        said.append(table.text())
    if len(spec.data) > 1 and (rest := [name for name in features if name not in filled]):
        said.append(f"no input reads the columns {', '.join(map(repr, rest))}")
    if columns[chosen].dtype.kind in "US":
        names = np.unique(columns[chosen].astype(str)).tolist()
        said += [*alike_but_for_case(names), *marks_among(names)]
    note = f"{named}: {'; '.join(said)}" if said else None
    dataset = spec.dataset(filled, columns[chosen], source, classes, note, pixels, table)
    dataset.by, dataset.groups = f"'{chosen}'", groups
    if split is None:
        return dataset
    trained = dataset.classes if classes is None else classes

    def part(indices: np.ndarray, like: DataDescription | None) -> ArrayDataset:
        own = Columns({name: column[indices] for name, column in columns.items()}, [rows[index] for index in indices])
        known = DataDescription(table=None if table is None else table.refitted(own)) if like is None else like
        made = table_dataset(own, spec.like(known), chosen, named, trained, (), pixels)
        made.note = note if like is None else None
        return made

    dataset.remade = part
    return dataset


def _check_guessed(labels: np.ndarray, name: str, spec: DataSpec, source: str) -> None:
    """Raise DataError where the last column, which is taken for the label, holds numbers that are no classes."""
    takes_classes = spec.label is not None and not spec.label.dtype.is_floating_point()
    if takes_classes and labels.dtype.kind == "f" and (labels != np.floor(labels)).any():
        raise DataError(
            f"{source}: no column is called label, y or target, and the last, '{name}', holds numbers that are no classes: name "
            "the column with the labels (--label)"
        )


def filled_inputs(
    features: Columns, spec: DataSpec, source: str, table: TableDescription | None
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return an array for each input of a model, and what is to be said of categories that training did not have.

    Args:
        features: the columns.
        spec: what the model takes.
        source: what to call the data in an error.
        table: how columns of text are coded; None where there are none.

    Raises:
        DataError: columns that do not fit the model, or a value that its input cannot hold.
    """
    entries = {entry.name: entry for entry in spec.data} if len(spec.data) > 1 else dict.fromkeys(features, *spec.data)
    _check_held(features, entries, source)
    features = Columns({name: _as_whole(column, entries.get(name)) for name, column in features.items()}, features.rows)
    if len(spec.data) < 2:
        name = spec.only_data(source).name
        if table is None:
            return {name: feature_matrix(features, source)}, []
        matrix, notes = table.matrix(features, source)
        return {name: matrix}, notes
    columns, notes = columns_by_input(features, spec, source), []
    if table is not None:
        for entry in spec.data:
            columns[entry.name], unseen = table.column(columns[entry.name], entry, source)
            notes += unseen
    return columns, notes


def _check_held(columns: Columns, entries: Mapping[str, Entry], source: str) -> None:
    """Raise DataError for a number that the input that it is for cannot hold, by its row and column."""
    for name, column in columns.items():
        entry = entries.get(name)
        if entry is None or column.ndim != 1 or column.dtype.kind not in "iuf" or not entry.dtype.is_floating_point():
            continue
        _, lost = cast(column, entry.numpy_dtype)
        if lost is not None:
            row = int(lost.argmax())
            raise DataError(
                f"{source}, {columns.rows[row]}: column '{name}' holds {column[row]}, and '{entry.name}' takes "
                f"{entry.numpy_dtype}: {remedy_of_cast(entry)}"
            )


def _as_whole(column: np.ndarray, entry: Entry | None) -> np.ndarray:
    """Return whole numbers for an input of integers as int64: beside columns of another type, large ones would be rounded."""
    if entry is None or entry.dtype.is_floating_point() or column.ndim != 1 or column.dtype.kind not in "uf":
        return column
    whole, lost = cast(column, np.dtype(np.int64))
    return column if lost is not None else whole


def columns_by_input(columns: Mapping[str, np.ndarray], spec: DataSpec, source: str) -> dict[str, np.ndarray]:
    """Return, for each input, the column of its name.

    Raises:
        DataError: there is none for an input.
    """
    missing = next((entry.name for entry in spec.data if entry.name not in columns), None)
    if missing is not None:
        names = ", ".join(f"'{entry.name}'" for entry in spec.data)
        reads_tokens = any(entry.name == INPUT_IDS for entry in spec.data)
        texts = "; texts become tokens by a tokenizer: name it (--tokenizer tokenizer.json)" if reads_tokens else ""
        raise DataError(
            f"{source}: the model's inputs are {names}, and no column of features is called '{missing}'; name the columns after "
            f"the inputs, or give an .npz file with one array per input, by name{texts}"
        )
    return {entry.name: _plain(columns[entry.name]) for entry in spec.data}


def feature_matrix(features: Mapping[str, np.ndarray], source: str) -> np.ndarray:
    """Return columns of features as an array [rows, columns].

    Raises:
        DataError: a feature that is not a number, or no rows.
    """
    for name, column in features.items():
        if column.dtype.kind not in "biuf":
            raise DataError(
                f"{source}: column '{name}' holds {_kind(column)}, not numbers; encode it as numbers, or name the label "
                "column (--label)"
            )
    if not features:
        raise DataError(f"{source}: no columns with features")
    plain = [_plain(column) for column in features.values()]
    matrix = plain[0] if len(plain) == 1 and plain[0].ndim > 1 else np.stack(plain, axis=1)
    if not len(matrix):
        raise DataError(f"{source}: no rows; add samples, one a line, below the names of the columns")
    return matrix


def _plain(column: np.ndarray) -> np.ndarray:
    """Return small whole numbers as int64, so that they are not taken for pixels; others, and arrays, as they are."""
    return column.astype(np.int64) if column.dtype.kind in "biu" and column.dtype != np.uint64 and column.ndim == 1 else column


def _kind(column: np.ndarray) -> str:
    return "text" if column.dtype.kind in "US" else f"values of type {column.dtype}"
