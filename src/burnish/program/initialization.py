"""The initial state of training: the source's weights or new ones, and the results of the init graph."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from burnish.errors import BurnishError, CheckpointError, ConfigurationError
from burnish.graph import describe_node, model_proto, static_shape
from burnish.program.signature import Entry, GraphSignature, Role, Signature
from burnish.program.state import Kind, LazyArrays, Weights, kind_of, shape_fits
from burnish.random import check_seed
from burnish.transfer_progress import Transfer

EMBEDDING_DEVIATION = 0.02
"""Standard deviation of re-initialized embeddings (Devlin et al. 2018, BERT)."""

DRAWN_AT_ONCE = 1 << 20
"""The number of random numbers of an embedding that are in memory at a time."""

SHAPES = frozenset({"Flatten", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"})
"""Operators that give a weight, or its parts, the shape in which it is used."""

Scheme = Callable[[np.random.Generator, tuple[int, ...], int, int], np.ndarray]


def _kaiming_normal(generator: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> np.ndarray:
    return generator.standard_normal(shape, dtype=np.float32) * np.sqrt(2.0 / fan_in)


def _kaiming_uniform(generator: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> np.ndarray:
    return _uniform(generator, shape, np.sqrt(6.0 / fan_in))


def _xavier_normal(generator: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> np.ndarray:
    return generator.standard_normal(shape, dtype=np.float32) * np.sqrt(2.0 / (fan_in + fan_out))


def _xavier_uniform(generator: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int) -> np.ndarray:
    return _uniform(generator, shape, np.sqrt(6.0 / (fan_in + fan_out)))


def _uniform(generator: np.random.Generator, shape: tuple[int, ...], limit: float) -> np.ndarray:
    return (2 * generator.random(shape, dtype=np.float32) - 1) * limit


SCHEMES: dict[str, Scheme] = {
    "kaiming": _kaiming_normal,
    "kaiming_normal": _kaiming_normal,
    "kaiming_uniform": _kaiming_uniform,
    "xavier": _xavier_uniform,
    "xavier_normal": _xavier_normal,
    "xavier_uniform": _xavier_uniform,
}


class InitialState(LazyArrays):
    """The initial state, in the order of the signature; each entry is made when it is read.

    Args:
        entries: state entries.
        weights: arrays by state name.
        computed: results of the init graph.
        redrawn: re-initialized weights.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        weights: Mapping[str, np.ndarray],
        computed: Mapping[str, np.ndarray],
        redrawn: Mapping[str, _Redrawn],
    ):
        self._entries = {entry.name: entry for entry in entries}
        self._weights, self._computed, self._redrawn = weights, computed, redrawn
        owners = Counter(map(id, computed.values()))
        self._own = {
            name for name, array in computed.items() if array.flags.owndata and array.flags.writeable and owners[id(array)] == 1
        }
        self._transfer = Transfer("reading the weights", sum(_size(kind_of(weights, name)) for name in weights))

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array that the caller owns; read each entry only once."""
        dtype = self._entries[name].numpy_dtype
        constant = self.constant(name)
        if constant is not None:
            # The system allocates zeros when they are first written: an engine only reads the optimizer's once.
            shape = self._computed[name].shape
            return np.full(shape, constant) if np.frombuffer(constant.tobytes(), np.uint8).any() else np.zeros(shape, dtype)
        if name in self._computed:
            # A result that only one entry uses is not copied: an optimizer's slots are as large as the model.
            return np.array(self._computed[name], dtype=dtype, copy=None if name in self._own else True)
        if name in self._redrawn:
            return self._redrawn[name].array(self._weights)
        weights = self._weights
        array = weights.take(name) if isinstance(weights, Weights) else np.array(weights[name], dtype=dtype)
        self._transfer.advance(array.nbytes)
        return array

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        if name in self._redrawn:
            self._redrawn[name].write(target, self._weights)
        elif name in self._computed or not isinstance(self._weights, Weights):
            constant = self.constant(name)
            if constant is None:
                super().read_into(name, target, is_zero)
            elif not is_zero or np.frombuffer(constant.tobytes(), np.uint8).any():
                target[...] = constant
        else:
            self._weights.read_into(name, target, is_zero)

    def constant(self, name: str) -> np.ndarray | None:
        array = self._computed.get(name)
        if array is None or not array.size or any(array.strides) or not array.ndim:
            return None
        return array[(0,) * array.ndim].astype(self._entries[name].numpy_dtype).reshape(())

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def kind(self, name: str) -> Kind:
        array = self._computed.get(name)
        shape = kind_of(self._weights, name)[1] if array is None else array.shape
        return self._entries[name].numpy_dtype, shape


def initial_state(
    graphs: Mapping[str, ir.Model],
    signature: Signature,
    weights: Mapping[str, np.ndarray],
    held_rows: Mapping[str, Sequence[int]],
    seed: int,
    reinitialize: str | None,
) -> InitialState:
    """Return the initial state of a program; see ``Program.initial_state``.

    Args:
        graphs: graphs of the program, by name; only the necessary ones are read.
        signature, weights: signature and weights of the program.
        held_rows: initializer -> rows that are not re-initialized.
        seed, reinitialize: as for ``Program.initial_state``.
    """
    check_seed(seed)
    redrawn: dict[str, _Redrawn] = {}
    if reinitialize is not None:
        forward = (graphs["predict"], graphs["evaluate"])
        redrawn = _reinitialized(forward, weights, held_rows, seed, reinitialize)
    started = _WithRedrawn(weights, redrawn)
    computed = run_init(graphs["init"], signature["init"], started, seed)
    return InitialState(signature.state, weights, computed, redrawn)


def _size(kind: Kind) -> int:
    dtype, shape = kind
    return dtype.itemsize * math.prod(shape)


class _WithRedrawn(LazyArrays):
    def __init__(self, weights: Mapping[str, np.ndarray], redrawn: Mapping[str, _Redrawn]):
        self._weights, self._redrawn = weights, redrawn

    def __getitem__(self, name: str) -> np.ndarray:
        return self._redrawn[name].array(self._weights) if name in self._redrawn else self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def kind(self, name: str) -> Kind:
        return kind_of(self._weights, name)


class ConstantOfShape(OpRun):
    """The standard's operator, with a result that takes the memory of one number, whatever its shape.

    An optimizer's slots are as large as the model.
    """

    def _run(self, shape: np.ndarray, value: np.ndarray | None = None) -> tuple[np.ndarray]:
        filling = np.zeros(1, np.float32) if value is None else value
        return (np.broadcast_to(filling.reshape(()), tuple(int(extent) for extent in shape)),)


def run_init(init: ir.Model, signature: GraphSignature, weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Run the init graph on the evaluator of the onnx package: integers and fills, with the same results on every machine.

    Raises:
        CheckpointError: the evaluator cannot run it, or its arrays do not have the shapes of the state. Burnish writes no such
            graph.
    """
    read = {value.name for value in init.graph.inputs if value.uses() or value.is_graph_output()}

    def given(entry: Entry) -> np.ndarray:
        if entry.role is Role.SEED:
            return np.asarray(seed, dtype=entry.numpy_dtype)
        if entry.name in read:
            return weights[entry.name]
        return np.broadcast_to(np.zeros((), entry.numpy_dtype), kind_of(weights, entry.name)[1])

    inputs = {entry.name: given(entry) for entry in signature.inputs}
    names = [entry.name for entry in signature.outputs]
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model_proto(init), new_ops=[ConstantOfShape]).run(names, inputs)
    except (BurnishError, MemoryError):  # a weight is no longer readable, or does not fit into memory
        raise
    except Exception as error:  # the evaluator's errors have no common base class
        raise CheckpointError(
            f"The init graph of the program, which makes the optimizer's first state, cannot be run: {error}. It is damaged, or "
            "another tool wrote it: compile the model again, or use another copy of the saved program"
        ) from error
    # A fill takes no memory until it is written out.
    for entry, result in zip(signature.outputs, results, strict=True):
        if not shape_fits(np.shape(result), entry.extents):
            raise CheckpointError(
                f"The init graph of the program makes '{entry.updates or entry.name}' of shape {list(np.shape(result))}, and the "
                f"state has {list(entry.extents)}. It is damaged, or another tool wrote it: compile the model again, or use "
                "another copy of the saved program"
            )
    return {entry.updates or entry.name: result for entry, result in zip(signature.outputs, results, strict=True)}


