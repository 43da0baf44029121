"""Constants that look like weights but must not be trained.

Before opset 23, PyTorch's exporter writes the root of the scale of ``scaled_dot_product_attention`` as a one-element tensor times
queries and keys, and a causal mask of fixed shape as a matrix, like torchvision's Swin its window masks. Exporters and
simplifiers also store other constants as initializers with generated names.

Others preprocess data: a mean image, a deviation per column, the basis of a spectrum, tables of positions. They have a gradient,
like weights, but only arithmetic connects them to the input, before the first layer with weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, constant_array
from burnish.graph.annotations import HELD, OF_MODULE, PREPARES
from burnish.graph.uses import origin_of, producer_of
from burnish.importer.export_notes import is_parameter, noted_kinds
from burnish.importer.operands import ARRANGES, WEIGHT_OPERANDS, weight_operands

LARGEST_EXCLUDING = -100.0
"""Largest number with which a mask excludes a position: exp(-100) vanishes next to 1 in float32."""

_ARRANGES = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_ARITHMETIC = frozenset({"Cast", "Gather", "Mul", "Slice", "Sub", "Unsqueeze"})
_MASKED = {"Attention": 3, "Softmax": 0}
"""Operator -> operand that is a mask or that a mask was added to."""
_ADDED = {"Add": (0, 1), "Where": (1, 2)}
"""Operands that a masked score is made of."""


def hold_attention_constants(model: ir.Model) -> None:
    """Mark, in place, scales and masks of attention as no weights.

    A scale has one element and multiplies both operands of a matrix product. A mask is added to the operand of a softmax, or
    selected by Where, and consists of zeros and numbers of at most -100. A lower triangle of ones that arithmetic reads, as in
    early GPT-2, is a mask too.
    """
    for value in model.graph.initializers.values():
        if _is_triangle(value):
            HELD.set(value, True)
    for graph in model.graphs():
        for node in graph:
            if node.op_type == "MatMul" and node.domain == "" and len(node.inputs) == 2:
                left, right = (_factors(operand) for operand in node.inputs)
                for scale in left & right:
                    HELD.set(scale, True)
            elif node.op_type in _MASKED and node.domain == "":
                for value in _summands(*node.inputs[_MASKED[node.op_type] :][:1]):
                    if _excludes(value):
                        HELD.set(value, True)


def _factors(value: ir.Value | None) -> set[ir.Value]:
    product = None if value is None else producer_of(origin_of(value, _ARRANGES), "Mul")
    operands = () if product is None else product.inputs
    return {operand for operand in operands if operand is not None and operand.is_initializer() and _is_one_element(operand)}


def _is_one_element(value: ir.Value) -> bool:
    return value.shape is not None and all(extent == 1 for extent in value.shape)


def _is_triangle(value: ir.Value) -> bool:
    dims = () if value.shape is None else value.shape.dims
    is_square = len(dims) > 1 and dims[-1] == dims[-2] != 1 and all(extent == 1 for extent in dims[:-2])
    if not is_square or value.dtype not in FLOATING or not {node.op_type for node, _ in value.uses()} <= _ARITHMETIC:
        return False
    array = constant_array(value)
    return array is not None and bool((array == np.tril(np.ones(array.shape[-2:]))).all())


def _summands(value: ir.Value | None = None) -> Iterator[ir.Value]:
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        origin = None if current is None else origin_of(current, _ARRANGES)
        if origin is not None and origin.is_initializer():
            yield origin
        node = producer_of(origin, *_ADDED)
        if node is not None:
            operands = [node.inputs[index] for index in _ADDED[node.op_type]]
            pending += [operand for operand in operands if operand not in seen]
            seen.update(operands)


def _excludes(value: ir.Value) -> bool:
    array = constant_array(value)
    if array is None or array.size == 0 or not (array <= LARGEST_EXCLUDING).any():
        return False
    return bool(((array == 0) | (array <= LARGEST_EXCLUDING)).all())


NAME = re.compile(r"(.*/)?Constant(_\d+)?_output_\d+")
IN_TENSORFLOW = re.compile(r".*/(Const(_\d+)?|[xy])(:0)?")


def hold_simplified_constants(model: ir.Model) -> None:
    """Mark, in place, initializers with generated constant names as no weights, unless a layer uses them as weights."""
    patterns = (NAME, IN_TENSORFLOW) if model.producer_name == "tf2onnx" else (NAME,)
    initializers = model.graph.initializers
    named = {value for name, value in initializers.items() if any(pattern.fullmatch(name) for pattern in patterns)}
    if not named:
        return
    layers = {
        origin_of(operand, ARRANGES) for graph in model.graphs() for node in graph for operand in weight_operands(node, False)
    }
    for value in named - layers:
        HELD.set(value, True)


ARITHMETIC = frozenset({"Add", "Div", "Mul", "Sub"})
MOVES_DATA = frozenset(
    "Cast Concat Expand Flatten Gather Identity Pad Reshape Resize Slice Split Squeeze Transpose Unsqueeze Upsample".split()
)
"""Operators that move or interpolate data."""
AFTER_A_BASIS = frozenset("Abs Clip Log Max Neg Pow ReduceSum ReduceSumSquare Sqrt".split())
"""Operators that compute powers and decibels after a basis; before one they may belong to a layer."""
OF_RAW_DATA = frozenset("Abs Clip Log Neg Pow Sqrt".split())
"""Operators on data that has only met single numbers so far."""
OF_CONSTANTS = frozenset("Add Clip Max Neg Pow Reciprocal Sqrt".split())
"""Operators that compute a constant from others, such as a deviation from a variance."""
WEIGHTLESS = frozenset(
    "AveragePool Concat DepthToSpace Dropout GlobalAveragePool GlobalMaxPool MaxPool ReduceMax ReduceMean ReduceSum "
    "SpaceToDepth Tile".split()
)
"""Operators without weights that may be before the first layer; a constant after them may belong to a layer."""
PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
ACTIVATIONS = frozenset(
    "Celu Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Selu Sigmoid Softmax Softplus Softsign Swish Tanh".split()
)
"""Operators that mark the preceding operators as a layer."""

LEAST_VECTORS = 8
"""Least number of vectors in a basis; fewer filters may look like waves by chance."""
LEAST_WAVE = 32
"""Shortest vector in which a wave is recognized."""
LEAST_POSITIONS, MOST = 4, 2**24
"""Least rows of a position table, and most elements of one: a larger one is not read, to save memory."""
OF_ANGLES = 4e-3
"""Tolerance of sine² + cosine² = 1, for 16 bits."""
WIDTH = 3
"""Number of neighbouring frequencies over which a windowed wave spreads."""


class _Prepared(NamedTuple):
    """State of preprocessed data.

    Attributes:
        source: the input; the first of several.
        constants: the constants used so far.
        has_basis: True if they include a basis.
        is_closed: True if the following operators are no preprocessing.
    """

    source: ir.Value
    constants: frozenset[ir.Value]
    has_basis: bool = False
    is_closed: bool = False


def hold_input_constants(model: ir.Model) -> None:
    """Mark, in place, initializers that only preprocess an input or encode positions, with their purpose (``PREPARES``).

    These are operands of Add, Sub, Mul and Div, and bases of waves, triangles over frequencies or cosines in products, that an
    input reaches only through moving or resizing. Excluded are parameters recorded by PyTorch's exporter, models from PyTorch
    modules, whose parameters are known, and models without a following layer.
    """
    graph = model.graph
    if OF_MODULE.is_on(graph):
        return
    noted = noted_kinds(graph)
    for value in graph.initializers.values():
        if value.dtype in FLOATING and not HELD.is_on(value) and not is_parameter(value, noted) and _tells_positions(value):
            PREPARES.set(value, "holds sines and cosines of positions")
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
        elif node.op_type in WEIGHTLESS | MOVES_DATA and node.domain == "":
            prepared |= dict.fromkeys(node.outputs, _Prepared(found[0].source, _all_of(found), is_closed=True))
        elif node.op_type in ACTIVATIONS and node.domain == "":
            in_layers |= _all_of(found)
    if not (held := before_layers - in_layers):
        return
    sources = {value: each.source.name for each in reversed(prepared.values()) for value in each.constants}
    for value in held:
        if all(_is_for_data(reader, prepared) for reader in value.consumers()):
            PREPARES.set(value, f"preprocesses '{sources[value]}'")


def _passed(
    node: ir.Node,
    prepared: Mapping[ir.Value, _Prepared],
    found: list[_Prepared],
    noted: Mapping[str, str],
    made: Mapping[ir.Value, list[ir.Value]],
) -> _Prepared | None:
    if node.domain != "" or (len({each.source for each in found}) > 1 and node.op_type != "Concat"):
        return None
    has_basis, before = any(each.has_basis for each in found), _all_of(found)
    others = [value for value in node.inputs if value is not None and value not in prepared]
    origins = [origin for value in others for origin in made.get(value, [value])]
    learned = {value for value in origins if value.is_initializer() and value.dtype in FLOATING}
    is_raw = all((array := constant_array(value)) is not None and array.size == 1 for value in before)
    is_function = (has_basis and node.op_type in AFTER_A_BASIS) or (is_raw and node.op_type in OF_RAW_DATA)
    if node.op_type in MOVES_DATA or is_function:
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
    tensors = {value for value in learned if value.shape is not None and len(value.shape) > 0 and not HELD.is_on(value)}
    return _Prepared(found[0].source, before | tensors, has_basis)


def _multiplies_out(node: ir.Node, operand: ir.Value) -> bool:
    """True if a constant adds an axis to data and shares another axis with it, as in a written-out matrix product."""
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
    if node.domain != "" or node.op_type not in MOVES_DATA | OF_CONSTANTS:
        return None
    operands = [value for value in (node.inputs[:1] if node.op_type in MOVES_DATA else node.inputs) if value is not None]
    origins = [*dict.fromkeys(origin for value in operands for origin in made.get(value, [value]))]
    return origins if all(value.is_initializer() or constant_array(value) is not None for value in origins) else None


def _is_layer(node: ir.Node) -> bool:
    indices = range(len(node.inputs)) if node.op_type == "Einsum" else WEIGHT_OPERANDS.get(node.op_type, ())
    operands = (node.inputs[index] for index in indices if index < len(node.inputs))
    return node.domain == "" and any(
        value is not None and (origin := origin_of(value, MOVES_DATA)).is_initializer() and origin.dtype in FLOATING
        for value in operands
    )


def _is_for_data(reader: ir.Node, prepared: Mapping[ir.Value, _Prepared]) -> bool:
    """True if a node combines a constant with data, or only prepares it for that."""
    if reader.outputs[0] in prepared:
        return True
    users = list(reader.outputs[0].consumers())
    makes = reader.op_type in MOVES_DATA | OF_CONSTANTS and reader.domain == ""
    return makes and bool(users) and all(_is_for_data(user, prepared) for user in users)


def _is_basis(node: ir.Node, value: ir.Value) -> bool:
    """True if an operand of a product holds waves, triangles or cosines, which are not learned."""
    extents = () if value.shape is None else value.shape.dims
    if math.prod(extent for extent in extents if isinstance(extent, int)) > MOST:
        return False
    array = constant_array(value)
    if array is None:
        return False
    if array.ndim < 2:  # a zero bias of a convolution
        return not array.any()
    vectors = array.reshape(len(array), -1) if node.op_type == "Conv" else array.reshape(-1, array.shape[-1])
    return any(_are_fixed(rows) for rows in ([vectors] if node.op_type == "Conv" else [vectors, vectors.T]))


def _tells_positions(value: ir.Value) -> bool:
    """True if a table's rows, one per position, are sines and cosines of the same angles; zero rows are ignored."""
    if value.shape is None or sum(extent != 1 for extent in value.shape.dims) != 2 or math.prod(value.shape.numpy()) > MOST:
        return False
    array = constant_array(value)
    if array is None or not np.isfinite(array := np.squeeze(np.asarray(array, np.float32))).all():
        return False
    rows = array[array.any(axis=1)]
    return len(rows) >= LEAST_POSITIONS and bool((rows != rows[0]).any()) and _are_angles(rows)


