"""Resize and its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish.engines.torch.native import Use, declare_kernel
from burnish.engines.torch.translate.rules import Call, NotKnownYet, translates
from burnish.graph import attribute_value
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.replacements import replaces
from burnish.operators.resize import RESIZE_GRAD

declare_kernel(
    "interpolate",
    "interpolate(Tensor x, Tensor row_starts, Tensor row_places, Tensor row_weights, Tensor column_starts,"
    " Tensor column_places, Tensor column_weights) -> Tensor",
    use=Use.SOME,
)


FUSED_RESIZE = EngineOperator("FusedResize", ("x", "roi", "scales", "sizes"), ("y",))
FUSED_RESIZE_GRAD = EngineOperator("FusedResizeGrad", ("dy", "x", "scales", "sizes", "roi"), ("dx",))


@dataclass(frozen=True)
class Interpolation:
    """The attributes of a Resize that determine its interpolation."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool
    outside: float

    @property
    def precision(self) -> type[np.floating]:
        """The precision of positions: runtimes compute the nearest element in float32, and it must match."""
        return np.float32 if self.mode == "nearest" else np.float64

    @staticmethod
    def of(op: Call) -> Interpolation:
        return Interpolation(
            op.attribute("mode", "nearest"),
            op.attribute("coordinate_transformation_mode", "half_pixel"),
            op.attribute("nearest_mode", "round_prefer_floor"),
            op.attribute("cubic_coeff_a", -0.75),
            bool(op.attribute("exclude_outside", 0)),
            bool(op.attribute("antialias", 0)),
            op.attribute("extrapolation_value", 0.0),
        )


@translates("Resize", since=11)
def resize(op: Call) -> Any:
    x, rank = op.tensor(0), op.rank()
    extents = op.extents()
    axes = [axis % rank for axis in op.attribute("axes", range(rank))]
    interpolation = Interpolation.of(op)
    roi = op.known_array(1).reshape(-1) if op.has(1) and interpolation.coordinates == "tf_crop_and_resize" else None
    targets = _targets(op, axes, extents)
    outside: Any = None
    for place, axis in enumerate(axes):
        scale, target = targets[place]
        crops = roi is not None and (float(roi[place]), float(roi[place + len(axes)])) != (0.0, 1.0)
        if not crops and (scale == 1.0 or target is extents[axis]):
            continue
        extent = extents[axis]
        if not (isinstance(extent, int) and isinstance(target, int)):
            raise NotKnownYet
        bounds = (0.0, 1.0) if roi is None else (float(roi[place]), float(roi[place + len(axes)]))
        positions = source_positions(extent, target, scale, interpolation.coordinates, bounds, interpolation.precision)
        x = _along(op, x, axis, positions, extent, scale, interpolation)
        if roi is not None:
            beyond = torch.from_numpy((positions < 0) | (positions > extent - 1)).to(op.device)
            beyond = torch.reshape(beyond, [-1, *[1] * (rank - 1 - axis)])
            outside = beyond if outside is None else torch.logical_or(outside, beyond)
    return x if outside is None else torch.where(outside, interpolation.outside, x)


@translates(FUSED_RESIZE)
def resize_by_kernel(op: Call) -> Any:
    """Translate Resize without a region of interest."""
    axes, changes = _changes(op, op.extents())
    return _interpolated(op.tensor(0), op.extents(), axes, [(target, taken.table()) for target, taken in changes])


@translates(FUSED_RESIZE_GRAD)
def resize_gradient_by_kernel(op: Call) -> Any:
    """Translate (dy, x, scales, sizes) -> dx; only the shape of x is read."""
    extents = op.extents(1)
    axes, changes = _changes(op, extents)
    resized = list(extents)
    for axis, (target, _) in zip(axes, changes, strict=True):
        resized[axis] = target
    backwards = [(extents[axis], taken.turned(extents[axis])) for axis, (_, taken) in zip(axes, changes, strict=True)]
    return _interpolated(op.tensor(0), resized, axes, backwards)


