"""Constants that only prepare data: a mean image, a deviation for each column, the basis of a spectrum; tables of positions.

They are initializers as weights are, and a gradient reaches them. An input reaches them through arithmetic alone, before the
first layer that has weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, constant_array
from burnish.graph.uses import origin_of
from burnish.importer.export_notes import is_parameter, noted_kinds
from burnish.importer.operands import HELD, OF_MODULE, PREPARES, WEIGHT_OPERANDS

ARITHMETIC = frozenset({"Add", "Div", "Mul", "Sub"})
ARRANGES = frozenset(
    "Cast Concat Expand Flatten Gather Identity Pad Reshape Resize Slice Split Squeeze Transpose Unsqueeze Upsample".split()
)
"""Operators that pass the elements of data on, or interpolate between them."""
AFTER_A_BASIS = frozenset("Abs Clip Log Max Neg Pow ReduceSum ReduceSumSquare Sqrt".split())
"""Operators that make powers and decibels of what a basis gives; before one they may be a layer's."""
OF_RAW_DATA = frozenset("Abs Clip Log Neg Pow Sqrt".split())
"""Operators on each number of data that has met no constant yet but single numbers."""
OF_CONSTANTS = frozenset("Add Clip Max Neg Pow Reciprocal Sqrt".split())
"""Operators that make the constant that data meets of others, such as a deviation of a variance."""
WEIGHTLESS = frozenset(
    "AveragePool Concat DepthToSpace Dropout GlobalAveragePool GlobalMaxPool MaxPool ReduceMax ReduceMean ReduceSum "
    "SpaceToDepth Tile".split()
)
"""Operators without weights after which the first layer may stand; a constant that follows them may be a layer's."""
PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
ACTIVATIONS = frozenset(
    "Celu Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Selu Sigmoid Softmax Softplus Softsign Swish Tanh".split()
)
"""Operators that make a layer of what comes before them."""

LEAST_VECTORS = 8
"""Vectors that a basis has at least; a few filters may look like waves by chance."""
LEAST_WAVE = 32
"""The fewest numbers of a vector that a wave is told by."""
LEAST_POSITIONS, MOST = 4, 2**24
"""Rows of a table of positions, and its numbers: a larger one is not read, as that would take memory."""
OF_ANGLES = 4e-3
"""How far the squares of a sine and a cosine may be from 1 together: in 16 bits."""
WIDTH = 3
"""How many frequencies beside its own a wave in a window has parts of."""


class _Prepared(NamedTuple):
    """What data has become: the input that it was, and what has prepared it.

    Attributes:
        source: the input; of several, the first.
        constants: what has prepared it.
        has_basis: whether a basis is among that.
        is_closed: whether nothing that follows prepares it.
    """

    source: ir.Value
    constants: frozenset[ir.Value]
    has_basis: bool = False
    is_closed: bool = False


def hold_input_constants(model: ir.Model) -> None:
    """Note, in place, which initializers only prepare an input for the first layer that has weights, or tell positions.

    Their ``meta`` says which of these it is (``PREPARES``).

    Those are operands of Add, Sub, Mul and Div, and bases of waves, triangles over frequencies or cosines, in products, that an
    input reaches through nothing else but what moves or resizes it. What PyTorch's exporter noted to be a parameter is none, nor
    is anything of a module, whose parameters are known, or anything of a model without a layer after it.
    """
    graph = model.graph
    if OF_MODULE in graph.meta:
        return
    noted = noted_kinds(graph)
    for value in graph.initializers.values():
        if value.dtype in FLOATING and HELD not in value.meta and not is_parameter(value, noted) and _tells_positions(value):
            value.meta[PREPARES] = "holds sines and cosines of positions"
    prepared = {value: _Prepared(value, frozenset()) for value in graph.inputs}
    made: dict[ir.Value, list[ir.Value]] = {}
    before_layers: set[ir.Value] = set()
    in_layers: set[ir.Value] = set()
    for node in graph:
        found = [prepared[value] for value in node.inputs if value in prepared]
        if not found:
            if (origins := _origins_of_result(node, made)) is not None:
                made |= dict.fromkeys(node.outputs, origins)
            continue
        passed = None if any(each.is_closed for each in found) else _passed(node, prepared, found, noted, made)
        if passed is not None:
            prepared |= dict.fromkeys(node.outputs, passed)
        elif _is_layer(node):
            before_layers |= _all_of(found)
        elif node.op_type in WEIGHTLESS | ARRANGES and node.domain == "":
            prepared |= dict.fromkeys(node.outputs, _Prepared(found[0].source, _all_of(found), is_closed=True))
        elif node.op_type in ACTIVATIONS and node.domain == "":
            in_layers |= _all_of(found)
    if not (held := before_layers - in_layers):
        return
    sources = {value: each.source.name for each in reversed(prepared.values()) for value in each.constants}
    for value in held:
        if all(_is_for_data(reader, prepared) for reader in value.consumers()):
            value.meta[PREPARES] = f"preprocesses '{sources[value]}'"


