"""Calls of kernels according to their schemas, with signals and volumes as images.

A signal [N, C, L] is an image with one row; a volume [N, C, D, H, W] is one with all of its rows. Both are views if the channels
are last in memory, and so are the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.engine_operator import EngineOperator

SIGNAL, VOLUME = 3, 5
"""Ranks of these tensors."""


def as_image(tensor: Any, rank: int) -> Any:
    """Return [N, C, L] as [N, C, 1, L], [N, C, D, H, W] as [N, C, D * H, W]; other ranks unchanged."""
    if rank == SIGNAL:
        return torch.unsqueeze(tensor, 2)
    return torch.flatten(tensor, 2, 3) if rank == VOLUME else tensor


def from_image(image: Any, extents: Sequence[Any]) -> Any:
    """Return the tensor of these extents that ``as_image`` converted."""
    if len(extents) == SIGNAL:
        return torch.squeeze(image, 2)
    return torch.unflatten(image, 2, list(extents[2:4])) if len(extents) == VOLUME else image


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    """Return images [N, C, H, W] as a matrix [N * H * W, C]."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


SETTINGS: dict[str, Callable[[Any], Any]] = {"bool": bool, "List[int]": list}
"""Conversions of attributes, by their type in a schema."""


def calls_kernel(
    operator: EngineOperator, name: str, images: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """Translate a node into one call of a kernel, whose schema has the node's operands in order, followed by its attributes.

    Args:
        operator: operator of the node; its outputs are the kernel's results.
        name: name of the kernel's operator, for float32.
        images: names, in the schema, of operands and outputs that the kernel handles as images.
        defaults: values of absent attributes.
    """

    left_out = defaults or {}

    @translates(operator)
    def call(op: Call) -> Any:
        function = kernels.for_elements(name, op.dtype(0))
        operands: list[Any] = []
        settings = []
        for argument in function._schema.arguments:
            kind = str(argument.type)
            if "Tensor" in kind:
                operand = op.optional(len(operands))
                is_image = operand is not None and argument.name in images
                operands.append(as_image(operand, op.rank(0)) if is_image else operand)
            else:
                setting = op.attribute(argument.name, left_out.get(argument.name))
                settings.append(SETTINGS[kind](setting) if kind in SETTINGS else setting)
        returned = function(*operands, *settings)
        results = (returned,) if len(operator.outputs) == 1 else tuple(returned[place] for place in range(len(operator.outputs)))
        return tuple(
            from_image(result, op.extents(0)) if output in images and op.is_read(place) else result
            for place, (output, result) in enumerate(zip(operator.outputs, results, strict=True))
        )
