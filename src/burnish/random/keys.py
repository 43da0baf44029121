"""Keys: the explicit random state of a program, two 32-bit words that come from a seed and change with every step.

In branches and loop bodies each iteration has its own key, a function of the number of the iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, attribute_value, bodies, describe_node

KEY_DTYPE = ir.DataType.UINT32
KEY_SHAPE = (2,)

# Odd, so that each word repeats only after 2**32 steps. The fractions of the golden ratio and of the root of 2.
_STEP = np.array([0x9E3779B9, 0x6A09E667], np.uint32)
# Different, so that the two words of a key are unrelated. The fractions of the roots of 3, 5, 7 and 11.
_SEED = np.array([0xBB67AE85, 0x3C6EF372], np.uint32)
_STREAM = np.array([0xA54FF53A, 0x510E527F], np.uint32)


def check_seed(seed: object) -> None:
    """Raise ConfigurationError unless ``seed`` is a signed 64-bit integer."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
        raise ConfigurationError(f"seed must be an integer from -2**63 to 2**63 - 1, not {seed!r}")


def initial_key(seed: int) -> np.ndarray:
    """Return the key of a seed: uint32, shape [2].

    Args:
        seed: a signed 64-bit integer. Different seeds give different keys.

    Raises:
        ConfigurationError: the seed is not a 64-bit integer.
    """
    check_seed(seed)
    low, high = int(seed) & 0xFFFFFFFF, (int(seed) >> 32) & 0xFFFFFFFF
    return mix_array(mix_array(_SEED + np.uint32(high)) ^ np.uint32(low))


def key_from_seed(builder: Builder, seed: Tensor) -> Tensor:
    """Emit the key of a seed, the same words as ``initial_key``.

    Args:
        builder: emits into the graph.
        seed: int64 scalar.
    """
    bits = builder.op("Reshape", builder.cast(seed, ir.DataType.UINT64), builder.integers([1]))
    low = builder.op("BitwiseAnd", bits, 0xFFFFFFFF)
    high = builder.op("BitShift", bits, builder.constant(np.array([32], np.uint64)), direction="RIGHT")
    base = mix(builder.constant(_SEED) + builder.cast(high, KEY_DTYPE))
    return mix(builder.op("BitwiseXor", base, builder.cast(low, KEY_DTYPE)))


def next_key(builder: Builder, key: Tensor) -> Tensor:
    """Emit the key of the next step; keys repeat after 2**32 steps.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
    """
    return builder.op("Add", key, builder.constant(_STEP), like=key)


def stream_key(builder: Builder, key: Tensor, stream: int) -> Tensor:
    """Emit the key of one consumer at this step: uint32, shape [2], both words mixed.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of the consumer, from 0 to 2**32 - 1: every node that draws has its own.

    Raises:
        ConfigurationError: the stream is out of range.
    """
    if not 0 <= stream < 2**32:
        raise ConfigurationError(f"a random stream is numbered from 0 to 2**32 - 1, not {stream}")
    return mix(key + builder.constant(mix_array(_STREAM + np.uint32(stream))))


def mix(words: Tensor) -> Tensor:
    """Emit a bijection of 32-bit words in which every bit of the result depends on every bit of the argument.

    Two multiplications and three shifts with constants that Chris Wellons found by search ("lowbias32", in "Prospecting for hash
    functions", 2018, released to the public domain).
    """
    words = _fold(words, 16) * 0x7FEB352D
    words = _fold(words, 15) * 0x846CA68B
    return _fold(words, 16)


def mix_array(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))


def _fold(words: Tensor, distance: int) -> Tensor:
    builder = words.builder
    return builder.op("BitwiseXor", words, builder.op("BitShift", words, distance, direction="RIGHT"), like=words)


# The fraction of the root of 13.
_ITERATION = np.array([0x9B05688C], np.uint32)


def keys_in_bodies(graph: ir.Graph, key: ir.Value, draws: Collection[str]) -> Iterator[tuple[ir.Graph, ir.Value]]:
    """Yield the bodies in a graph that draw random numbers, directly or in nested bodies, each with its key.

    A branch has the key of the graph around it. A loop derives a key from it and the number of the iteration, so that the draws
    are the same when the backward pass recomputes that iteration.

    Args:
        graph: the graph around them.
        key: its key: uint32, shape [2].
        draws: the operators that draw random numbers.

    Raises:
        ConfigurationError: a body that draws belongs to an operator other than If, Loop and Scan.
    """
    for node in list(graph):
        for body in bodies(node):
            if not any(inside.op_type in draws and inside.domain == "" for inside in body.all_nodes()):
                continue
            body.opset_imports.update(graph.opset_imports)
            inside = key if node.op_type == "If" else _key_of_iteration(node, body, key)
            yield body, inside
            yield from keys_in_bodies(body, inside, draws)


def _key_of_iteration(node: ir.Node, body: ir.Graph, key: ir.Value) -> ir.Value:
    if node.domain != "" or node.op_type not in ("Loop", "Scan"):
        raise ConfigurationError(
            f"{describe_node(node)} has a body that draws random numbers, and a key cannot tell its runs apart: move what draws "
            "out of it, or write it as a Loop"
        )
    number = body.inputs[0] if node.op_type == "Loop" else _number_of_slice(node, body)
    builder = Builder(body, before=next(iter(body), None))
    word = builder.op("Reshape", builder.cast(builder.tensor(number), KEY_DTYPE), builder.integers([1]))
    return mix(builder.op("Add", mix(word + builder.constant(_ITERATION)), builder.tensor(key))).value


def _number_of_slice(node: ir.Node, body: ir.Graph) -> ir.Value:
    """Add a sliced input to a Scan, so that its body gets the number of the iteration."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    count = int(attribute_value(node, "num_scan_inputs", 0))
    axes = list(attribute_value(node, "scan_input_axes", [0] * count))
    first = node.inputs[len(node.inputs) - count]
    assert first is not None
    builder = Builder(graph, before=node)
    extent = builder.op("Gather", builder.op("Shape", builder.tensor(first)), builder.scalar(axes[0], ir.DataType.INT64), axis=0)
    numbers = builder.op("Range", builder.scalar(0, extent), extent, builder.scalar(1, extent))
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, numbers.value)
    node.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", count + 1)
    for name in ("scan_input_axes", "scan_input_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*attribute_value(node, name, ()), 0])
    number = ir.Value(name=f"{numbers.name}:number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    body.inputs.append(number)
    return number
