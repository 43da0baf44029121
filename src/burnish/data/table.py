"""Tables as datasets: feature columns and label columns, from any source."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from burnish.data.data_spec import DataSpec, cast, remedy_of_cast
from burnish.data.dataset import ArrayDataset, group_values
from burnish.data.label_coding import (
    LABEL_COLUMNS,
    LabelDescription,
    are_lists,
    asks_yes_or_no,
    divided,
    label_columns,
    several_labels,
)
from burnish.data.missing_values import AUTO, DROP, ERROR, FILLS, Columns, Missing, alike_but_for_case, marks_among
from burnish.data.model_metadata import DataDescription
from burnish.data.preprocessing import PixelsLike
from burnish.data.splitting import EvalSplit
from burnish.data.table_coding import TableDescription
from burnish.errors import ConfigurationError, DataError
from burnish.program import Entry
from burnish.settings import suggestion

INPUT_IDS = "input_ids"
STANDARDIZE, RAW = "standardize", "raw"
SCALINGS = (AUTO, STANDARDIZE, RAW)
FAR = 10.0
"""Mean or standard deviation that triggers the advice to standardize."""
SHOWN = 3


def check_scaling(columns: str) -> str:
    """Return ``columns``; raise ConfigurationError for an unknown value."""
    if columns not in SCALINGS:
        raise ConfigurationError(
            f"columns={columns!r} (--columns): give {', '.join(map(repr, SCALINGS))}{suggestion(str(columns), SCALINGS)}"
        )
    return columns


def table_dataset(
    columns: Mapping[str, np.ndarray],
    spec: DataSpec,
    label: str | Sequence[str] | None,
    source: str,
    classes: Sequence[str] | None,
    notes: Sequence[str] = (),
    pixels: PixelsLike | None = None,
    split: EvalSplit | None = None,
    separator: str | None = None,
    missing: Missing = AUTO,
    scaling: str = AUTO,
    coded: TableDescription | None = None,
) -> ArrayDataset:
    """Make a dataset of table columns (each [rows]); all but the label columns are features.

    A model with one input gets all features in order, with text encoded by ``TableDescription``; a single feature may hold an
    array per row (bytes are pixels). Several inputs get the columns of their names. Unused columns and a guessed label column
    appear in the note.

    Categories and classes are those of the whole table; other statistics come from the training part (``ArrayDataset.part``).

    Args:
        columns: columns by name.
        spec: inputs of the program.
        label: label column, or several with commas between them, of numbers or yes/no values.
        source: name for errors.
        classes: class names by index.
        notes: notes on the file.
        pixels: preprocessing of bytes.
        split: part to hold out; its column of groups is not a feature.
        separator: text between several labels in one column.
        missing: see ``open_dataset``.
        scaling: ``standardize``, ``raw``, or ``auto``, which standardizes for untrained models.
        coded: coding of the whole table, whose categories a part takes over.

    Raises:
        DataError: a feature is neither a number nor text, there are no rows, or the data do not fit the model.
    """
    said, named, known = list(notes), source, spec.described.labels
    held = columns if isinstance(columns, Columns) else Columns.of_arrays(columns)
    group = None if split is None else split.group
    if group is not None:
        group_values(held.get(group), group, source, ", ".join(map(repr, held)))
        if group == label:
            raise DataError(f"{source}: '{group}' is the column with the labels, and cannot say which rows belong together too")
    chosen = label_columns([name for name in held if name != group], label, source, known)
    is_known = known is not None and chosen == known.columns
    if label is None and not is_known and chosen[0].lower() not in LABEL_COLUMNS:
        _check_guessed(held[chosen[0]], chosen[0], spec, source)
        said.append(f"no column is called label, y or target; '{chosen[0]}', the last, is taken for the label (--label: another)")
        source = f"{source} (with the last column, '{chosen[0]}', as label)"
    if is_known and known is not None:
        separator = separator or known.separator
    no_features = chosen if group is None else (*chosen, group)
    held, dropped = settled(held, no_features, missing, separator is not None, named)
    groups = None if group is None else group_values(held[group], group, source, "")
    held = held.only([name for name in held if name != group])
    said += dropped
    begun, columns, features = tuple(said), held, held.only([name for name in held if name not in chosen])
    if spec.label is not None:
        _check_held(held.only(chosen), dict.fromkeys(chosen, spec.label), named)
    table, doubts = _described(features, spec, source, missing, scaling, coded)
    if group is not None and table is None and len(spec.data) == 1:  # coded by name: files to predict may have the column too
        table = TableDescription(tuple((name, None) for name in features))
    table = coded if table is None else table
    filled, unseen = filled_inputs(features, spec, source, table)
    said += unseen
    if table is not None and table is not spec.described.table and (text := table.text()):
        said.append(text)
    said += doubts
    if len(spec.data) > 1 and (rest := [name for name in features if name not in filled]):
        said.append(f"no input reads the columns {', '.join(map(repr, rest))}")
    labels, names = _labels({name: columns[name] for name in chosen}, spec, source, classes, separator)
    if labels.dtype.kind in "US":
        occurring = np.unique(labels.astype(str)).tolist()
        said += [*alike_but_for_case(occurring), *marks_among(occurring)]
    note = f"{named}: {'; '.join(said)}" if said else None
    dataset = spec.dataset(filled, labels, source, classes, note, pixels, table)
    is_float = spec.label is not None and spec.label.dtype.is_floating_point()
    if is_float:
        dataset.classes, dataset.labels = names, LabelDescription(chosen, separator if names and len(chosen) == 1 else None)
    dataset.by, dataset.groups = " and ".join(f"'{name}'" for name in chosen), groups
    if split is None:
        return dataset
    trained = dataset.classes if classes is None else classes
    how: dict[str, Any] = {"separator": separator, "missing": missing, "scaling": scaling}

    def part(indices: np.ndarray, like: DataDescription | None) -> ArrayDataset:
        own = held.part(indices)
        if like is None:
            return table_dataset(own, spec, chosen, named, trained, begun, pixels, **how, coded=table)
        made = table_dataset(own, spec.like(like), chosen, named, trained, (), pixels, **how)
        made.note = None
        return made

    dataset.remade = part
    return dataset


def rows_as_columns(array: np.ndarray, spec: DataSpec, source: str) -> Columns | None:
    """Return rows of numbers as the raw columns of the model's training, in order; None if the model needs no raw columns.

    Args:
        array: [rows, columns].
        spec: inputs of the model.
        source: name for errors.

    Raises:
        DataError: the number of columns differs, or some are text.
    """
    table = spec.described.table
    if table is None or len(spec.data) != 1 or not (table.scales or table.fills):
        return None
    names = [name for name, _ in table.columns]
    if array.ndim == 2 and array.shape[1] == len(names) and not any(categories for _, categories in table.columns):
        return Columns.of_arrays({name: array[:, place] for place, name in enumerate(names)})
    listed = ", ".join(map(repr, names[:SHOWN])) + ", ..." * (len(names) > SHOWN)
    raise DataError(
        f"{source}: the model was trained on the columns {listed}, which "
        f"it takes as they are, and the array has shape {list(array.shape)}: give columns by name, a table or a data frame"
    )


def settled(
    columns: Columns, labels: Collection[str], missing: Missing, has_lists: bool, source: str
) -> tuple[Columns, list[str]]:
    """Apply the policy for missing values; return the columns, perhaps with gaps to fill later, and notes.

    Args:
        columns: columns of the table.
        labels: label columns, never filled.
        missing: the policy.
        has_lists: True if texts hold several labels, so an empty one is not missing.
        source: name for errors.

    Raises:
        DataError: a label is missing, or any value for ``error``.
    """
    if has_lists:
        texts = [name for name in labels if columns[name].dtype.kind in "US"]
        gaps = {name: mask for name, mask in columns.gaps.items() if name not in texts}
        columns = Columns(columns, columns.rows, gaps, columns.cells)
    if missing in (ERROR, DROP):
        return columns.without_gaps(missing, source)
    columns.refuse_gaps(labels, source)
    return columns, []


def _described(
    features: Columns, spec: DataSpec, source: str, missing: Missing, scaling: str, coded: TableDescription | None
) -> tuple[TableDescription | None, list[str]]:
    """Return the coding of columns, from training or from their own statistics, and notes on it.

    Args:
        features: the columns.
        spec: inputs of the program.
        source: name for errors.
        missing, scaling: see ``table_dataset``.
        coded: coding of the whole table, if these are some of its rows.
    """
    known = spec.described.table
    if known is not None:
        if known.in_model and scaling == STANDARDIZE:
            return known, ["columns: the model itself does to raw columns what was done in its training, and they stay raw"]
        if scaling != AUTO and (scaling == STANDARDIZE) != bool(known.scales) and not known.in_model:
            return known, [f"columns: as the model was trained, and not {scaling}: its statistics are kept with it"]
        return known, []
    is_auto = scaling == AUTO and spec.is_training and spec.described.is_initial
    standardizes = scaling == STANDARDIZE or is_auto
    if standardizes and len(spec.data) == 1:
        reason = _why_raw(spec.data[0], spec)
        if reason is not None and scaling == STANDARDIZE:
            raise DataError(f"{source}: columns='standardize' (--columns): {reason}: leave it out")
        standardizes = reason is None
    fill = missing if missing in FILLS else "median" if standardizes and missing == AUTO else None
    table = TableDescription.of(features, spec.data, source, standardizes, fill, coded)
    if table is None or not table.fills:
        features.refuse_gaps([*features], source)
    if standardizes and table is not None:
        blurred = [name for name, _ in table.columns if (scale := table.scale(name)) is not None and scale.is_blurred]
        listed = ", ".join(f"'{name}'" for name in blurred[:SHOWN])
        said = (
            f"{listed}: float32 rounds values so far from 0 to steps that are coarse beside their spread: take a number off them"
        )
        return table, [said] if blurred else []
    if scaling == RAW or not spec.is_training:
        return table, []
    entries = {entry.name: entry for entry in spec.data} if len(spec.data) != 1 else dict.fromkeys(features, *spec.data)
    large = [
        f"'{name}' ({column.astype(np.float64).mean():.3g}, {column.astype(np.float64).std():.3g})"
        for name, column in features.items()
        if name in entries and entries[name].dtype.is_floating_point() and column.ndim == 1 and column.dtype.kind in "iuf"
        if len(column) and max(abs(column.astype(np.float64).mean()), column.astype(np.float64).std()) > FAR
    ]
    if not large:
        return table, []
    more = f" and {len(large) - SHOWN} more" if len(large) > SHOWN else ""
    return table, [
        f"numbers go in as they are, and the scale of {', '.join(large[:SHOWN])}{more} (mean, standard deviation) is far from 1: "
        "where the model was not trained on them so, standardize them (columns='standardize', --columns standardize)"
    ]


def _why_raw(entry: Entry, spec: DataSpec) -> str | None:
    if not entry.dtype.is_floating_point():
        return f"the input '{entry.name}' takes {entry.dtype.name}, and standardized numbers are floating-point"
    if entry.name in spec.axes:
        return f"the input '{entry.name}' has its samples along another axis than the first"
    return None


def _labels(
    columns: Mapping[str, np.ndarray], spec: DataSpec, source: str, classes: Sequence[str] | None, separator: str | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return labels, [rows] or [rows, labels], and the names of yes/no labels.

    Raises:
        DataError: the loss takes one class and there are several columns, or one of several is text.
    """
    (first, column), *others = columns.items()
    is_of_lists = are_lists(column)
    if not others and not is_of_lists and (separator is None or column.dtype.kind not in "US"):
        return column, None
    if spec.label is None or not spec.label.dtype.is_floating_point():
        what = f"the label columns {', '.join(map(repr, columns))}" if others else f"several labels in the column '{first}'"
        raise DataError(
            f"{source}: {what} are values, or yes and no, and the loss compares with one class: name one column with the class "
            "(--label), or choose a loss of values, such as mse, or of yes and no, bce_with_logits"
        )
    if not others:
        rows = column.tolist() if is_of_lists else divided(column.tolist(), separator or "")
        return several_labels(rows, source, classes or spec.described.classes)
    texts = [name for name, each in columns.items() if each.dtype.kind not in "biuf" or each.ndim != 1]
    if texts:
        raise DataError(
            f"{source}: column '{texts[0]}' is one of several label columns and holds text: give numbers, which are values, or 0 "
            "and 1, or name one column (--label)"
        )
    stacked = np.stack([np.asarray(each, np.float64) for each in columns.values()], axis=1)
    return stacked, tuple(columns) if asks_yes_or_no(spec.label) else None