def _passed(
    node: ir.Node,
    prepared: Mapping[ir.Value, _Prepared],
    found: list[_Prepared],
    noted: Mapping[str, str],
    made: Mapping[ir.Value, list[ir.Value]],
) -> _Prepared | None:
    """What data is after a node that prepares it; None after any other."""
    if node.domain != "" or (len({each.source for each in found}) > 1 and node.op_type != "Concat"):
        return None
    has_basis, before = any(each.has_basis for each in found), _all_of(found)
    others = [value for value in node.inputs if value is not None and value not in prepared]
    origins = [origin for value in others for origin in made.get(value, [value])]
    learned = {value for value in origins if value.is_initializer() and value.dtype in FLOATING}
    is_raw = all((array := constant_array(value)) is not None and array.size == 1 for value in before)
    is_function = (has_basis and node.op_type in AFTER_A_BASIS) or (is_raw and node.op_type in OF_RAW_DATA)
    if node.op_type in ARRANGES or is_function:
        is_moved = node.inputs[0] in prepared and (node.op_type != "Concat" or not learned)
        return _Prepared(found[0].source, before, has_basis) if is_moved else None
    if node.op_type in PRODUCTS:
        if not all(_is_basis(node, value) for value in others):
            return None
        has_basis = True
    elif node.op_type not in ARITHMETIC or any(_multiplies_out(node, value) for value in others):
        return None
    if not all(value.is_initializer() or constant_array(value) is not None for value in origins):
        return None
    if any(is_parameter(value, noted) for value in learned):
        return None
    tensors = {value for value in learned if value.shape is not None and len(value.shape) > 0 and HELD not in value.meta}
    return _Prepared(found[0].source, before | tensors, has_basis)


def _multiplies_out(node: ir.Node, operand: ir.Value) -> bool:
    """Whether data gets a new axis from a constant that has another axis with it, as in a product of matrices written out."""
    shapes = [value.shape.dims for value in (*node.inputs, operand) if value is not None and value.shape is not None]
    if len(shapes) != 3:
        return False
    rank = max(map(len, shapes))
    first, second, own = ((*[1] * (rank - len(each)), *each) for each in shapes)
    data = second if own == first else first
    met = [of_data for of_data, extent in zip(data, own, strict=True) if extent != 1]
    return len(met) > 1 and 1 in met


def _all_of(found: Iterable[_Prepared]) -> frozenset[ir.Value]:
    return frozenset[ir.Value]().union(*(each.constants for each in found))


def _origins_of_result(node: ir.Node, made: Mapping[ir.Value, list[ir.Value]]) -> list[ir.Value] | None:
    """What a node computes a constant of that data may meet; None for any other node."""
    if node.domain != "" or node.op_type not in ARRANGES | OF_CONSTANTS:
        return None
    operands = [value for value in (node.inputs[:1] if node.op_type in ARRANGES else node.inputs) if value is not None]
    origins = [*dict.fromkeys(origin for value in operands for origin in made.get(value, [value]))]
    return origins if all(value.is_initializer() or constant_array(value) is not None for value in origins) else None


def _is_layer(node: ir.Node) -> bool:
    """Whether a node has weights, which are then the first that data meets."""
    indices = range(len(node.inputs)) if node.op_type == "Einsum" else WEIGHT_OPERANDS.get(node.op_type, ())
    operands = (node.inputs[index] for index in indices if index < len(node.inputs))
    return node.domain == "" and any(
        value is not None and (origin := origin_of(value, ARRANGES)).is_initializer() and origin.dtype in FLOATING
        for value in operands
    )


def _is_for_data(reader: ir.Node, prepared: Mapping[ir.Value, _Prepared]) -> bool:
    """Whether a node lets a constant meet data, or puts it into the form in which that meets it."""
    if reader.outputs[0] in prepared:
        return True
    users = list(reader.outputs[0].consumers())
    makes = reader.op_type in ARRANGES | OF_CONSTANTS and reader.domain == ""
    return makes and bool(users) and all(_is_for_data(user, prepared) for user in users)


