"""Ready-made batches from a PyTorch ``DataLoader``, a generator or any other iterable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from burnish.data.data_spec import DataSpec, fit_data, fit_label
from burnish.data.loader import Loader
from burnish.errors import ConfigurationError, DataError
from burnish.validation import is_whole

Batch = dict[str, np.ndarray]


class Batches:
    """Ready-made batches, in the order of their source.

    A batch is a mapping by the names of the model's inputs and labels, or a tuple or list of these, inputs first. Samples are
    along axis 0 of every array, even if the model uses another axis. Host arrays and tensors are fitted like file data: channel
    axes are added, and bytes are pixels. Class names become indices if the model or its training data define their order.

    Args:
        source: an iterable, which every epoch restarts; a function that returns an iterator per epoch; or an iterator, which
            continues over epochs.
        steps: batches per epoch; ``len(source)`` by default.

    Raises:
        ConfigurationError: the number of batches is unknown or below 1.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterator[Any]], steps: int | None = None):
        if steps is None and not hasattr(source, "__len__"):
            raise ConfigurationError(
                f"a {type(source).__name__} does not say how many batches an epoch has: give "
                "burnish.data.Batches(source, steps=100)"
            )
        count = len(source) if steps is None else steps  # type: ignore[arg-type]  # it has a length
        if not is_whole(count) or count < 1:
            raise ConfigurationError(f"steps={count!r}: an epoch has 1 batch or more")
        self._source, self.steps = source, int(count)
        self._goes_on = isinstance(source, Iterator)

    def __len__(self) -> int:
        return self.steps

    def epoch(self, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from number ``start`` on; earlier ones are skipped.

        Raises:
            DataError: the source has too few batches.
        """
        source = self._source() if callable(self._source) and not isinstance(self._source, Iterable) else iter(self._source)
        count = 0
        for batch in itertools.islice(source, self.steps):
            count += 1
            if count > start:
                yield batch
        if count < self.steps:
            raise DataError(f"the batches ended after {count} of {self.steps}; give as many, or fewer steps")


def is_batches(source: object) -> bool:
    """True if an object yields batches rather than samples."""
    if isinstance(source, Batches):
        return True
    is_table = hasattr(source, "column_names") or hasattr(source, "__array__")
    if is_table or isinstance(source, str | bytes | Mapping | tuple | list):
        return False
    if isinstance(source, Iterator):
        return True
    return hasattr(source, "__iter__") and hasattr(source, "__len__") and not hasattr(source, "batch")


class BatchLoader(Loader):
    """A ``Loader`` for ready-made batches of any size.

    Args:
        batches: a ``Batches``, or its source.
        spec: inputs of the program.

    Attributes:
        batches: the source of batches.
        batch_size: samples in the last batch that was read; 0 before the first.
    """

    def __init__(self, batches: Any, spec: DataSpec):
        self.batches = batches if isinstance(batches, Batches) else Batches(batches)
        self.batch_size = 0
        self._spec = spec

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, fitted to the program, in the model's layout.

        Raises:
            DataError: a batch does not fit, or there are too few.
        """
        for number, batch in enumerate(self.batches.epoch(start), start):
            fitted = self._fitted(batch, f"batch {number} of epoch {epoch + 1}")
            shared = self._spec.shared(fitted)
            self.batch_size = len(next(array for name, array in fitted.items() if name not in shared))
            yield self._spec.to_model(fitted)

    def samples_in(self, number: int) -> int:
        """Return the number of samples in the last batch that was read."""
        return self.batch_size

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _fitted(self, batch: Any, source: str) -> Batch:
        spec = self._spec
        labels = [label for label in (spec.label, *spec.further_labels) if label is not None]
        entries = [*spec.data, *labels]
        names = [entry.name for entry in entries]
        if isinstance(batch, Mapping):
            arrays = {str(name): value for name, value in batch.items()}
        elif isinstance(batch, tuple | list):
            arrays = dict(zip(names, batch, strict=False)) if len(batch) == len(names) else {}
        else:
            arrays = {names[0]: batch} if len(names) == 1 else {}
        missing = next((name for name in names if name not in arrays), None)
        if missing is not None:
            held = ", ".join(map(repr, arrays)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise DataError(
                f"{source}: nothing for '{missing}' ({held}); give a mapping with {', '.join(map(repr, names))}, or a tuple in "
                "this order"
            )
        fitted = {}
        for entry in spec.data:
            pixels = spec.preprocessing_for(entry)
            fitted[entry.name] = fit_data(_array(arrays[entry.name], entry.name, source), entry, source, pixels)
        for label in labels:
            array = _array(arrays[label.name], label.name, source)
            if array.dtype.kind in "US" and not label.dtype.is_floating_point() and spec.described.classes is None:
                raise DataError(
                    f"{source}: '{label.name}' holds names of classes, and which number each has is not known from one batch: "
                    "give class indices"
                )
            fitted[label.name], _ = fit_label(array, label, source, spec.described.classes, spec)
        return fitted


def _array(value: Any, name: str, source: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a device, or with a gradient
        raise DataError(f"{source}: '{name}' is no array ({error}); give one in the memory of the host") from error
    if array.ndim == 0:
        raise DataError(f"{source}: '{name}' is a single number; give an array with one entry for each sample, along axis 0")
    return array