def _are_angles(rows: np.ndarray) -> bool:
    """True if columns are sines and cosines, alternating or in halves, or each half is such a table, as for two coordinates."""
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
    """Yield possible waves: all rows, or the cosines if sines of the same frequencies follow or alternate with them."""
    yield rows
    if len(rows) % 2 == 0 and len(rows) >= 2 * LEAST_VECTORS:
        yield from (rows[: len(rows) // 2], rows[::2]) if _are_waves(rows[len(rows) // 2 :]) or _are_waves(rows[1::2]) else ()


def _are_waves(rows: np.ndarray) -> bool:
    """True if each row is a wave, possibly windowed, with frequencies in ascending order."""
    if rows.shape[1] < LEAST_WAVE:
        return False
    power = np.abs(np.fft.rfft(rows, axis=1)) ** 2
    total = power.sum(axis=1)
    sounding = total > 1e-9 * total.max(initial=0.0)  # the sine of frequency 0 is zero
    if sounding.sum() < LEAST_VECTORS:
        return False
    power, total = power[sounding], total[sounding]
    peaks = power.argmax(axis=1)
    within = [each[max(0, peak - WIDTH) : peak + WIDTH + 1].sum() for each, peak in zip(power, peaks, strict=True)]
    steps = np.diff(peaks)
    return bool((np.array(within) > 0.9 * total).all() and (steps >= 0).all() and steps.any())


def _are_triangles(rows: np.ndarray) -> bool:
    """True if each row rises to one peak, falls, and is zero elsewhere, with peaks in ascending order."""
    if (rows < 0).any() or (rows == 0).mean() < 0.5 or not rows.any():
        return False
    peaks = []
    if (rows != 0).sum() < 2 * len(rows):  # rows with one number each only select elements
        return False
    for row in rows[rows.any(axis=1)]:
        (places,) = row.nonzero()
        peak = int(row.argmax())
        rises, falls = np.diff(row[places[0] : peak + 1]), np.diff(row[peak : places[-1] + 1])
        if (rises < 0).any() or (falls > 0).any():
            return False
        peaks.append(peak)
    return len(peaks) >= LEAST_VECTORS and bool((np.diff(peaks) >= 0).all()) and peaks[-1] > peaks[0]
