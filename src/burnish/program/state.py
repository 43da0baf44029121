"""State by name: arrays that are made when read, and checks that a state fits a program."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from burnish.errors import BurnishError, ConfigurationError
from burnish.program.signature import Entry, Signature

Arrays = dict[str, np.ndarray]
BLOCK = 1 << 20
"""Bytes that are processed at a time, so that they stay in the cache."""
Kind = tuple[np.dtype, tuple[int, ...]]
"""Dtype and shape of an array."""


class LazyArrays(Mapping[str, np.ndarray]):
    """Arrays by name, each made when it is read, so that only one of them needs memory at a time."""

    @abstractmethod
    def kind(self, name: str) -> Kind:
        """Return the dtype and shape of an array without making it; KeyError if there is none of this name."""

    def __contains__(self, name: object) -> bool:
        try:
            self.kind(str(name))
        except KeyError:
            return False
        return True

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        """Fill an array of the same dtype and shape; a subclass may override it to avoid a copy.

        Args:
            name: name of the array.
            target: the array to fill, contiguous.
            is_zero: True if it holds zeros, which need not be written again.
        """
        write_blocks(target, blocks(self[name]), is_zero)

    def constant(self, name: str) -> np.ndarray | None:
        """Return the scalar that fills an array, if known without making the array."""
        return None


class EntriesOnRequest(LazyArrays):
    """State entries that are read when needed.

    Args:
        entries: the state entries.
        read: a function that returns an entry, by name.
        instead: state entry -> the state entry, of the same dtype and shape, that is read in its place.
    """

    def __init__(self, entries: Iterable[Entry], read: Callable[[str], np.ndarray], instead: Mapping[str, str] | None = None):
        self._entries = {entry.name: entry for entry in entries}
        self._read = read
        self._instead = dict(instead or {})

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._entries:
            raise KeyError(name)
        return self._read(self._instead.get(name, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def kind(self, name: str) -> Kind:
        entry = self._entries[name]
        shape = tuple(extent for extent in entry.extents if isinstance(extent, int))
        return entry.numpy_dtype, shape if len(shape) == len(entry.extents) else self[name].shape


class _Chosen(LazyArrays):
    def __init__(self, arrays: LazyArrays, names: Iterable[str]):
        self._arrays = arrays
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def kind(self, name: str) -> Kind:
        if name not in self._names:
            raise KeyError(name)
        return self._arrays.kind(name)

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        self._arrays.read_into(name, target, is_zero)

    def constant(self, name: str) -> np.ndarray | None:
        return self._arrays.constant(name)


def chosen(arrays: Mapping[str, np.ndarray], names: Iterable[str]) -> Mapping[str, np.ndarray]:
    """Return the arrays with these names that exist; lazy arrays are not made."""
    present = [name for name in names if name in arrays]
    return _Chosen(arrays, present) if isinstance(arrays, LazyArrays) else {name: arrays[name] for name in present}


def blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in flat parts of at most ``BLOCK`` bytes."""
    flat = np.ascontiguousarray(array).reshape(-1)
    step = max(1, BLOCK // max(1, flat.itemsize))
    for begin in range(0, flat.size, step):
        yield flat[begin : begin + step]


def write_blocks(target: np.ndarray, parts: Iterable[np.ndarray], is_zero: bool) -> None:
    """Fill a contiguous array with flat parts; ``is_zero`` skips parts whose bits are all zero."""
    flat = target.reshape(-1)
    begin = 0
    for part in parts:
        if not is_zero or part.view(np.uint8).any():
            flat[begin : begin + part.size] = part
        begin += part.size


def read_into(arrays: Mapping[str, np.ndarray], name: str, target: np.ndarray) -> None:
    """Fill an array with the one of this name, of the same dtype and shape; a lazy array may be read without making it."""
    if isinstance(arrays, LazyArrays):
        arrays.read_into(name, target)
    else:
        np.copyto(target, arrays[name], casting="no")


def kind_of(arrays: Mapping[str, np.ndarray], name: str) -> Kind:
    """Return the dtype and shape of an array; a lazy array is not made."""
    if isinstance(arrays, LazyArrays):
        return arrays.kind(name)
    array = np.asarray(arrays[name])
    return array.dtype, array.shape


def check_state(
    entries: Iterable[Entry], state: Mapping[str, np.ndarray], error: type[BurnishError], source: str, remedy: str
) -> None:
    """Raise ``error`` unless ``state`` holds exactly these entries, each with its dtype and shape.

    Args:
        entries: the state entries of a program.
        state: arrays by state name.
        error: the class to raise.
        source: the subject of the message.
        remedy: the remedy, as a sentence without its full stop.
    """
    differences = state_differences(entries, state)
    if differences:
        raise error(f"{source} does not fit the program: {'; '.join(differences)}. {remedy}")


def state_differences(entries: Iterable[Entry], state: Mapping[str, np.ndarray]) -> list[str]:
    """Return the missing and unknown entries and wrong dtypes and shapes, each as a phrase; empty if the state fits."""
    expected = {entry.name: entry for entry in entries}
    differences = []
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    if missing:
        differences.append(f"missing {_listed(missing)}")
    if unknown:
        differences.append(f"unknown {_listed(unknown)}")
    unfit = []
    for name, entry in expected.items():
        if name not in state:
            continue
        if not isinstance(state, LazyArrays) and not isinstance(state[name], np.ndarray | np.generic):
            unfit.append(f"'{name}' is a {type(state[name]).__name__}, not an array")
            continue
        dtype, shape = kind_of(state, name)
        if not shape_fits(shape, entry.extents):
            unfit.append(f"'{name}' has shape {list(shape)}, expected {list(entry.extents)}")
        elif dtype != entry.numpy_dtype:
            unfit.append(f"'{name}' has dtype {dtype}, expected {entry.numpy_dtype}")
    return differences + unfit[:5] + ([f"and {len(unfit) - 5} more"] if len(unfit) > 5 else [])


def shape_fits(actual: tuple[int, ...], expected: tuple[int | str | None, ...]) -> bool:
    """True if an array of shape ``actual`` fits the shape ``expected``, in which anything but an integer is open."""
    return len(actual) == len(expected) and all(
        not isinstance(wanted, int) or wanted == extent for extent, wanted in zip(actual, expected, strict=True)
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def averages(signature: Signature, parameters: str) -> dict[str, str]:
    """Return ``param/<initializer>`` -> the state entry of its average, for every parameter that has one.

    Raises:
        ConfigurationError: ``parameters`` is not ``average``, or no optimizer of the program keeps one.
    """
    from burnish.optim.average import AVERAGE
    from burnish.optim.slots import parameter_of, slot_of

    if parameters != "average":
        raise ConfigurationError(f"parameters must be None, for those of the state, or 'average', not {parameters!r}")
    kept = (entry.name for entry in signature.state if slot_of(entry.name) == AVERAGE)
    found = {f"param/{parameter_of(name)}": name for name in kept}
    if not found:
        raise ConfigurationError(
            "parameters='average': the program's optimizer keeps no average of them; wrap it in burnish.optim.ema(...) or "
            "burnish.optim.swa(...), which program.with_optimizer(...) does for one that is compiled"
        )
    return found


ROUNDED = "rounded_weights"
"""The option of a program that holds {initializer: dtype} for sixteen-bit weights of the file with a state in float32."""


class Weights(LazyArrays):
    """Arrays by state name; memory of arrays that are also in a file can be freed, and they are then read again.

    Args:
        tensors: tensors by state name.
        dtypes: dtypes of the arrays; an array whose tensor has another dtype is made at each access.

    Raises:
        ModelError: on reading an array whose memory was freed: the file was overwritten.
    """

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol], dtypes: Mapping[str, ir.DataType]):
        self._tensors = dict(tensors)
        self._dtypes = dict(dtypes)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name].numpy().astype(self._dtypes[name].numpy(), copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def kind(self, name: str) -> Kind:
        tensor = self._tensors[name]
        return self._dtypes[name].numpy(), tuple(tensor.shape.numpy())

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        from burnish.importer.file_tensors import FileTensor

        tensor = self._tensors[name]
        if isinstance(tensor, FileTensor):
            write_blocks(target, tensor.parts(BLOCK), is_zero)
        else:
            super().read_into(name, target, is_zero)

    def as_they_came(self) -> dict[str, ir.TensorProtocol]:
        """Return the tensors whose dtype is that of their array."""
        return {name: tensor for name, tensor in self._tensors.items() if tensor.dtype == self._dtypes[name]}

    def take(self, name: str) -> np.ndarray:
        """Return an array that the caller owns, and free the memory of its tensor if it can be read again."""
        from burnish.importer.file_tensors import FileTensor

        tensor = self._tensors[name]
        if not isinstance(tensor, FileTensor):
            return np.array(tensor.numpy(), dtype=self._dtypes[name].numpy())
        array = np.array(tensor.own_array(), dtype=self._dtypes[name].numpy(), copy=None)
        tensor.release()
        return array

    def read_from(self, tensors: Mapping[str, ir.TensorProtocol]) -> Weights:
        """Return the same arrays, from other tensors that hold them.

        Args:
            tensors: tensors by initializer name.
        """
        return Weights({name: tensors[name.partition("/")[2]] for name in self._tensors}, self._dtypes)

    def release(self) -> None:
        """Free the memory of arrays that can be read again."""
        from burnish.importer.file_tensors import FileTensor

        for tensor in self._tensors.values():
            if isinstance(tensor, FileTensor):
                tensor.release()
