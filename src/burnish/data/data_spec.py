"""The data inputs of a program, and the fitting of arrays to them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from burnish.data.dataset import ArrayDataset
from burnish.data.model_metadata import DataDescription
from burnish.data.preprocessing import PixelsLike, Preprocessing, default_for, of_bytes, read_pixels, shape_text, takes_bytes
from burnish.data.table_coding import TableDescription
from burnish.errors import DataError
from burnish.program import Entry, Program, Role
from burnish.program.layout import Axes, moved_axes, samples_first, to_data_set, to_model

NOTHING_KNOWN = DataDescription()


@dataclass(frozen=True)
class DataSpec:
    """The inputs that a dataset has to fill, with samples along axis 0, even if the model uses another axis.

    Attributes:
        data: inputs of the model; those without samples (``sample_axis`` None) get one value for all.
        label: input that the loss compares with; None if the model computes its own loss.
        further_labels: further label inputs.
        described: the model's description of its data.
        predicts: True if there is no loss, so labels are not wanted.
        axes: the model's sample axis by input, if not the first.
        is_training: True if statistics may be computed from the data.
    """

    data: tuple[Entry, ...]
    label: Entry | None
    further_labels: tuple[Entry, ...] = ()
    described: DataDescription = NOTHING_KNOWN
    predicts: bool = False
    axes: Axes = field(default_factory=dict)
    is_training: bool = False

    @classmethod
    def of(
        cls,
        data: Iterable[Entry],
        labels: Iterable[Entry] = (),
        described: DataDescription = NOTHING_KNOWN,
        predicts: bool = False,
    ) -> DataSpec:
        """Return the spec for the inputs of a graph.

        Args:
            data, labels: entries of the graph's signature.
            described, predicts: see the attributes.
        """
        inputs, compared = tuple(data), tuple(labels)
        first = tuple(map(samples_first, compared))
        label, further = first[0] if first else None, first[1:]
        axes = moved_axes((*inputs, *compared))
        return cls(tuple(map(samples_first, inputs)), label, further, described, predicts, axes)

    @classmethod
    def by(cls, program: Program, metadata: Mapping[str, str] | None = None) -> DataSpec:
        """Return the spec for the training steps of ``program``.

        Args:
            program: the program; its model's metadata may describe its data.
            metadata: entries that override the model's own, such as those of a checkpoint; they imply that its data were read
                before.

        Raises:
            DataError: the metadata's description of the data cannot be read.
        """
        signature = program.signature["step"]
        described = DataDescription.read({**program.metadata, **(metadata or {})})
        spec = cls.of(program.signature.samples, signature.inputs_of(Role.LABEL), described)
        return replace(spec, is_training=not metadata)

    @classmethod
    def of_steps(cls, program: Program) -> DataSpec:
        """Return the spec for the step graph itself. With cached features, these replace the inputs they are computed from."""
        signature = program.signature["step"]
        return cls.of(signature.inputs_of(Role.DATA), signature.inputs_of(Role.LABEL))

    def to_model(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a dataset's batch in the model's layout."""
        return to_model(batch, self.axes)

    def to_data_set(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a batch in the model's layout with samples first."""
        return to_data_set(batch, self.axes)

    def shared(self, arrays: Mapping[str, np.ndarray]) -> frozenset[str]:
        """Return the names of arrays that all samples share: those of inputs without samples, if their shape fits."""
        return frozenset(
            entry.name for entry in self.data if entry.name in arrays and is_shared(np.shape(arrays[entry.name]), entry)
        )

    def preprocessing_for(
        self, entry: Entry, pixels: PixelsLike | None = None, size: tuple[int, int] | None = None
    ) -> Preprocessing:
        """Return the preprocessing of pixels for an input.

        Args:
            entry: the input.
            pixels: requested preprocessing; settings without a preset change those in the model's metadata.
            size: height and width, which override any other.

        Raises:
            ConfigurationError: there is no such preset or setting.
        """
        described = self.described.preprocessing or default_for(entry)
        chosen = described if pixels is None else read_pixels(pixels, described)
        return chosen if size is None else replace(chosen, size=size)

    def like(self, described: DataDescription) -> DataSpec:
        """Return the spec with the coding of other data, so that new data are read in the same way."""
        preprocessing = described.preprocessing or self.described.preprocessing
        classes, text = described.classes or self.described.classes, described.text or self.described.text
        table, labels = described.table or self.described.table, described.labels or self.described.labels
        sound = described.sound or self.described.sound
        known = replace(self.described, preprocessing=preprocessing, classes=classes, text=text, table=table, sound=sound)
        return replace(self, described=replace(known, labels=labels), is_training=False)

    def class_order(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the classes by index: the model's own if it has them all, else ``names``."""
        classes = self.described.classes
        if classes is None or not set(names) <= set(classes):
            return tuple(names)
        fits = self.label is None or self.label.maximum is None or len(classes) <= self.label.maximum + 1
        return classes if fits else tuple(names)

    def only_data(self, source: str) -> Entry:
        """Return the only data input, for formats that fill exactly one.

        Raises:
            DataError: the model has several.
        """
        if len(self.data) != 1:
            names = ", ".join(f"'{entry.name}'" for entry in self.data) or "none"
            raise DataError(
                f"{source}: the model's inputs are {names}, and this format fills exactly one; "
                "give an .npz file with one array per input, by name"
            )
        return self.data[0]

    def only_label(self, source: str) -> Entry:
        """Return the only label input.

        Raises:
            DataError: the loss takes none or several.
        """
        if self.further_labels:
            raise DataError(
                f"{source}: the loss compares with '{self.label and self.label.name}' and "
                f"{', '.join(repr(entry.name) for entry in self.further_labels)}, and this format fills exactly one; "
                "give an .npz file with one array per input, by name"
            )
        if self.label is None:
            raise DataError(
                f"{source}: the loss of this model takes no labels beside the model's own inputs; "
                "give an .npz file with one array per input, by name"
            )
        return self.label

    def dataset(
        self,
        features: np.ndarray | Mapping[str, np.ndarray],
        labels: np.ndarray,
        source: str,
        classes: Sequence[str] | None = None,
        note: str | None = None,
        pixels: PixelsLike | None = None,
        table: TableDescription | None = None,
    ) -> ArrayDataset:
        """Return a dataset of features (an array for a single input, or a mapping by input name) and labels, fitted to the
        inputs.
        """
        arrays = features if isinstance(features, Mapping) else {self.only_data(source).name: features}
        label = self.only_label(source)
        if turned := turned_inputs(arrays, self.data):
            note = f"{source}: {turned}" if note is None else f"{note}; {turned}"
        samples, described = self.samples(arrays, source, pixels)
        fitted, names = fit_label(labels, label, source, classes, self)
        return ArrayDataset({**samples, label.name: fitted}, names, note, described, table, self.shared(samples))

    def samples(
        self, arrays: Mapping[str, np.ndarray], source: str, pixels: PixelsLike | None = None
    ) -> tuple[dict[str, np.ndarray], Preprocessing | None]:
        """Fit arrays to the data inputs.

        Args:
            arrays: [samples, ...], by input name; uint8 arrays for floating-point inputs are pixels.
            source: name for errors.
            pixels: preprocessing of pixels.

        Returns:
            The arrays, and the preprocessing of pixels; None if there are none.

        Raises:
            DataError: see ``fit_data``; or ``pixels`` is given and no array holds pixels.
        """
        fitted, described = {}, None
        for entry in self.data:
            array = arrays[entry.name]
            if takes_bytes(array, entry):
                described = self.preprocessing_for(entry, pixels)
                fitted[entry.name] = fit_data(array, entry, source, described)
            else:
                fitted[entry.name] = fit_data(array, entry, source)
        if pixels is not None and described is None:
            held = ", ".join(f"'{name}' {array.dtype}" for name, array in arrays.items())
            raise DataError(
                f"{source}: its numbers are taken as they are ({held}); pixels says what is done to images and to arrays of "
                "bytes (uint8): leave it out"
            )
        return fitted, described


def fit_data(
    array: np.ndarray,
    entry: Entry,
    source: str,
    pixels: Preprocessing | None = None,
    samples: np.ndarray | None = None,
) -> np.ndarray:
    """Convert samples to the shape and dtype of a model's input.

    Accepted shapes, in order: the same; a missing channel axis of extent 1; channels first for channels last and vice versa;
    equal numbers of values if one side is a plain vector. Text inputs take text and integers. uint8 becomes floating point by
    ``pixels``. Integers may become floating point; the reverse must be lossless.

    Args:
        array: [samples, ...].
        entry: the input.
        source: name for errors.
        pixels: preprocessing of bytes; division by 255 by default.
        samples: sample numbers for errors; from 0 by default.

    Raises:
        DataError: shape or dtype do not fit, a value is not finite or does not fit the dtype, or an index is out of range.
    """
    if entry.dtype == ir.DataType.STRING:
        return _reshape(_text(array, entry, source), entry, source)
    _check_numbers(array, source, f"input '{entry.name}'", samples)
    fitted = array if is_shared(array.shape, entry) else _reshape(array, entry, source)
    if takes_bytes(fitted, entry):
        return of_bytes(fitted, entry, pixels or default_for(entry), source)
    fitted = _convert(fitted, entry, source, array, samples)
    if not _is_float(entry) and entry.minimum is not None and entry.maximum is not None:
        wrong = (fitted < entry.minimum) | (fitted > entry.maximum)
        if wrong.any():
            raise DataError(
                f"{source}: sample {_number(np.argwhere(wrong)[0, 0], samples)} holds {fitted[wrong].flat[0]} for input "
                f"'{entry.name}', which takes {entry.minimum} to {entry.maximum}; number them as the model was made to read "
                "them (its vocabulary), or take a model with more rows"
            )
    return fitted


def fits(shape: Sequence[int], entry: Entry) -> bool:
    """True if ``fit_data`` accepts samples of a shape ``[samples, ...]`` for an input."""
    try:
        _reshape(np.broadcast_to(np.empty((), np.bool_), shape), entry, "")
    except DataError:
        return False
    return True


def fit_label(
    labels: np.ndarray,
    entry: Entry,
    source: str,
    classes: Sequence[str] | None = None,
    spec: DataSpec | None = None,
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Convert labels to the class indices or values that the loss takes.

    Args:
        labels: [samples, ...]; class names become indices in sorted order, and the model's own class numbers (such as 1, 2, 3)
            their indices.
        entry: the label input.
        source: name for errors.
        classes: class names by index, instead of sorted.
        spec: source of the model's own class order, used if it has all labels.

    Returns:
        The labels, and the class names or None.

    Raises:
        DataError: labels are of the wrong kind, out of range, or not in ``classes``.
    """
    names: tuple[str, ...] | None = None
    takes_classes = not _is_float(entry)
    if labels.dtype.kind in "US":
        if not takes_classes:
            raise DataError(
                f"{source}: the labels are text, and the loss compares with numbers ('{entry.name}'): give numbers, or a loss of "
                "classes, such as cross_entropy; where a text holds several labels, say what stands between them "
                "(label_separator=';', --label-separator ';')"
            )
        text = _as_text(labels, f"label '{entry.name}'", source)
        if classes is None and spec is not None:
            classes = spec.class_order(sorted(set(text.reshape(-1).tolist())))
        labels, names = _class_indices(text, source, classes)
    elif takes_classes and spec is not None and spec.described.numbers is not None and labels.dtype.kind in "iu":
        labels = _indices_of_numbers(labels, entry, source, spec.described.numbers)
        names = spec.described.classes
    _check_numbers(labels, source, f"label '{entry.name}'")
    if takes_classes and len(entry.extents) in (1, 3) and labels.ndim == len(entry.extents) + 1 and labels.shape[1] > 1:
        wanted = "one class index" if len(entry.extents) == 1 else f"class indices of shape {shape_text(entry.extents[1:])}"
        raise DataError(
            f"{source}: '{entry.name}' wants {wanted} for each sample, and those of the data have shape "
            f"{shape_text(labels.shape[1:])}: where they are one-hot, write their argmax; where they are probabilities, choose "
            "the loss cross_entropy:probabilities=true, and where several classes may be right at once, bce_with_logits"
        )
    if not takes_classes and labels.ndim == 1 and len(entry.extents) == 2 and not isinstance(entry.extents[1], int):
        labels = labels[:, None]
    fitted = _convert(_reshape(labels, entry, source), entry, source, labels)
    if takes_classes:
        _check_range(fitted, entry, source, names)
    return fitted, names


def is_shared(shape: Sequence[int], entry: Entry) -> bool:
    """True if an array is shared by all samples: its input has no samples, and the shape fits."""
    extents = entry.extents
    return (
        entry.sample_axis is None
        and len(shape) == len(extents)
        and all(not isinstance(extent, int) or extent == actual for actual, extent in zip(shape, extents, strict=True))
    )


def _text(array: np.ndarray, entry: Entry, source: str) -> np.ndarray:
    if array.dtype.kind in "US":
        return _as_text(array, f"input '{entry.name}'", source)
    if array.dtype.kind not in "USOiu" or not all(isinstance(item, str | int) for item in array.reshape(-1).tolist()):
        raise DataError(
            f"{source}: the input '{entry.name}' takes text, and is to be filled with values of dtype {array.dtype}; give text"
        )
    return array.astype(str)


def _as_text(array: np.ndarray, what: str, source: str) -> np.ndarray:
    """Return an array of text as native-endian unicode; damaged data may contain invalid code points."""
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
    if plain.dtype.kind == "U" and plain.nbytes and plain.reshape(-1).view(np.uint32).max() > sys.maxunicode:
        raise DataError(f"{source}: the text for {what} is damaged: it holds what is no character; write it again")
    try:
        return plain.astype(str)
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: the text for {what} is no ASCII ({error}); write text, not bytes") from error


def _is_float(entry: Entry) -> bool:
    return bool(entry.dtype.is_floating_point())


def _check_numbers(array: np.ndarray, source: str, what: str, samples: np.ndarray | None = None) -> None:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{source}: {what} is to be filled with values of dtype {array.dtype}; give numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        rows = np.atleast_1d(array)
        sample = int(np.argwhere(~np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))[0, 0])
        raise DataError(
            f"{source}: sample {_number(sample, samples)} holds a NaN or infinite value for {what}; remove or repair it"
        )


def _fits(shape: Sequence[int], extents: Sequence[int | str | None]) -> bool:
    return len(shape) == len(extents) and all(
        not isinstance(extent, int) or extent == actual for actual, extent in zip(shape[1:], extents[1:], strict=True)
    )


def _reshape(array: np.ndarray, entry: Entry, source: str) -> np.ndarray:
    extents = entry.extents
    if not array.ndim:
        raise DataError(f"{source}: '{entry.name}' is a single number; give an array with one entry for each sample")
    if _fits(array.shape, extents):
        return array
    if array.ndim == 3 and len(extents) == 4:
        for axis in (1, 3):
            if extents[axis] == 1 and _fits(np.expand_dims(array, axis).shape, extents):
                return np.expand_dims(array, axis)
    if array.ndim == 4 and len(extents) == 4:
        for channels, order in ((1, (0, 3, 1, 2)), (3, (0, 2, 3, 1))):
            turned = array.transpose(order)
            if extents[channels] in (1, 3) and _fits(turned.shape, extents):
                return np.ascontiguousarray(turned)
    sizes = [extent for extent in extents[1:] if isinstance(extent, int)]
    is_fixed = len(sizes) == len(extents) - 1
    is_vector = array.ndim <= 2 or len(extents) <= 2
    if is_fixed and is_vector and math.prod(sizes) == math.prod(array.shape[1:]):
        return array.reshape(len(array), *sizes)
    other = _other_axis(array, entry)
    raise DataError(
        f"{source}: '{entry.name}' wants samples of shape {shape_text(extents[1:])}, and those of the data have shape "
        f"{shape_text(array.shape[1:])}; "
        + (
            _remedy_of_shape(entry)
            if other is None
            else f"where the model has its samples along axis {other} of this input, say so: "
            f"sample_axis={{'{entry.name}': {other}}} (--sample-axis {entry.name}={other})"
        )
    )


def _remedy_of_shape(entry: Entry) -> str:
    if entry.role == Role.LABEL:
        return "choose a loss that compares such values (--loss), or give labels of that shape"
    return "resize or rearrange the data, or take a model with that input"


def _other_axis(array: np.ndarray, entry: Entry) -> int | None:
    """Return the sample axis that the input would need for the data to fit; None if there is none."""
    several, *others = entry.extents
    if isinstance(several, int) and several > 1:
        for axis, extent in enumerate(others, 1):
            rest = (several, *others[: axis - 1], *others[axis:])
            if (extent == 1 or not isinstance(extent, int)) and _fits(array.shape, (extent, *rest)):
                return axis
    return None


def turned_inputs(arrays: Mapping[str, np.ndarray], entries: Sequence[Entry]) -> str | None:
    """Return a note on images that are transposed between NCHW and NHWC; None if there are none."""
    turned = []
    for entry in entries:
        array, extents = arrays[entry.name], entry.extents
        if array.ndim == len(extents) == 4 and not _fits(array.shape, extents):
            layout = "NCHW" if extents[1] in (1, 3) and _fits(array.transpose(0, 3, 1, 2).shape, extents) else "NHWC"
            turned.append(
                f"'{entry.name}' is turned to the model's {layout}, and lies as {'NHWC' if layout == 'NCHW' else 'NCHW'}"
            )
    return "; ".join(turned) or None


def _convert(array: np.ndarray, entry: Entry, source: str, given: np.ndarray, samples: np.ndarray | None = None) -> np.ndarray:
    """Cast an array to its input's dtype. ``given`` is the array before the reshape, for the position in an error."""
    converted, lost = cast(array, entry.numpy_dtype)
    if lost is not None:
        check_held(given, entry, source, samples)
    return converted


def check_held(array: np.ndarray, entry: Entry, source: str, samples: np.ndarray | None = None) -> None:
    """Raise DataError for a number that an input's dtype cannot hold, with its sample and position.

    Args:
        array: the numbers, [samples, ...].
        entry: the input.
        source: name for errors.
        samples: numbers of the samples; counted from 0 by default.
    """
    _, lost = cast(array, entry.numpy_dtype)
    if lost is None:
        return
    flat = int(lost.argmax())
    sample, *place = (int(index) for index in np.unravel_index(flat, array.shape))
    where = f"sample {_number(sample, samples)}" + (
        f", column {place[0]}" if len(place) == 1 else f" at {place}" if place else ""
    )
    held = f"{source}, {where}: '{entry.name}' takes {entry.numpy_dtype}, and the data hold {array.flat[flat]}"
    raise DataError(f"{held}: {remedy_of_cast(entry)}")


def cast(array: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
    """Return an array in another dtype, and a bool mask of the values that do not fit; None if all fit.

    Floating point may be rounded, but finite values must stay finite. Integer dtypes only hold whole numbers in their range.
    """
    if array.dtype == dtype:
        return array, None
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "iu":
        # The cast of a float just above the range gives the largest integer on some processors, which compares as equal.
        lost = (converted != array) | (array >= 2.0 ** (np.iinfo(dtype).bits - (dtype.kind == "i")))
    elif np.can_cast(array.dtype, dtype):
        return converted, None
    else:
        lost = ~np.isfinite(converted)
        if lost.any():
            lost &= np.isfinite(array)
    return converted, lost if lost.any() else None


def remedy_of_cast(entry: Entry) -> str:
    """Return the remedy for a value that an input's dtype cannot hold."""
    if _is_float(entry):
        return "scale or repair the data; a value that it cannot hold would become infinite"
    otherwise = ", or choose a loss of real numbers, such as mse" if entry.role is Role.LABEL else ""
    return f"give whole numbers in its range{otherwise}"


def _number(sample: int, samples: np.ndarray | None) -> int:
    return int(sample if samples is None else samples[sample])


def _class_indices(labels: np.ndarray, source: str, classes: Sequence[str] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    names, indices = np.unique(labels, return_inverse=True)
    if classes is None:
        return indices.reshape(labels.shape).astype(np.int64), tuple(str(name) for name in names)
    position = {name: index for index, name in enumerate(classes)}
    unknown = [str(name) for name in names if str(name) not in position]
    if unknown:
        raise DataError(
            f"{source}: class '{unknown[0]}' is not among the classes that are trained: {', '.join(classes)}; "
            "remove these samples, or add the class to the training data"
        )
    mapping = np.asarray([position[str(name)] for name in names], dtype=np.int64)
    return mapping[indices.reshape(labels.shape)], tuple(classes)


def _indices_of_numbers(labels: np.ndarray, entry: Entry, source: str, numbers: Sequence[int]) -> np.ndarray:
    """Return class indices for the numbers by which a model calls its classes; the ignored label stays."""
    matches = labels[..., None] == np.asarray(numbers, dtype=np.int64)
    ignored = np.zeros(labels.shape, bool) if entry.ignored is None else labels == entry.ignored
    unknown = labels[~matches.any(axis=-1) & ~ignored]
    if unknown.size:
        raise DataError(
            f"{source}: the label {unknown.reshape(-1)[0]} is none of the model's classes, which are numbered "
            f"{', '.join(map(str, numbers))}; remove these samples, or correct their labels"
        )
    return np.where(ignored, labels, matches.argmax(axis=-1))


def _check_range(labels: np.ndarray, entry: Entry, source: str, names: tuple[str, ...] | None) -> None:
    if entry.minimum is None or entry.maximum is None:
        return
    if names is not None and len(names) > entry.maximum + 1:
        raise DataError(
            f"{source}: {len(names)} classes ({names[0]} ... {names[-1]}), and the model has {entry.maximum + 1}; "
            "take a model with as many outputs as there are classes"
        )
    wrong = (labels < entry.minimum) | (labels > entry.maximum)
    if entry.ignored is not None:
        ignored = labels == entry.ignored
        if labels.size and ignored.all():
            raise DataError(
                f"{source}: every label is {entry.ignored}, which the loss ignores, so nothing would train: give the samples "
                f"labels from {entry.minimum} to {entry.maximum}"
            )
        wrong &= ~ignored
    if wrong.any():
        sample = int(np.argwhere(wrong)[0, 0])
        value = labels[wrong].reshape(-1)[0]
        raise DataError(
            f"{source}: sample {sample} has the label {value}, and '{entry.name}' takes {entry.minimum} to {entry.maximum}; "
            "number the classes from 0, and take a model with as many outputs as there are classes"
        )
