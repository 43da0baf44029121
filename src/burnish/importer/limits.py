"""Limits on a file's demands: memory for its parts and constants, axes of its values, and inference.

A node of two bytes takes thousands. A file of a kilobyte can demand constants larger than any machine's memory, or millions of
axes, each of which inference keeps: a Gather of indices by themselves nearly doubles their axes, and a vector of a thousand
elements may be a shape. Inference of a suspicious model is tried in a separate process with limits.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import attribute_value, bodies, constant_array, describe_node, static_shape
from burnish.graph.protos import graphs_within
from burnish.operators.registry import Elementwise, elementwise
from burnish.untrusted_files import allowed_memory, allowed_seconds, if_trusted, memory_excess

# Bytes for each part, measured with parts that hold almost nothing.
NODE, RESULT, ATTRIBUTE, TENSOR, OTHER = 6 << 10, 3 << 10, 1 << 10, 8 << 10, 400
LONGEST_NAME = 1000
"""The most letters of a dimension's name. Every value with the dimension gets a copy."""


def check_parts(proto: onnx.ModelProto, name: str, size: int | None) -> None:
    """Refuse a model with too many parts for its memory, and dimensions with names that are too long.

    Args:
        proto: the model.
        name: the file or object, for messages.
        size: bytes of its file; None if the model came as an object.

    Raises:
        ModelError: with both numbers of bytes, or with the name of the value that has such a dimension.
    """
    needed = OTHER * (len(proto.metadata_props) + len(proto.functions) + len(proto.training_info))
    trained = [graph for info in proto.training_info for graph in (info.initialization, info.algorithm)]
    for body in graphs_within(proto.graph, *proto.functions, *trained):
        needed += _memory(body)
    if needed > allowed_memory(0):
        excess = memory_excess(needed, proto.ByteSize() if size is None else size)
        if excess is not None:
            raise ModelError(f"{name}: the model has too many nodes, tensors and other parts: {excess}")
    for graph in graphs_within(proto.graph, *trained):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dimension in value.type.tensor_type.shape.dim:
                if len(dimension.dim_param) > LONGEST_NAME:
                    raise ModelError(
                        f"{name}: a dimension of '{value.name}' has a name of {len(dimension.dim_param):,} letters, and "
                        f"{LONGEST_NAME:,} are the most: export the model with a shorter one"
                    )


def _memory(body: Any) -> int:
    """Return bytes for the parts of a graph or function; graphs inside its nodes are not counted."""
    needed = NODE * len(body.node)
    for node in body.node:
        needed += RESULT * len(node.output) + ATTRIBUTE * len(node.attribute) + OTHER * len(node.input)
        needed += OTHER * len(node.metadata_props)
        for attribute in node.attribute:
            needed += TENSOR * len(attribute.tensors) + OTHER * (len(attribute.strings) + len(attribute.type_protos))
    if isinstance(body, onnx.GraphProto):
        needed += TENSOR * (len(body.initializer) + len(body.sparse_initializer))
        needed += RESULT * (len(body.input) + len(body.output) + len(body.value_info))
        needed += OTHER * len(body.quantization_annotation)
    else:
        needed += OTHER * (len(body.input) + len(body.output) + len(body.value_info))
    return needed + OTHER * len(body.metadata_props)


def check_constant_sizes(model: ir.Model) -> None:
    """Refuse values that no input decides and that take more memory than reading the model may.

    Runtimes compute them before the first step, and so do some rewrites.

    Args:
        model: its shapes have been inferred.

    Raises:
        ModelError: there is such a value, or all that other nodes read take more together; the message names the node that
            computes it, or the largest of them.
    """
    constants = {value for graph in model.graphs() for value in graph.initializers.values()}
    constants.difference_update(model.graph.inputs)
    size = sum(value.const_value.nbytes for value in constants if value.const_value is not None)
    computed: dict[ir.Value, tuple[int, ir.Node]] = {}
    folded: set[ir.Node] = set()
    for node in model.graph.all_nodes():
        is_constant = node.op_type in ("Shape", "Size") or all(value is None or value in constants for value in node.inputs)
        if node.domain != "" or not is_constant:
            continue
        folded.add(node)
        constants.update(node.outputs)
        for value in node.outputs:
            shape = static_shape(value)
            if shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
                continue
            needed = math.ceil(math.prod(shape) * value.dtype.itemsize)
            computed[value] = needed, node
            excess = memory_excess(needed, size)
            if excess is not None:
                raise ModelError(f"'{value.name}', output of {describe_node(node)}, is a constant: {excess}")
    kept = {value: made for value, made in computed.items() if any(use.node not in folded for use in value.uses())}
    excess = memory_excess(sum(needed for needed, _ in kept.values()), size)
    if excess is not None:
        value, (_, node) = max(kept.items(), key=lambda item: item[1][0])
        raise ModelError(
            f"the model keeps {len(kept)} values that it computes of constants, the largest '{value.name}', output of "
            f"{describe_node(node)}: {excess}"
        )


