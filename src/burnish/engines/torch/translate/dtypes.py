"""Element types of ONNX, numpy and PyTorch, and conversion of arrays; bfloat16 through its bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from burnish.errors import EngineError

TORCH_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
}
ONNX_DTYPES = {own: dtype for dtype, own in TORCH_DTYPES.items()}
BYTES = {
    **dict.fromkeys((ir.DataType.INT2, ir.DataType.INT4), ir.DataType.INT8),
    **dict.fromkeys((ir.DataType.UINT2, ir.DataType.UINT4), ir.DataType.UINT8),
}
"""Byte types for numbers with fewer bits."""


def torch_dtype(dtype: ir.DataType, what: str = "A value of the graph") -> torch.dtype:
    """Return PyTorch's element type.

    Raises:
        EngineError: PyTorch has none, as for strings; ``what`` names the value.
    """
    found = TORCH_DTYPES.get(dtype)
    if found is None:
        raise EngineError(
            f"{what} holds elements of type {dtype.name}, which the torch engine does not compute with: "
            "cast it to another type in the model, or use engine='onnxruntime'"
        )
    return found


def in_bytes(array: np.ndarray, dtype: ir.DataType) -> tuple[np.ndarray, ir.DataType]:
    """Return a constant of integers narrower than a byte as bytes, with its type; any other unchanged."""
    wider = BYTES.get(dtype)
    return (array, dtype) if wider is None else (array.astype(wider.numpy()), wider)


def tensor_of(array: np.ndarray, dtype: ir.DataType) -> torch.Tensor:
    """Return a CPU tensor with a copy of the array."""
    array = np.array(array, order="C")
    if dtype == ir.DataType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def mapped_tensor_of(array: np.ndarray, dtype: ir.DataType, device: torch.device) -> torch.Tensor:
    """Return a tensor that shares its memory with an array in a mapped file.

    Raises:
        EngineError: the device has its own memory.
    """
    if device.type != "cpu":
        raise EngineError(
            f"tables: mapped files are read and written by the processor, not on device '{device}': leave tables out, or train "
            "on device='cpu'"
        )
    if dtype == ir.DataType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def view_of(tensor: torch.Tensor, dtype: ir.DataType) -> np.ndarray:
    """Return an array of a tensor's elements for immediate use: it may share the tensor's memory."""
    return tensor.numpy() if tensor.is_cpu and dtype != ir.DataType.BFLOAT16 else array_of(tensor, dtype)


def array_of(tensor: torch.Tensor, dtype: ir.DataType) -> np.ndarray:
    """Return an array with a copy of the tensor, from any device and layout."""
    tensor = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    if dtype == ir.DataType.BFLOAT16:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype.numpy()).copy()
    return np.array(tensor.numpy(), order="C")
