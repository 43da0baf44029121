"""The weights that a program starts from, as the tensors of its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from burnish.program.state import BLOCK, Kind, LazyArrays, write_blocks

ROUNDED = "rounded_weights"
"""The option of a program that holds {initializer: dtype} for what its file has in sixteen bits, and its state in float32."""


class Weights(LazyArrays):
    """Arrays by state name; those that lie in a file too need no memory once it was let go, and are then read there.

    Args:
        tensors: by state name.
        dtypes: of the arrays; those of tensors of another dtype are made whenever they are asked for.

    Raises:
        ModelError: from what reads an array whose memory was let go: the file has been written to.
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
        """Return the tensors of the arrays that have the dtype of their tensor."""
        return {name: tensor for name, tensor in self._tensors.items() if tensor.dtype == self._dtypes[name]}

    def take(self, name: str) -> np.ndarray:
        """Return an array that no one else has, and let the memory of its tensor go, where it can be read again."""
        from burnish.importer.file_tensors import FileTensor

        tensor = self._tensors[name]
        if not isinstance(tensor, FileTensor):
            return np.array(tensor.numpy(), dtype=self._dtypes[name].numpy())
        array = np.array(tensor.own_array(), dtype=self._dtypes[name].numpy(), copy=None)
        tensor.release()
        return array

    def read_from(self, tensors: Mapping[str, ir.TensorProtocol]) -> Weights:
        """Return the same arrays, of other tensors that hold them.

        Args:
            tensors: by the name of the initializer.
        """
        return Weights({name: tensors[name.partition("/")[2]] for name in self._tensors}, self._dtypes)

    def release(self) -> None:
        """Let the memory of arrays go that can be read again."""
        from burnish.importer.file_tensors import FileTensor

        for tensor in self._tensors.values():
            if isinstance(tensor, FileTensor):
                tensor.release()