MOST_AXES = 32
"""The most axes of an array that every version of NumPy can hold and iterate over."""

SHAPED = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
"""Operators that read a shape, and the index of that operand."""
COUNTED = {"NonZero": 2, "Range": 1, "Shape": 1, "Size": 0}
"""Operators with a fixed number of axes in the result."""
ONE_MORE = frozenset({"ConcatFromSequence", "GatherND", "Loop", "OneHot", "STFT", "Scan"})
"""Operators that can add one axis to those of their operands."""
OTHERS = 5
"""No other operator gives more axes than this if its operands have fewer."""
KEEPING = frozenset({"Cast", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that give no more elements than their first operand has, besides those that compute on each of its elements."""


def may_have_many_axes(graph: ir.Graph) -> bool:
    """Return True if a value of a graph or its subgraphs may have more than ``MOST_AXES`` axes.

    Counts are upper bounds. A shape of unknown length counts as too long.
    """
    return _Counts().exceed(graph)


def _largest(value: ir.Value | None) -> int | None:
    """Return the largest number in a constant, or in the difference of two; None for any other value."""
    array = constant_array(value)
    if array is not None:
        return int(array.max()) if array.size else 0
    maker = None if value is None else value.producer()
    if maker is None or maker.op_type != "Sub":
        return None
    first, second = (constant_array(operand) for operand in maker.inputs)
    return None if first is None or second is None or not first.size or not second.size else int(first.max()) - int(second.min())


class _Counts:
    """Upper bounds for the axes of values, and for the elements of possible shapes."""

    def __init__(self) -> None:
        self._axes: dict[ir.Value, int] = {}
        self._elements: dict[ir.Value, int] = {}

    def exceed(self, graph: Iterable[ir.Node]) -> bool:
        for node in graph:
            axes = self._of_result(node)
            if axes is None or axes > MOST_AXES:
                return True
            elements = self._elements_of_result(node)
            for output in node.outputs:
                self._axes[output] = axes
                if elements is not None:
                    self._elements[output] = elements
        return False

    def axes(self, value: ir.Value | None) -> int:
        """Return a bound for the axes of a value. It is 0 if the rank is unknown, because inference then adds no axes."""
        if value is None:
            return 0
        found = self._axes.get(value)
        if found is None:
            found = self._axes[value] = 0 if value.shape is None else len(value.shape)
        return found

    def elements(self, value: ir.Value | None) -> int | None:
        if value is None:
            return 0
        if value not in self._elements:
            array = None if value.producer() is None and value.const_value is None else constant_array(value)
            shape = static_shape(value)
            if array is None and shape is None:
                return None
            self._elements[value] = math.prod(shape or ()) if array is None else array.size
        return self._elements[value]

    def _of_result(self, node: ir.Node) -> int | None:
        kind, inputs = node.op_type, node.inputs
        within = bodies(node)
        if within:
            return self._of_bodies(node, within)
        if kind in SHAPED and len(inputs) > SHAPED[kind]:
            length = self.elements(inputs[SHAPED[kind]])
            return length if length is None or kind != "Expand" else max(length, self.axes(inputs[0]))
        if kind in COUNTED:
            return COUNTED[kind]
        if kind == "Constant":
            array = constant_array(node.outputs[0]) if node.outputs else None
            return 1 if array is None else array.ndim
        if kind in ("Gather", "GatherND"):
            return max(0, sum(map(self.axes, inputs)) - (kind == "Gather"))
        if kind in ("Squeeze", "Unsqueeze"):
            return self._of_changed_axes(node)
        if kind.startswith("Reduce") and not attribute_value(node, "keepdims", 1):
            return self._of_changed_axes(node)
        if kind == "Einsum":
            return len(str(attribute_value(node, "equation", "")))
        most = max(map(self.axes, inputs), default=0)
        if elementwise(node) is not None or kind in ("Cast", "Concat", "Slice", "Transpose"):
            return most
        return max(OTHERS, len(attribute_value(node, "shape", ())), most + (kind in ONE_MORE))

    def _of_changed_axes(self, node: ir.Node) -> int | None:
        """Return a bound for the axes after some are inserted or removed; None if it is not known."""
        before = self.axes(node.inputs[0] if node.inputs else None)
        second = node.inputs[1] if len(node.inputs) > 1 else None
        if node.op_type == "Unsqueeze":
            added = self.elements(second) if second is not None else len(attribute_value(node, "axes", ()))
            return None if added is None else before + added
        axes = attribute_value(node, "axes", None) if second is None else constant_array(second)
        if axes is None:
            return 0 if second is None and node.op_type != "Squeeze" else before
        numbers = {int(axis) for axis in np.ravel(axes)}
        from_end = sum(axis < 0 for axis in numbers)  # the others may name the same axes again
        return max(0, before - max(from_end, len(numbers) - from_end))

    def _of_bodies(self, node: ir.Node, within: Sequence[ir.Graph]) -> int | None:
        most = max(map(self.axes, node.inputs), default=0)
        for body in within:
            for given in body.inputs:
                self._axes[given] = max(most, 0 if given.shape is None else len(given.shape))
            if self.exceed(body):
                return None
            most = max([most, *map(self.axes, body.outputs)])
        return most + (node.op_type in ONE_MORE)

    def _elements_of_result(self, node: ir.Node) -> int | None:
        kind, inputs = node.op_type, node.inputs
        if kind == "Shape" and inputs:
            return self.axes(inputs[0])
        if kind == "Size":
            return 1
        if kind == "ConstantOfShape" and inputs:
            return self._filled(inputs[0])
        if kind == "Range" and len(inputs) == 3:
            start, end, step = (constant_array(inputs[0]), _largest(inputs[1]), constant_array(inputs[2]))
            return None if start is None or end is None or step is None else max(0, len(range(int(start), end, int(step) or 1)))
        if kind in KEEPING or kind.startswith("Reduce") or elementwise(node) is Elementwise.UNARY:
            return self.elements(inputs[0]) if inputs else None
        if kind == "Gather" and len(inputs) == 2 and self.axes(inputs[0]) <= 1:
            return self.elements(inputs[1])
        if kind == "Concat":
            return self._added(map(self.elements, inputs))
        if elementwise(node) is Elementwise.BROADCAST and all(self.axes(value) <= 1 for value in inputs):
            counts = [*map(self.elements, inputs)]
            return None if None in counts else max((count for count in counts if count is not None), default=None)
        return None

    def _filled(self, shape: ir.Value | None) -> int | None:
        """Return a bound for the elements of an array of this shape: a constant, or the shape of another value."""
        array, maker = constant_array(shape), None if shape is None else shape.producer()
        if array is not None:
            return int(math.prod(int(extent) for extent in array.flat))
        return self.elements(maker.inputs[0]) if maker is not None and maker.op_type == "Shape" and maker.inputs else None

    def _added(self, counts: Iterable[int | None]) -> int | None:
        known = [*counts]
        return None if None in known else sum(count or 0 for count in known)


TRIAL = """
import json, sys
settings = json.loads(sys.stdin.buffer.readline())
sys.path[:] = settings["path"]
import onnx.shape_inference
content = sys.stdin.buffer.read()
taken = lambda: 0
try:
    import resource
    taken = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + settings["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, OSError, ValueError):
    pass
most, name = 0, ""
try:
    model = onnx.shape_inference.infer_shapes(content, data_prop=settings["data_prop"])
except MemoryError:
    sys.exit(1)
except Exception:  # the library reports a failed allocation like a model with a fault
    sys.exit(1 if taken() > settings["memory"] // 4 else 0)
graphs = [model.graph]
while graphs:
    graph = graphs.pop()
    for value in (*graph.value_info, *graph.output):
        axes = len(value.type.tensor_type.shape.dim)
        if axes > most:
            most, name = axes, value.name
    for node in graph.node:
        for attribute in node.attribute:
            graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
print(json.dumps([most, name]))
"""


def try_inference(proto: onnx.ModelProto, data_prop: bool) -> None:
    """Infer the shapes of a model in another process, within the memory and time that reading the model may take.

    Other faults of the model are left to the caller, who infers its shapes next.

    Raises:
        ModelError: the process took more, or a value has more axes than arrays can have.
    """
    content = proto.SerializeToString()
    memory, seconds = allowed_memory(len(content)), allowed_seconds(len(content))
    settings = {"path": [str(place) for place in sys.path], "memory": memory, "data_prop": data_prop}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", TRIAL],
            input=json.dumps(settings).encode() + b"\n" + content,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return_code, answer = 1, b""
    except OSError:  # an embedded interpreter has no executable; there, only time is limited
        return
    else:
        return_code, answer = done.returncode, done.stdout
    if return_code:
        raise ModelError(
            f"inferring the shapes of the model takes more than the {memory:,} bytes of memory or the {seconds:,.0f} s that a "
            f"file of {len(content):,} bytes may take: export the model again, or {if_trusted(-(-2 * memory >> 30))}"
        )
    most, name = json.loads(answer or '[0, ""]')
    if most > MOST_AXES:
        raise ModelError(f"'{name}' would have {most:,} axes, and arrays have {MOST_AXES} at most: export the model again")
