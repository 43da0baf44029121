"""The state that training starts from: the source's weights or fresh ones, and what the init graph computes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from burnish.errors import BurnishError, CheckpointError, ConfigurationError
from burnish.graph import describe_node, model_proto, static_shape
from burnish.program.signature import Entry, GraphSignature, Role, Signature
from burnish.program.state import Kind, kind_of
from burnish.program.weights import Weights
from burnish.random import check_seed
from burnish.transfers import Transfer

EMBEDDING_DEVIATION = 0.02
"""Standard deviation of redrawn embeddings (Devlin et al. 2018, BERT)."""

SHAPES = frozenset({"Flatten", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"})
"""What gives a weight, or each part of it, the shape that it is applied in."""

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


def initial_state(
    graphs: Mapping[str, ir.Model],
    signature: Signature,
    weights: Mapping[str, np.ndarray],
    held_rows: Mapping[str, Sequence[int]],
    seed: int,
    reinitialize: str | None,
) -> dict[str, np.ndarray]:
    """Return the initial state of a program in the order of the signature; see ``Program.initial_state``.

    Args:
        graphs: of the program, by name; only those that are needed are read.
        signature, weights: of the program.
        held_rows: initializer -> rows that are not drawn anew.
        seed, reinitialize: as ``Program.initial_state`` takes them.
    """
    check_seed(seed)
    if reinitialize is not None:
        forward = (graphs["predict"], graphs["evaluate"])
        weights = _reinitialized(forward, dict(weights), held_rows, seed, reinitialize)
    computed = run_init(graphs["init"], signature["init"], weights, seed)
    owners = Counter(map(id, computed.values()))
    own = {name for name, array in computed.items() if array.flags.owndata and array.flags.writeable and owners[id(array)] == 1}
    transfer = Transfer("reading the weights", sum(_size(kind_of(weights, name)) for name in weights))

    def taken(entry: Entry) -> np.ndarray:
        name = entry.name
        if name in computed:
            # What the graph has made for one entry alone is not copied: an optimizer's slots are as large as the model.
            return np.array(computed[name], dtype=entry.numpy_dtype, copy=None if name in own else True)
        array = weights.take(name) if isinstance(weights, Weights) else np.array(weights[name], dtype=entry.numpy_dtype)
        transfer.advance(array.nbytes)
        return array

    return {entry.name: taken(entry) for entry in signature.state}


def _size(kind: Kind) -> int:
    dtype, shape = kind
    return dtype.itemsize * math.prod(shape)


class ConstantOfShape(OpRun):
    """The standard's operator, whose zeros are memory that the system gives when it is written to, if ever.

    An optimizer's slots of zeros are as large as the model, and an engine only reads them once.
    """

    def _run(self, shape: np.ndarray, value: np.ndarray | None = None) -> tuple[np.ndarray]:
        filling = np.zeros(1, np.float32) if value is None else value
        extents = tuple(int(extent) for extent in shape)
        is_zero = filling.tobytes() == bytes(filling.nbytes)  # by its bits: -0.0 is another number
        return (np.zeros(extents, filling.dtype) if is_zero else np.full(extents, filling.reshape(())),)


def run_init(init: ir.Model, signature: GraphSignature, weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Run the init graph on the standard's own evaluator: integers and fills, the same on every machine.

    Raises:
        CheckpointError: the evaluator cannot run it, as none that burnish writes.
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
    except (BurnishError, MemoryError):  # a weight that cannot be read any more, or has no room
        raise
    except Exception as error:  # the evaluator's errors share no base class of their own
        raise CheckpointError(
            f"The init graph of the program, which makes the optimizer's first state, cannot be run: {error}. It is damaged, or "
            "another tool wrote it: compile the model again, or use another copy of the saved program"
        ) from error
    return {entry.updates or entry.name: result for entry, result in zip(signature.outputs, results, strict=True)}


@dataclass(frozen=True)
class _Use:
    """Where a parameter enters an operator, and the shape that it has there; None where that is not known."""

    node: ir.Node
    operand: int
    seen: tuple[int, ...] | None


def _reinitialized(
    forward: Iterable[ir.Model],
    weights: Mapping[str, np.ndarray],
    held_rows: Mapping[str, Sequence[int]],
    seed: int,
    scheme_name: str,
) -> dict[str, np.ndarray]:
    scheme = SCHEMES.get(scheme_name)
    if scheme is None:
        raise ConfigurationError(f"reinitialize={scheme_name!r} is not a scheme: choose one of {', '.join(SCHEMES)}, or None")
    uses: dict[str, list[_Use]] = {}
    for model in forward:
        for value in model.graph.inputs:
            name = value.name or ""
            if name in weights and not uses.get(name):
                uses[name] = _uses(value, weights[name].shape)
    redrawn = {}
    for name, array in weights.items():
        floating = array.dtype.kind == "f" or array.dtype.isbuiltin != 1
        if not floating or not uses.get(name):
            redrawn[name] = array
            continue
        digest = hashlib.sha256(name.encode()).digest()
        generator = np.random.default_rng([seed & (1 << 64) - 1, int.from_bytes(digest[:8], "little")])
        redrawn[name] = _draw(name, array, uses[name], scheme, scheme_name, generator).astype(array.dtype)
    for name, rows in held_rows.items():
        redrawn[f"param/{name}"][rows] = weights[f"param/{name}"][rows]
    return redrawn


def _uses(value: ir.Value, seen: tuple[int, ...] | None) -> list[_Use]:
    """Return the operators that compute with a value, looking through those that only pass it on or arrange it."""
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
    """Whether a tensor holds one number per channel, in whatever axis."""
    return shape is not None and sum(extent != 1 for extent in shape) <= 1


def _draw(
    name: str, array: np.ndarray, uses: Sequence[_Use], scheme: Scheme, scheme_name: str, generator: np.random.Generator
) -> np.ndarray:
    for use in uses:
        fans = _fans(use)
        if fans is not None:
            return scheme(generator, array.shape, *fans)
    for use in uses:
        constant = _constant(array, use)
        if constant is not None:
            return np.full(array.shape, constant)
    if any(use.node.op_type in ("Gather", "Add") for use in uses):
        return generator.standard_normal(array.shape, dtype=np.float32) * EMBEDDING_DEVIATION
    raise ConfigurationError(
        f"reinitialize={scheme_name!r}: cannot tell how to draw '{name}' of shape {list(array.shape)} from its use in "
        f"{describe_node(uses[0].node)}. Compile without reinitialize, set this entry in program.initial_state() and give "
        "that to Session(state=...)"
    )


def _fans(use: _Use) -> tuple[int, int] | None:
    """Return how many inputs reach one output of a weight, and how many outputs one input reaches; None if it is no weight."""
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


def _constant(array: np.ndarray, use: _Use) -> float | None:
    """Return the value that a bias, scale, mean, variance or slope starts from; None for anything else."""
    operator, operand = use.node.op_type, use.operand
    biases = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "LSTM": 3, "GRU": 3, "RNN": 3}
    if biases.get(operator) == operand:
        return 0.0
    if operator.endswith("Normalization"):
        return (1.0, 0.0, 0.0, 1.0)[operand - 1] if 1 <= operand <= 4 else None
    per_channel = array.size == max(array.shape, default=1)
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