@dataclass(frozen=True)
class Taken:
    """The terms of results along an axis: places and weights, ``[terms, results]`` each."""

    places: np.ndarray
    weights: np.ndarray

    def table(self) -> Table:
        """Return the table for the kernel, with the terms of a result side by side."""
        terms, results = self.places.shape
        return _table(np.arange(results + 1) * terms, self.places.T.reshape(-1), self.weights.T.reshape(-1))

    def turned(self, extent: int) -> Table:
        """Return the table of the adjoint: for each element of an axis of ``extent``, the results that contain it."""
        places = self.places.reshape(-1)
        order = np.argsort(places, kind="stable")
        starts = np.searchsorted(places[order], np.arange(extent + 1))
        results = np.broadcast_to(np.arange(self.places.shape[1]), self.places.shape).reshape(-1)
        return _table(starts, results[order], self.weights.reshape(-1)[order])


Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _table(starts: np.ndarray, places: np.ndarray, weights: np.ndarray) -> Table:
    used = weights != 0
    kept = np.concatenate([[0], np.cumsum(used)])[starts]
    return (
        torch.from_numpy(kept.astype(np.int64)),
        torch.from_numpy(places[used].astype(np.int64)),
        torch.from_numpy(weights[used].astype(np.float32)),
    )


UNCHANGED = _table(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
"""An axis that does not change."""


def _changes(op: Call, extents: list[Any]) -> tuple[list[int], list[tuple[int, Taken]]]:
    """Return the axes that change, with the new extent and terms of each.

    Raises:
        NotKnownYet: an extent or a scale is only known at run time.
    """
    rank, interpolation = len(extents), Interpolation.of(op)
    axes = [axis % rank for axis in op.attribute("axes", range(rank))]
    changed, changes = [], []
    for axis, (scale, target) in zip(axes, _targets(op, axes, extents), strict=True):
        extent = extents[axis]
        if scale == 1.0 or target is extent:
            continue
        if not (isinstance(extent, int) and isinstance(target, int)):
            raise NotKnownYet
        positions = source_positions(extent, target, scale, interpolation.coordinates, (0.0, 1.0), interpolation.precision)
        if interpolation.mode == "nearest":
            places = np.clip(_nearest(positions, interpolation.nearest), 0, extent - 1).astype(np.int64)[None]
            taken = Taken(places, np.ones(places.shape))
        else:
            taken = Taken(*taps(positions, extent, scale, interpolation))
        changed.append(axis)
        changes.append((target, taken))
    return changed, changes


def _interpolated(x: Any, extents: list[Any], axes: list[int], changes: list[tuple[int, Table]]) -> Any:
    """Return sums along axes of a tensor: in one pass along the last two of images, else along one axis at a time."""
    tables = dict(zip(axes, changes, strict=True))
    if not tables:
        return x
    kernel = torch.ops.burnish.interpolate.default
    if len(extents) == 4 and min(axes) >= 2:
        (_, rows), (_, columns) = (tables.get(axis, (0, UNCHANGED)) for axis in (2, 3))
        return kernel(x, *rows, *columns)
    extents = list(extents)
    for axis, (target, table) in tables.items():
        behind = extents[axis + 1 :]
        if not all(isinstance(extent, int) for extent in behind):
            raise NotKnownYet
        lines = torch.reshape(x, [-1, 1, extents[axis], math.prod(behind)])
        extents[axis] = target
        x = torch.reshape(kernel(lines, *table, *UNCHANGED), extents)
    return x


def _targets(op: Call, axes: list[int], extents: list[Any]) -> list[tuple[float, Any]]:
    """Return the scale and the new extent of each axis, from the operand with all scales or all sizes."""
    if not (op.has(3) and op.extents(3) != [0]):
        scales = op.known_array(2).reshape(-1)
        return [
            (float(scale), extents[axis] if scale == 1.0 else _scaled(extents[axis], scale))
            for axis, scale in zip(axes, scales, strict=True)
        ]
    sizes = op.integers(3)
    policy = op.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return [_stretched(size, extents[axis]) for size, axis in zip(sizes, axes, strict=True)]
    known = [extents[axis] for axis in axes]
    if not all(isinstance(extent, int) for extent in (*known, *sizes)):
        raise NotKnownYet
    ratios = [size / extent for size, extent in zip(sizes, known, strict=True)]
    common = min(ratios) if policy == "not_larger" else max(ratios)
    return [(common, int(np.floor(common * extent + 0.5))) for extent in known]


def _scaled(extent: Any, scale: np.floating) -> int:
    if not isinstance(extent, int):
        raise NotKnownYet
    return int(np.floor(np.float32(extent) * scale))


def _stretched(size: Any, extent: Any) -> tuple[float, Any]:
    if size is extent:
        return 1.0, extent
    if not (isinstance(size, int) and isinstance(extent, int)):
        raise NotKnownYet
    return size / extent, size


def source_positions(
    extent: int, target: int, scale: float, mode: str, roi: tuple[float, float], precision: type[np.floating]
) -> np.ndarray:
    """Return the position in the input of each output element, by the standard's formulas, in the given precision."""
    place, one, half = np.arange(target, dtype=precision), precision(1), precision(0.5)
    factor, last = precision(scale), precision(extent - 1)
    if mode == "asymmetric":
        return place / factor
    if mode == "align_corners":
        return place * last / precision(target - 1) if target > 1 else np.zeros(1, precision)
    if mode == "tf_crop_and_resize":
        start, end = precision(roi[0]), precision(roi[1])
        if target == 1:
            return np.full(1, half * (start + end) * last, precision)
        return start * last + place * (end - start) * last / precision(target - 1)
    if mode == "pytorch_half_pixel" and target == 1:
        return np.zeros(1, precision)
    if mode == "half_pixel_symmetric":
        adjustment = precision(target) / (factor * precision(extent))
        return precision(extent) / precision(2) * (one - adjustment) + (place + half) / factor - half
    return (place + half) / factor - half


def _along(op: Call, x: Any, axis: int, positions: np.ndarray, extent: int, scale: float, interpolation: Interpolation) -> Any:
    if interpolation.mode == "nearest":
        index = np.clip(_nearest(positions, interpolation.nearest), 0, extent - 1).astype(np.int64)
        return torch.index_select(x, axis, torch.from_numpy(index).to(op.device))
    places, weights = taps(positions, extent, scale, interpolation)
    shape = [-1, *[1] * (op.rank() - 1 - axis)]
    total: Any = None
    for place, weight in zip(places, weights, strict=True):
        read = torch.index_select(x, axis, torch.from_numpy(place).to(op.device))
        term = read * torch.reshape(torch.from_numpy(weight).to(device=op.device, dtype=op.torch_dtype(0)), shape)
        total = term if total is None else total + term
    return total


def _nearest(positions: np.ndarray, mode: str) -> np.ndarray:
    if mode == "floor":
        return np.floor(positions)
    if mode == "ceil":
        return np.ceil(positions)
    return np.ceil(positions - 0.5) if mode == "round_prefer_floor" else np.floor(positions + 0.5)


def taps(positions: np.ndarray, extent: int, scale: float, interpolation: Interpolation) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements that each output reads and their weights: ``[taps, outputs]`` each.

    With ``antialias`` and a scale below one, the filter is stretched by 1 / scale.
    """
    stretch = 1.0 / scale if interpolation.antialias and scale < 1 else 1.0
    support = (2.0 if interpolation.mode == "cubic" else 1.0) * stretch
    first = np.floor(positions - support).astype(np.int64) + 1
    count = int(np.floor(2 * support)) + (1 if stretch != 1.0 else 0)
    places = first + np.arange(count)[:, None]
    distances = np.abs(places - positions) / stretch
    weights = _cubic(distances, interpolation.cubic_a) if interpolation.mode == "cubic" else np.maximum(1 - distances, 0)
    if interpolation.exclude_outside:
        weights = np.where((places >= 0) & (places < extent), weights, 0)
    if interpolation.exclude_outside or stretch != 1.0:
        weights = weights / weights.sum(axis=0)
    return np.clip(places, 0, extent - 1), weights


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Return the cubic convolution kernel (Keys, 1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


@replaces("Resize", by=FUSED_RESIZE)
@replaces(RESIZE_GRAD, by=FUSED_RESIZE_GRAD)
def has_kernel(node: ir.Node) -> bool:
    """True if a node of float32 has no region of interest."""
    return bool(attribute_value(node, "coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize")