def _is_basis(node: ir.Node, value: ir.Value) -> bool:
    """Whether an operand of a product holds waves, triangles or cosines, and nothing that was learned."""
    extents = () if value.shape is None else value.shape.dims
    if math.prod(extent for extent in extents if isinstance(extent, int)) > MOST:
        return False
    array = constant_array(value)
    if array is None:
        return False
    if array.ndim < 2:  # the bias of a convolution that is none
        return not array.any()
    vectors = array.reshape(len(array), -1) if node.op_type == "Conv" else array.reshape(-1, array.shape[-1])
    return any(_are_fixed(rows) for rows in ([vectors] if node.op_type == "Conv" else [vectors, vectors.T]))


def _tells_positions(value: ir.Value) -> bool:
    """Whether a table has a row for each position, of sines and cosines of the same angles; rows of zeros stand for none."""
    if value.shape is None or sum(extent != 1 for extent in value.shape.dims) != 2 or math.prod(value.shape.numpy()) > MOST:
        return False
    array = constant_array(value)
    if array is None or not np.isfinite(array := np.squeeze(np.asarray(array, np.float32))).all():
        return False
    rows = array[array.any(axis=1)]
    return len(rows) >= LEAST_POSITIONS and bool((rows != rows[0]).any()) and _are_angles(rows)


def _are_angles(rows: np.ndarray) -> bool:
    """Whether columns are sines and cosines, in turns or one half after the other; or halves are such, as of two coordinates."""
    width = rows.shape[1]
    if width < 4 or width % 2:
        return False
    halves = rows[:, : width // 2], rows[:, width // 2 :]
    pairs = (rows[:, ::2], rows[:, 1::2]), halves
    if any(np.allclose(first**2 + second**2, 1, rtol=0, atol=OF_ANGLES) for first, second in pairs):
        return True
    return all(map(_are_angles, halves))


def _are_fixed(rows: np.ndarray) -> bool:
    rows = np.asarray(rows, np.float64)
    if len(rows) < LEAST_VECTORS or not np.isfinite(rows).all():
        return False
    return _are_triangles(rows) or any(_are_waves(part) for part in _halves(rows))


def _halves(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Waves one after the other, or cosines and then sines of the same frequencies, or a cosine and a sine of each."""
    yield rows
    if len(rows) % 2 == 0 and len(rows) >= 2 * LEAST_VECTORS:
        yield from (rows[: len(rows) // 2], rows[::2]) if _are_waves(rows[len(rows) // 2 :]) or _are_waves(rows[1::2]) else ()


def _are_waves(rows: np.ndarray) -> bool:
    """Whether each row is a wave, in a window or not, of a frequency no lower than that of the row before it."""
    if rows.shape[1] < LEAST_WAVE:
        return False
    power = np.abs(np.fft.rfft(rows, axis=1)) ** 2
    total = power.sum(axis=1)
    sounding = total > 1e-9 * total.max(initial=0.0)  # the sine of frequency 0 is silent
    if sounding.sum() < LEAST_VECTORS:
        return False
    power, total = power[sounding], total[sounding]
    peaks = power.argmax(axis=1)
    within = [each[max(0, peak - WIDTH) : peak + WIDTH + 1].sum() for each, peak in zip(power, peaks, strict=True)]
    steps = np.diff(peaks)
    return bool((np.array(within) > 0.9 * total).all() and (steps >= 0).all() and steps.any())


def _are_triangles(rows: np.ndarray) -> bool:
    """Whether each row rises to one peak and falls again, is zero elsewhere, and peaks no lower than the row before it."""
    if (rows < 0).any() or (rows == 0).mean() < 0.5 or not rows.any():
        return False
    peaks = []
    if (rows != 0).sum() < 2 * len(rows):  # of one number each: these pick elements out
        return False
    for row in rows[rows.any(axis=1)]:
        (places,) = row.nonzero()
        peak = int(row.argmax())
        rises, falls = np.diff(row[places[0] : peak + 1]), np.diff(row[peak : places[-1] + 1])
        if (rises < 0).any() or (falls > 0).any():
            return False
        peaks.append(peak)
    return len(peaks) >= LEAST_VECTORS and bool((np.diff(peaks) >= 0).all()) and peaks[-1] > peaks[0]
