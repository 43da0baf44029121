"""Checks of a batch before anything runs: names, dtypes, shapes and class indices, in messages that name the input."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError, InputError
from burnish.norms import ExtentRule
from burnish.program import Program
from burnish.program.layout import sample_extent
from burnish.program.signature import Entry, GraphSignature, Role
from burnish.program.state import check_state
from burnish.settings import suggestion

FLOATS = frozenset({"float16", "float32", "float64", "bfloat16"})

_Form = tuple[tuple[int, ...], np.dtype, bool]
"""Shape, element type, and True for C order."""


def check_batch(
    signature: GraphSignature, batch: Mapping[str, Any], ignored: Collection[str] = (), part: bool = False
) -> dict[str, np.ndarray]:
    """Return the batch as the arrays that a graph takes, or raise an error that names the wrong input.

    Contiguous arrays of the right dtype are not copied. Floating-point values are rounded to the graph's floating-point type, and
    integers widened or narrowed if every value fits. Labels may omit last axes of extent 1. NaN and infinities in data are
    accepted: the check of the loss finds them.

    Args:
        signature: signature of the graph to run.
        batch: arrays by input name.
        ignored: names that the batch may have without use.
        part: True for a worker's part of a batch, which may be empty, or too small for statistics.

    Raises:
        InputError: a missing or unexpected input, a wrong dtype, rank or extent, an empty batch, inputs with different extents
            for a symbolic dimension, a batch too small for batch normalization, a class index out of range.
    """
    expected = {entry.name: entry for entry in signature.inputs_of(Role.DATA, Role.LABEL)}
    if not isinstance(batch, Mapping):
        raise InputError(
            f"A batch is a dict of arrays by input name, not a {type(batch).__name__}: "
            f"give {{{', '.join(repr(name) + ': ...' for name in expected)}}}"
        )
    _check_names(expected, batch, ignored)
    extents: dict[str, tuple[int, str]] = {}
    arrays = {}
    for name, entry in expected.items():
        array = _of_its_rank(entry, _as_array(entry, batch[name]))
        _check_shape(entry, array, extents, part)
        array = _converted(entry, array)
        _check_range(entry, array)
        arrays[name] = array
    for rule in signature.extents:
        extent, name = extents[rule.dimension]
        if not (rule.takes_part(extent) if part else rule.allows(extent)):
            raise InputError(
                f"The input '{name}' has {extent} along '{rule.dimension}', and {rule.reason}. Give batches of another size "
                f"(drop_last=True leaves a shorter last one out), or {rule.remedy}"
            )
    return arrays


def by_only_input(signature: GraphSignature, array: Any) -> dict[str, Any]:
    """Return a batch, given as one array, by the name of the graph's only input.

    Raises:
        InputError: the graph has several inputs, or none.
    """
    entries = signature.inputs_of(Role.DATA)
    if len(entries) != 1:
        said = ", ".join(f"'{entry.name}' ({_described(entry)})" for entry in entries) or "none"
        raise InputError(
            f"The program has {len(entries)} inputs, {said}, and was given a {type(array).__name__}: give a dict of arrays by "
            f"input name, {{{', '.join(repr(entry.name) + ': ...' for entry in entries)}}}"
        )
    return {entries[0].name: array}


class BatchCheck:
    """``check_batch`` for one graph, batch after batch. If a batch has the form of the last, only its values are checked.

    Args:
        signature, ignored, part: as in ``check_batch``.
    """

    def __init__(self, signature: GraphSignature, ignored: Collection[str] = (), part: bool = False):
        self._signature, self._ignored, self._part = signature, ignored, part
        self._entries = signature.inputs_of(Role.DATA, Role.LABEL)
        self._limited = [entry for entry in self._entries if entry.minimum is not None or entry.maximum is not None]
        self._fitting: list[_Form] = []

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the batch as arrays.

        Raises:
            InputError: as ``check_batch``.
        """
        forms = self._forms(batch)
        if forms is not None and forms == self._fitting:
            for entry in self._limited:
                _check_range(entry, batch[entry.name])
            return {entry.name: batch[entry.name] for entry in self._entries}
        arrays = check_batch(self._signature, batch, self._ignored, self._part)
        if forms is not None and all(array is batch[name] for name, array in arrays.items()):
            self._fitting = forms
        return arrays

    def _forms(self, batch: Mapping[str, Any]) -> list[_Form] | None:
        """Return the form of each array; None if an entry is not an array, or the batch has other entries."""
        if type(batch) is not dict or len(batch) != len(self._entries):
            return None
        forms = []
        for entry in self._entries:
            array = batch.get(entry.name)
            if type(array) is not np.ndarray:
                return None
            forms.append((array.shape, array.dtype, array.flags.c_contiguous))
        return forms


