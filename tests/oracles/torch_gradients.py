"""PyTorch autograd as an oracle for gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

torch.set_num_threads(1)


def torch_gradients(
    function: Callable[..., Any],
    inputs: Sequence[np.ndarray | None],
    attributes: Mapping[str, Any],
    cotangents: Mapping[int, np.ndarray],
    wrt: Sequence[int],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the outputs of ``function(*inputs, **attributes)`` and the gradients of sum(cotangent * output), in float64.

    Args:
        function: takes a tensor for each input (None for one left out), returns a tensor or a tuple of tensors.
        inputs: floating-point arrays are raised to float64; integer and boolean ones keep their dtype.
        attributes: keyword arguments.
        cotangents: for each output that counts, by its index.
        wrt: the inputs to differentiate by.
    """
    tensors: list[torch.Tensor | None] = []
    for index, array in enumerate(inputs):
        if array is None:
            tensors.append(None)
            continue
        tensor = torch.from_numpy(np.array(array, dtype=np.float64 if array.dtype.kind == "f" else array.dtype))
        tensors.append(tensor.requires_grad_(index in wrt))
    result = function(*tensors, **attributes)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    total = sum(
        (outputs[index] * torch.from_numpy(cotangent.astype(np.float64))).sum() for index, cotangent in cotangents.items()
    )
    leaves = [tensors[index] for index in wrt]
    if isinstance(total, torch.Tensor) and total.requires_grad:
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    else:
        gradients = (None,) * len(leaves)
    filled = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, gradients, strict=True)]
    return [output.detach().numpy() for output in outputs], [gradient.numpy() for gradient in filled]
