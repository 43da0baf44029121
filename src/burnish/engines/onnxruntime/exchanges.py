"""Exchanges with other workers inside an ONNX Runtime graph: nodes whose kernel calls Python to make the exchange.

The kernel (``native/exchange_operator.h``) passes the number of its node and the operands in ONNX Runtime's memory. ONNX Runtime
runs nodes in any order that their operands allow, perhaps in a different one on each worker, so a token passes from each exchange
to the next. The end of a gradient exchange is placed as late as its readers allow.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from burnish.engines.communicator import Communicator, Pending, SharedBuffer, array_of, buffer_of
from burnish.engines.split_graph import (
    MADE,
    Operands,
    Terms,
    check_exchanges,
    dtype_of,
    flat_operands,
    is_exchange,
    keep_exchange_order,
    parted,
)
from burnish.errors import EngineError
from burnish.graph import BURNISH_DOMAIN, Builder, describe_node, replace_uses
from burnish.graph.uses import read_by
from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.collectives import ALL_REDUCE_FINISH, ALL_REDUCE_START, OWN_GRADIENTS, WORKER_RANK

EXCHANGE = EngineOperator("Exchange", ("x...",), ("y...",))
Result = TypeVar("Result")
FAILED, MADE_IT = 0, 1
"""Return values for the kernel. ctypes returns zero if the function raises."""


class _Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )


@dataclass(eq=False)
class _Exchange:
    """An exchange of an open graph.

    Attributes:
        make: a function from the operands, which are in ONNX Runtime's memory and must not be written, to the results.
        failures: list of the graph's failures, to which an error of this exchange is added.
        allocate: the library's function that returns the memory of a result.
    """

    make: Callable[[Operands], Operands]
    failures: list[BaseException]
    allocate: Any

    def run(self, operands: Any, count: int, context: int) -> None:
        arrays = [_array(each.data, each.sizes[: each.rank], _dtype(each.type)) for each in operands[:count]]
        for place, result in enumerate(self.make(arrays)):
            data = ctypes.c_void_p()
            if self.allocate(context, place, (ctypes.c_int64 * result.ndim)(*result.shape), result.ndim, ctypes.byref(data)):
                raise MemoryError("ONNX Runtime could not allocate memory for what workers exchange")
            np.copyto(_array(data.value, result.shape, result.dtype), result, casting="no")


_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, _Exchange] = weakref.WeakValueDictionary()
"""The exchanges of all open graphs, by number."""


def _make(number: int, operands: Any, count: int, context: int) -> int:
    exchange = _open[number]
    try:
        exchange.run(operands, count, context)
    except BaseException as error:  # also Ctrl-C: no exception may pass through ONNX Runtime
        exchange.failures.append(error)
        return FAILED
    return MADE_IT


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(_Operand), ctypes.c_int64, ctypes.c_void_p)
_make_for_kernels = _FUNCTION(_make)


@functools.cache
def _connected(library: Path) -> Any:
    """Connect a loaded kernel library to this module; return its function that allocates results."""
    functions = ctypes.PyDLL(str(library))
    functions.burnish_set_exchange(_make_for_kernels)
    allocate = functions.burnish_exchange_output
    integer = ctypes.c_int64
    allocate.argtypes = (ctypes.c_void_p, integer, ctypes.POINTER(integer), integer, ctypes.POINTER(ctypes.c_void_p))
    return allocate


@functools.cache
def _dtype(number: int) -> np.dtype:
    return ir.DataType(number).numpy()


def _array(address: int | None, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    count = math.prod(shape)
    if not count or address is None:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class Exchanges:
    """The exchanges of a graph, valid as long as this object exists.

    Args:
        model: a model for several workers, lowered to a target whose collectives are among ``BETWEEN_PARTS``; its exchanges
            become nodes of the library, in place.
        library: path of the kernels.
        communicator: connection to the other workers.
        loaded: names of burnish's own operators that the engine knows in addition to standard ones.

    Raises:
        EngineError: an exchange is in the body of a control flow operator, or is not supported here.
    """

    def __init__(self, model: ir.Model, library: Path, communicator: Communicator, loaded: frozenset[str]):
        self._allocate, self._communicator = _connected(library), communicator
        self._failures: list[BaseException] = []
        self._exchanges: list[_Exchange] = []
        graph = model.graph
        check_exchanges(graph, loaded)
        keep_exchange_order(graph)
        started: dict[ir.Node, _Started] = {}
        token = graph.inputs[
            0
        ]  # any value but a constant, for which ONNX Runtime would make the exchange when it loads the graph
        for node in _in_order(graph):
            if ALL_REDUCE_START.is_of(node):
                started[node] = _Started(Terms.of(node), communicator)
                token = self._replace(node, node.inputs, (), started[node].start, token)
            elif ALL_REDUCE_FINISH.is_of(node):
                own = started[_start_of(node)]
                token = self._replace(node, node.inputs[1:] if own.terms.conditional else (), node.outputs, own.finish, token)
            else:
                token = self._replace(node, node.inputs, node.outputs, self._made(node), token)
        for node in [node for node in graph if is_exchange(node)]:
            if WORKER_RANK.is_of(node):
                rank = Builder(graph, before=node).constant(np.array(communicator.rank, np.int64))
                replace_uses(node.outputs[0], rank.value)
            elif OWN_GRADIENTS.is_of(node):
                self._replace(node, node.inputs, node.outputs, self._made(node), None)
        graph.remove([node for node in graph if is_exchange(node)], safe=True)
        graph.sort()

    def run(self, attempt: Callable[[], Result]) -> Result:
        """Call ``attempt``, which runs the graph once, and return its result.

        Raises:
            BaseException: the error of an exchange, or else that of ``attempt``.
        """
        self._failures.clear()
        try:
            return attempt()
        except Exception:
            if self._failures:
                raise self._failures[0] from None
            raise

    def raised(self, error: BaseException) -> bool:
        """True if an exchange of the last run raised this error."""
        return error in self._failures

    def _made(self, node: ir.Node) -> Callable[[Operands], Operands]:
        make, terms, communicator = MADE[node.op_type], Terms.of(node), self._communicator
        return lambda operands: make(terms, operands, communicator)

    def _replace(
        self,
        node: ir.Node,
        operands: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        make: Callable[[Operands], Operands],
        token: ir.Value | None,
    ) -> ir.Value:
        """Replace an exchange by a node of the library with these operands and outputs; return the next token."""
        assert node.graph is not None
        exchange = _Exchange(make, self._failures, self._allocate)
        number = next(_numbers)
        self._exchanges.append(exchange)
        _open[number] = exchange
        given = [value for value in operands if value is not None]
        is_chained = token is not None
        replacement = ir.Node(
            BURNISH_DOMAIN,
            EXCHANGE.name,
            [*given, token] if is_chained else given,
            [
                ir.AttrInt64("number", number),
                ir.AttrInt64("chained", int(is_chained)),
                *_types_of(node, outputs, is_chained),
            ],
            num_outputs=len(outputs) + is_chained,
        )
        replacement.metadata_props.update(node.metadata_props)
        node.graph.insert_before(node, replacement)
        for value, new in zip(outputs, replacement.outputs, strict=False):
            new.type, new.shape = value.type, value.shape
            name = value.name
            replace_uses(value, new)
            value.name, new.name = None, name
        following = replacement.outputs[-1]
        if is_chained:
            following.name = f"exchange/{number}"
            following.type, following.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([1])
        return following


class _Started:
    """An exchange of gradients that continues during computation, until ``finish``."""

    def __init__(self, terms: Terms, communicator: Communicator):
        self.terms, self._communicator = terms, communicator
        self._shared: SharedBuffer | None = None
        self._own: np.ndarray | None = None
        self._under_way: tuple[np.ndarray, Pending, list[np.ndarray]] | None = None

    def start(self, operands: Operands) -> Operands:
        """Start the exchange, unless the last operand says that this step has none."""
        tensors, has_samples = self.terms.travelling(operands)
        was_broken_off, self._under_way = self._under_way is not None, None
        if self.terms.conditional and not operands[-1]:
            return []
        if self._own is None or was_broken_off:
            self._open(dtype_of(tensors), sum(tensor.size for tensor in tensors))
        assert self._own is not None
        if self._shared is not None:
            self._shared.settle()
        flat = flat_operands(tensors, has_samples, self._own)
        # The operands' memory is reused as soon as they have been read.
        like = [np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape) for tensor in tensors]
        self._under_way = flat, self._begin(flat), like
        return []

    def _open(self, dtype: np.dtype, count: int) -> None:
        """Allocate memory for all steps, because sizes of gradients do not change: shared between workers if possible."""
        if self._own is None:
            of_buffers = buffer_of(self._communicator, np.empty(0, dtype)).dtype
            group, channel = self.terms.group, self.terms.channel
            self._shared = self._communicator.shared_buffer(of_buffers, count, group=group, channel=channel)
        self._own = np.empty(count, dtype) if self._shared is None else array_of(self._shared.tensor)

    def _begin(self, flat: np.ndarray) -> Pending:
        if self._shared is not None:
            return self._shared.all_reduce()
        buffer = buffer_of(self._communicator, flat)
        return self._communicator.all_reduce(buffer, group=self.terms.group, channel=self.terms.channel)

    def finish(self, operands: Operands) -> Operands:
        """Wait for the sums; without an exchange, return the operands."""
        if self._under_way is None:
            return operands
        flat, pending, like = self._under_way
        self._under_way = None
        pending.wait()
        return parted(flat, like)


def _in_order(graph: ir.Graph) -> list[ir.Node]:
    """Return the exchanges of a graph in the order in which all workers make them: that of their numbers.

    The end of an exchange comes right before the first one that needs it, or else last.
    """
    unplaced: list[ir.Node] = []
    ordered: list[ir.Node] = []
    waiting: dict[ir.Value, frozenset[ir.Node]] = {}
    for node in graph:
        needed = frozenset().union(*(waiting.get(value, frozenset()) for value in read_by(node)))
        if ALL_REDUCE_FINISH.is_of(node):
            needed |= {node}
            unplaced.append(node)
        elif is_exchange(node) and not OWN_GRADIENTS.is_of(node) and not WORKER_RANK.is_of(node):
            ordered += [*(finish for finish in unplaced if finish in needed), node]
            unplaced = [finish for finish in unplaced if finish not in needed]
        if needed:
            waiting.update(dict.fromkeys(node.outputs, needed))
    return [*ordered, *unplaced]


def _start_of(finish: ir.Node) -> ir.Node:
    start = None if finish.inputs[0] is None else finish.inputs[0].producer()
    assert start is not None, "an exchange is begun before it is waited for"
    return start


def _types_of(node: ir.Node, outputs: Sequence[ir.Value], is_chained: bool) -> list[ir.Attr]:
    """Return types and shapes of the outputs as attributes; an extent that is only known at run time is -1."""
    types, ranks, extents = [], [], []
    for value in outputs:
        if value.dtype is None or value.shape is None:
            raise EngineError(
                f"{describe_node(node)} gives '{value.name}', of which neither type nor rank are known: train with engine='torch'"
            )
        types.append(int(value.dtype))
        ranks.append(len(value.shape))
        extents += [extent if isinstance(extent, int) else -1 for extent in value.shape.dims]
    if is_chained:
        types, ranks, extents = [*types, int(ir.DataType.INT64)], [*ranks, 1], [*extents, 1]
    # With an extra element, because an attribute cannot be empty.
    return [ir.AttrInt64s("types", types), ir.AttrInt64s("ranks", ranks), ir.AttrInt64s("extents", [*extents, 0])]