def _check_guessed(labels: np.ndarray, name: str, spec: DataSpec, source: str) -> None:
    """Raise DataError if the last column, guessed to be the label, holds numbers that are not classes."""
    takes_classes = spec.label is not None and not spec.label.dtype.is_floating_point()
    if takes_classes and labels.dtype.kind == "f" and (labels != np.floor(labels)).any():
        raise DataError(
            f"{source}: no column is called label, y or target, and the last, '{name}', holds numbers that are no classes: name "
            "the column with the labels (--label)"
        )


def filled_inputs(
    features: Columns, spec: DataSpec, source: str, table: TableDescription | None
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return an array for each input of a model, and notes on categories that training did not have.

    Args:
        features: the columns.
        spec: inputs of the model.
        source: name for errors.
        table: coding of the columns, or None.

    Raises:
        DataError: the columns do not fit the model, or an input cannot hold a value.
    """
    entries = {entry.name: entry for entry in spec.data} if len(spec.data) > 1 else dict.fromkeys(features, *spec.data)
    if table is None:
        features.refuse_gaps([*features], source)
    _check_held(features, entries, source)
    whole = {name: _as_whole(column, entries.get(name)) for name, column in features.items()}
    features = Columns(whole, features.rows, features.gaps, features.cells)
    if len(spec.data) < 2:
        name = spec.only_data(source).name
        if table is None:
            return {name: feature_matrix(features, source)}, []
        matrix, said = table.matrix(features, source, *spec.data)
        return {name: matrix}, said
    notes: list[str] = []
    features = features if table is None else table.filled(features, source, notes)
    columns = columns_by_input(features, spec, source)
    if table is not None:
        for entry in spec.data:
            columns[entry.name], unseen = table.column(columns[entry.name], entry, source)
            notes += unseen
    return columns, notes


def _check_held(columns: Columns, entries: Mapping[str, Entry], source: str) -> None:
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
    """Return whole numbers for an integer input as int64: stacked with other columns, large ones would be rounded."""
    if entry is None or entry.dtype.is_floating_point() or column.ndim != 1 or column.dtype.kind not in "uf":
        return column
    whole, lost = cast(column, np.dtype(np.int64))
    return column if lost is not None else whole


def columns_by_input(columns: Mapping[str, np.ndarray], spec: DataSpec, source: str) -> dict[str, np.ndarray]:
    """Return the column with each input's name.

    Raises:
        DataError: an input has no column.
    """
    missing = next((entry.name for entry in spec.data if entry.name not in columns), None)
    if missing is not None and spec.described.table is not None:
        raise DataError(f"{source}: no column '{missing}', which the model was trained on; the columns are {', '.join(columns)}")
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
    """Return feature columns as an array [rows, columns].

    Raises:
        DataError: a feature is not a number, or there are no rows.
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
    """Return a column of integers as int64, so that uint8 is not taken for pixels."""
    return column.astype(np.int64) if column.dtype.kind in "biu" and column.dtype != np.uint64 and column.ndim == 1 else column


def _kind(column: np.ndarray) -> str:
    return "text" if column.dtype.kind in "US" else f"values of type {column.dtype}"