class HyperparameterCheck:
    """``check_hyperparameters`` for one graph, step after step: values that stay the same are checked once.

    Args:
        signature: signature of the graph.
    """

    def __init__(self, signature: GraphSignature):
        self._signature = signature
        self._checked: Mapping[str, Any] | None = None
        self._arrays: dict[str, np.ndarray] = {}

    def __call__(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return every hyperparameter as a scalar array; unchanged values give the same arrays.

        Raises:
            ConfigurationError: as ``check_hyperparameters``.
        """
        # True equals 1.0, but is not a valid number.
        if values != self._checked or (values and any(type(value) is not float for value in values.values())):
            self._arrays = check_hyperparameters(self._signature, values)
            self._checked = dict(values)
        return self._arrays


def broken_rule(signature: GraphSignature, samples: int) -> ExtentRule | None:
    """Return the rule that a batch of this many samples breaks, or None."""
    entries = signature.inputs_of(Role.DATA, Role.LABEL)
    batch = {sample_extent(entry) for entry in entries if entry.extents and entry.sample_axis is not None}
    return next((rule for rule in signature.extents if rule.dimension in batch and not rule.allows(samples)), None)


def check_hyperparameters(signature: GraphSignature, requested: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return every hyperparameter of a graph as a scalar array: the requested value, or the default.

    Raises:
        ConfigurationError: an unknown name, a rate that the graph computes itself, a value that is not a finite number or is
            negative, as hyperparameters are rates (one whose default is NaN may be any finite number, or NaN), or no value and no
            default.
    """
    computed = {entry.name for entry in signature.outputs_of(Role.RATE)}
    entries = {entry.name: entry for entry in signature.inputs_of(Role.HYPERPARAMETER)}
    for name in requested:
        if name in computed:
            raise ConfigurationError(
                f"{name}={requested[name]!r}: this program computes '{name}' from the step, by the schedule that it was compiled "
                f"with: leave it out, or compile with a number as {name}"
            )
        if name not in entries:
            raise ConfigurationError(
                f"There is no hyperparameter '{name}'{suggestion(name, entries)}; "
                f"a step of this program takes {', '.join(entries) or 'none'}"
            )
    values = {}
    for name, entry in entries.items():
        value = requested.get(name, entry.default)
        if value is None and entry.default is None:
            raise ConfigurationError(f"The hyperparameter '{name}' has no default: give it with every step, {name}=...")
        number = _plain_number(value)
        largest = float(np.finfo(entry.numpy_dtype).max)
        if entry.default is not None and math.isnan(entry.default):
            if number is None or not (math.isnan(number) or abs(number) <= largest):
                raise ConfigurationError(
                    f"The hyperparameter '{name}' is {value!r}: give one finite number, or leave it out where nothing is new"
                )
        elif number is None or not 0 <= number <= largest:
            raise ConfigurationError(
                f"The hyperparameter '{name}' is {value!r}: give one finite number that is not negative, such as {name}=0.01"
            )
        values[name] = np.asarray(number, dtype=entry.numpy_dtype)
    return values


def _plain_number(value: Any) -> float | None:
    """Return a number, a numpy scalar or an array without dimensions as a float; None otherwise."""
    if isinstance(value, bool | str | bytes) or np.ndim(value) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _check_names(expected: Mapping[str, Entry], batch: Mapping[str, Any], ignored: Collection[str]) -> None:
    unexpected = [name for name in batch if name not in expected and name not in ignored]
    missing = [name for name in expected if name not in batch]
    if missing:
        entry = expected[missing[0]]
        instead = f"; instead it has {', '.join(repr(name) for name in unexpected)}" if unexpected else ""
        raise InputError(f"The batch lacks the input '{entry.name}' ({_described(entry)}){instead}: add it to the batch")
    if unexpected:
        name = unexpected[0]
        raise InputError(
            f"The batch has an unexpected input {name!r}{suggestion(str(name), expected)}: "
            f"expected {', '.join(map(repr, expected))}; leave it out"
        )


def _described(entry: Entry) -> str:
    kind = "text" if entry.dtype == ir.DataType.STRING else entry.numpy_dtype
    return f"{kind} of shape [{_extents(entry.extents)}]"


def _extents(shape: tuple[int | str | None, ...]) -> str:
    return ", ".join("?" if extent is None else str(extent) for extent in shape)


def _expected(entry: Entry, array: np.ndarray) -> str:
    return f"expected shape [{_extents(entry.extents)}], got [{_extents(array.shape)}]"


def _as_array(entry: Entry, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception as error:  # foreign tensors raise their own errors from __array__
        raise InputError(
            f"The input '{entry.name}' is a {type(value).__name__} that is not an array ({error}): "
            f"give a numpy array, {_described(entry)}"
        ) from error
    if entry.dtype == ir.DataType.STRING:
        return _as_text(entry, array)
    if array.dtype.kind in "OSUMmVT" and array.dtype.name not in FLOATS:
        raise InputError(f"The input '{entry.name}' has dtype {array.dtype}, which is not numeric: give {_described(entry)}")
    return array


def _as_text(entry: Entry, array: np.ndarray) -> np.ndarray:
    """Return an array of text as objects, the form that runtimes take."""
    if array.dtype.kind not in "OUT" or not all(isinstance(item, str) for item in array.flat):
        raise InputError(
            f"The input '{entry.name}' has dtype {array.dtype}, and takes text: give an array of str, of shape "
            f"[{_extents(entry.extents)}]"
        )
    return array.astype(object)


def _of_its_rank(entry: Entry, array: np.ndarray) -> np.ndarray:
    """Return labels with the trailing axes of extent 1 that the graph takes: ``[N]`` for scores of shape ``[N, C, 1, 1]``."""
    rank = len(entry.extents)
    if entry.role is Role.LABEL and 0 < array.ndim < rank and all(extent == 1 for extent in entry.extents[array.ndim :]):
        return array.reshape(*array.shape, *[1] * (rank - array.ndim))
    return array


def _check_shape(entry: Entry, array: np.ndarray, extents: dict[str, tuple[int, str]], part: bool) -> None:
    rank = len(entry.extents)
    if array.ndim != rank:
        is_longer = array.ndim > rank and all(extent == 1 for extent in array.shape[rank:])
        remedy = f": give its reshape({', '.join(['-1', *map(str, array.shape[1:rank])])})" if is_longer and rank else ""
        raise InputError(
            f"The input '{entry.name}' has {array.ndim} dimensions, and the program takes {rank}: "
            f"{_expected(entry, array)}{remedy or _other_labels(entry, array)}"
        )
    for axis, (extent, expected) in enumerate(zip(array.shape, entry.extents, strict=True)):
        if isinstance(expected, int) and extent != expected:
            raise InputError(
                f"The input '{entry.name}' has extent {extent} along axis {axis}, and the program takes {expected}: "
                f"{_expected(entry, array)}{_what_fixes(entry, axis)}{_how_to_open(entry, axis)}"
            )
        if not isinstance(expected, int) and extent == 0 and not (part and axis == entry.sample_axis):
            remedy = "leave empty batches out"
            if axis != entry.sample_axis and isinstance(expected, str):
                remedy += f". Where this is a cache that is always empty, compile without it: bind={{'{expected}': 0}}"
            raise InputError(f"The input '{entry.name}' is empty along axis {axis} (got [{_extents(array.shape)}]): {remedy}")
        if isinstance(expected, str):
            earlier, other = extents.setdefault(expected, (extent, entry.name))
            if earlier != extent:
                raise InputError(
                    f"The inputs '{other}' and '{entry.name}' disagree about '{expected}': {earlier} and {extent} "
                    f"('{entry.name}': {_expected(entry, array)}). Give both for the same samples"
                )


def _other_labels(entry: Entry, array: np.ndarray) -> str:
    """Return a remedy for numbers per class given to a loss of class indices, or the reverse."""
    extents = entry.extents
    if entry.role is not Role.LABEL:
        return ""
    if entry.numpy_dtype.kind in "iu" and array.ndim == len(extents) + 1 and entry.maximum is not None:
        classes = [axis for axis in (1, -1) if axis < array.ndim and array.shape[axis] == entry.maximum + 1]
        if classes:
            return (
                f": where each row is one class (one-hot), give its argmax(axis={classes[0]}); where rows are probabilities, "
                "choose 'cross_entropy:probabilities=true', and where several classes may be right at once, 'bce_with_logits'"
            )
    if entry.numpy_dtype.name in FLOATS and array.dtype.kind in "iu" and array.ndim == len(extents) - 1:
        return ": where these are class indices, choose a loss over classes, such as 'cross_entropy', or give them one-hot"
    return ""


def _what_fixes(entry: Entry, axis: int) -> str:
    """Return the layer that fixes this extent; empty if the model itself declares it."""
    reasons = [reason for fixed, reason in entry.fixed_by if fixed == axis]
    return f". {reasons[0]}" if reasons else ""


def _how_to_open(entry: Entry, axis: int) -> str:
    """Return a remedy for a sample axis of extent 1; empty for other axes."""
    if entry.role is not Role.DATA or 1 not in entry.extents or entry.extents.index(1) != axis:
        return ""
    return (
        ". If that is the axis of the batch, the model was exported for one sample at a time: compile it with batch='open' "
        "(--batch open), which lets it take batches of any size, or export it again with an open batch (dynamic axes)"
    )


def _converted(entry: Entry, array: np.ndarray) -> np.ndarray:
    dtype = entry.numpy_dtype
    if array.dtype == dtype:
        return np.asarray(array, dtype=dtype, order="C")
    if dtype.name in FLOATS and array.dtype.name in FLOATS:
        return _rounded(entry, array)
    if dtype.kind in "iu" and array.dtype.kind in "iu":
        return _fitted(entry, array)
    reason = ""
    if dtype.kind in "iu" and array.dtype.name in FLOATS:
        reason = "; class indices are integers" if entry.role is Role.LABEL else "; it takes integers"
    elif dtype.name in FLOATS and array.dtype.kind in "iub" and entry.role is Role.DATA:
        reason = "; scale integers (pixels: divide by 255) to what the model was made for"
    raise InputError(
        f"The input '{entry.name}' has dtype {array.dtype}, expected {dtype}{reason}: convert it with .astype('{dtype}')"
    )


def _rounded(entry: Entry, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = array.astype(entry.numpy_dtype, order="C")
    if entry.numpy_dtype.itemsize <= array.dtype.itemsize:  # bfloat16 has a larger range than float16
        overflowed = np.isinf(rounded) & np.isfinite(array)
        if overflowed.any():
            raise InputError(
                f"The input '{entry.name}' holds {array[overflowed].flat[0]} at {_position(overflowed)}, "
                f"too large for {entry.numpy_dtype}: scale the data"
            )
    return rounded


def _fitted(entry: Entry, array: np.ndarray) -> np.ndarray:
    dtype = entry.numpy_dtype
    if array.size and not np.can_cast(array.dtype, dtype):
        limits = np.iinfo(dtype)
        outside = (array < limits.min) | (array > limits.max)
        if outside.any():
            raise InputError(
                f"The input '{entry.name}' holds {array[outside].flat[0]} at {_position(outside)}, which {dtype} cannot hold"
            )
    return array.astype(dtype, order="C")


def _check_range(entry: Entry, array: np.ndarray) -> None:
    if (entry.minimum is None and entry.maximum is None) or array.size == 0:
        return
    # Faster than array.min() and max(), which go through Python.
    smallest, largest = np.minimum.reduce(array, axis=None), np.maximum.reduce(array, axis=None)
    low = smallest if entry.minimum is None else entry.minimum
    high = largest if entry.maximum is None else entry.maximum
    if entry.two_values:
        outside = (array != low) & (array != high)
    elif smallest >= low and largest <= high:
        return
    else:
        outside = (array < low) | (array > high)
    if entry.ignored is not None:
        outside &= array != entry.ignored
    if not outside.any():
        return
    between = " and " if entry.two_values else ".."
    valid = f"{'' if entry.minimum is None else entry.minimum}{between}{'' if entry.maximum is None else entry.maximum}"
    remedy = "Number the classes from 0, and check that the model has an output for each"
    if entry.role is Role.DATA:
        remedy = "Number them as the model was made to read them (its vocabulary), or take a model with more rows"
    elif entry.two_values:
        remedy = f"Write {entry.minimum} for no, which is often 0, and {entry.maximum} for yes"
    elif entry.numpy_dtype.kind not in "iu":
        remedy = "Give the loss what it compares with, or choose a loss for values of any size"
    also = f" or {entry.ignored}, which is ignored" if entry.ignored is not None else ""
    raise InputError(
        f"The input '{entry.name}' holds {array[outside].flat[0]} at {_position(outside)}, "
        f"out of range: valid are {valid}{also}. {remedy}"
    )


def _position(mask: np.ndarray) -> str:
    return str([int(index) for index in np.unravel_index(int(mask.argmax()), mask.shape)])


def check_given_state(program: Program, state: Mapping[str, np.ndarray]) -> None:
    """Raise ConfigurationError unless a user's state is a mapping with the entries of the program's state."""
    remedy = "Give what session.state() or program.initial_state() of this program returns"
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"The state is of type {type(state).__name__}, not a dict of arrays by state name. {remedy}")
    check_state(program.signature.state, state, ConfigurationError, "The state", remedy)