@dataclass(frozen=True)
class _Use:
    """An operator that uses a parameter, the operand's position, and its shape there; None if unknown."""

    node: ir.Node
    operand: int
    seen: tuple[int, ...] | None


@dataclass(frozen=True)
class _Redrawn:
    """A weight that is re-initialized, with the same numbers each time.

    Attributes:
        draw: a function from a generator to the array, in consecutive parts along its first axis or as a whole.
        held_rows: rows that keep the values of the source.
    """

    name: str
    kind: Kind
    draw: Callable[[np.random.Generator], Iterator[np.ndarray]]
    seed: tuple[int, int]
    held_rows: Sequence[int] = ()

    def array(self, weights: Mapping[str, np.ndarray]) -> np.ndarray:
        dtype, shape = self.kind
        array = np.empty(shape, dtype)
        self.write(array, weights)
        return array

    def write(self, target: np.ndarray, weights: Mapping[str, np.ndarray]) -> None:
        begin = 0
        for part in self.draw(np.random.default_rng(self.seed)):
            if part.shape == target.shape:
                target[...] = part
            else:
                target[begin : begin + len(part)] = part
                begin += len(part)
        if self.held_rows:
            rows = list(self.held_rows)
            target[rows] = weights[self.name][rows]


def _reinitialized(
    forward: Iterable[ir.Model],
    weights: Mapping[str, np.ndarray],
    held_rows: Mapping[str, Sequence[int]],
    seed: int,
    scheme_name: str,
) -> dict[str, _Redrawn]:
    scheme = SCHEMES.get(scheme_name)
    if scheme is None:
        raise ConfigurationError(f"reinitialize={scheme_name!r} is not a scheme: choose one of {', '.join(SCHEMES)}, or None")
    kinds = {name: kind_of(weights, name) for name in weights}
    uses: dict[str, list[_Use]] = {}
    for model in forward:
        for value in model.graph.inputs:
            name = value.name or ""
            if name in kinds and not uses.get(name):
                uses[name] = _uses(value, kinds[name][1])
    redrawn = {}
    for name, (dtype, shape) in kinds.items():
        floating = dtype.kind == "f" or dtype.isbuiltin != 1
        if not floating or not uses.get(name):
            continue
        digest = hashlib.sha256(name.encode()).digest()
        draw = _drawing(name, shape, uses[name], scheme, scheme_name)
        held = held_rows.get(name.removeprefix("param/"), ()) if name.startswith("param/") else ()
        numbers = (seed & (1 << 64) - 1, int.from_bytes(digest[:8], "little"))
        redrawn[name] = _Redrawn(name, (dtype, shape), draw, numbers, held)
    return redrawn


def _uses(value: ir.Value, seen: tuple[int, ...] | None) -> list[_Use]:
    """Return the operators that compute with a value, looking through those that only pass it on or reshape it."""
    uses = []
    for node, operand in value.uses():
        if node.op_type in ("Identity", "Cast"):
            uses += _uses(node.outputs[0], seen)
        elif node.op_type == "Transpose" and seen is not None:
            given = node.attributes.get("perm")
            order = range(len(seen))[::-1] if given is None else given.as_ints()
            uses += _uses(node.outputs[0], tuple(seen[axis] for axis in order))
        elif operand == 0 and (node.op_type in SHAPES or (node.op_type == "Expand" and _is_vector(seen))):
            for output in node.outputs:
                uses += _uses(output, static_shape(output))
        else:
            uses.append(_Use(node, operand, seen))
    return uses


def _is_vector(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and sum(extent != 1 for extent in shape) <= 1


def _drawing(
    name: str, shape: tuple[int, ...], uses: Sequence[_Use], scheme: Scheme, scheme_name: str
) -> Callable[[np.random.Generator], Iterator[np.ndarray]]:
    for use in uses:
        fans = _fans(use)
        if fans is not None:
            return partial(_in_one, scheme, shape, *fans)
    for use in uses:
        constant = _constant(shape, use)
        if constant is not None:
            return partial(_constant_parts, shape, constant)
    if any(use.node.op_type in ("Gather", "Add") for use in uses):
        return partial(_embedding_parts, shape)
    raise ConfigurationError(
        f"reinitialize={scheme_name!r}: cannot tell how to draw '{name}' of shape {list(shape)} from its use in "
        f"{describe_node(uses[0].node)}. Compile without reinitialize, set this entry in program.initial_state() and give "
        "that to Session(state=...)"
    )


def _in_one(
    scheme: Scheme, shape: tuple[int, ...], fan_in: int, fan_out: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    yield scheme(generator, shape, fan_in, fan_out)


def _constant_parts(shape: tuple[int, ...], constant: float, generator: np.random.Generator) -> Iterator[np.ndarray]:
    yield np.broadcast_to(np.float64(constant), shape)


def _embedding_parts(shape: tuple[int, ...], generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the rows of a table in parts, with the numbers of a single draw."""
    row = math.prod(shape[1:])
    step = max(1, DRAWN_AT_ONCE // max(1, row))
    for begin in range(0, shape[0] if shape else 1, step):
        rows = (min(step, shape[0] - begin), *shape[1:]) if shape else ()
        yield generator.standard_normal(rows, dtype=np.float32) * EMBEDDING_DEVIATION


def _fans(use: _Use) -> tuple[int, int] | None:
    """Return fan in and fan out of a weight; None if it is not a weight."""
    node, operand = use.node, use.operand
    seen = use.seen
    if seen is None or len(seen) < 2:
        return None
    receptive = int(np.prod(seen[2:], dtype=np.int64))
    match node.op_type, operand:
        case "Conv", 1:
            return seen[1] * receptive, seen[0] // _integer(node, "group", 1) * receptive
        case "ConvTranspose", 1:
            return seen[0] // _integer(node, "group", 1) * receptive, seen[1] * receptive
        case "Gemm", 0:
            return (seen[0], seen[1]) if _integer(node, "transA", 0) else (seen[1], seen[0])
        case "Gemm", 1:
            return (seen[1], seen[0]) if _integer(node, "transB", 0) else (seen[0], seen[1])
        case "MatMul", 0:
            return seen[-1], seen[-2]
        case "MatMul", 1:
            return seen[-2], seen[-1]
        case (("LSTM" | "GRU" | "RNN"), (1 | 2)):
            return seen[-1], seen[-2]
    return None


def _constant(shape: tuple[int, ...], use: _Use) -> float | None:
    """Return the initial value of a bias, scale, mean, variance or slope; None for anything else."""
    operator, operand = use.node.op_type, use.operand
    biases = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "LSTM": 3, "GRU": 3, "RNN": 3}
    if biases.get(operator) == operand:
        return 0.0
    if operator.endswith("Normalization"):
        return (1.0, 0.0, 0.0, 1.0)[operand - 1] if 1 <= operand <= 4 else None
    per_channel = math.prod(shape) == max(shape, default=1)
    if operator in ("Add", "Sub") and per_channel:
        return 0.0
    if operator in ("Mul", "Div") and per_channel:
        return 1.0
    if operator == "PRelu" and operand == 1:
        return 0.25
    return None


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()
