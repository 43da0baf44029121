"""The cases that the ONNX standard brings for its operators, differentiated and compared with differences in float64."""

from __future__ import annotations

import importlib
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as standard
import onnx.version_converter
import onnx_ir as ir
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

import burnish
from burnish.errors import BurnishError, UnsupportedOperatorError
from burnish.targets import OLDEST_OPSET
from oracles.model_differences import function_in_float64, gradient_problem, in_float64, remembering, run

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
FLOATING_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision")
"""Attributes that name the dtype of a result."""
STORED_KINDS = ("simple", "pytorch-converted", "pytorch-operator")
RANDOM = {"Bernoulli", "RandomNormalLike", "RandomUniformLike"}
LARGEST = 50_000
"""Numbers beyond which a case is left out: smaller ones hold the same, and the evaluator of the standard takes a minute."""
OLDEST_READ = 7
"""The oldest opset that burnish reads."""


@dataclass(frozen=True)
class Case:
    """One case of the standard: a model and the arrays that it is fed, with what it computes of them."""

    name: str
    model: onnx.ModelProto
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]

    @property
    def feeds(self) -> dict[str, Any]:
        return dict(zip((value.name for value in self.graph_inputs), self.inputs, strict=False))

    @property
    def graph_inputs(self) -> list[onnx.ValueInfoProto]:
        initialized = {tensor.name for tensor in self.model.graph.initializer}
        return [value for value in self.model.graph.input if value.name not in initialized]

    @property
    def is_differentiable(self) -> bool:
        """Whether it is of the domain ai.onnx, with an input and an output of floating-point numbers."""
        domains = {node.domain for node in self.model.graph.node}
        return bool(self.wrt and self.outputs) and domains <= {"", "ai.onnx"}

    @property
    def is_random(self) -> bool:
        """Whether it draws its numbers; Dropout does where it is told to train."""
        nodes = self.model.graph.node
        return any(node.op_type in RANDOM or (node.op_type == "Dropout" and len(node.input) > 2) for node in nodes)

    @property
    def size(self) -> int:
        """How many numbers it is fed."""
        return sum(int(np.size(array)) for array in self.inputs if isinstance(array, np.ndarray))

    @property
    def operators(self) -> set[str]:
        return {node.op_type for node in self.model.graph.node}

    @property
    def wrt(self) -> list[str]:
        return [value.name for value in self.graph_inputs if _is_floating(value) and value.name in self.feeds]

    @property
    def outputs(self) -> list[str]:
        return [value.name for value in self.model.graph.output if _is_floating(value)]


@dataclass(frozen=True)
class Finding:
    """What came of one case.

    Attributes:
        status: ``right``, ``refused`` with a named error, ``wrong``, ``crash``, ``random`` where the operator draws its
            numbers, or ``unmeasured`` where nothing computes it in float64.
        detail: the error, or where the numbers part.
        carries: whether a number other than zero was compared.
        refused: the inputs that are refused.
    """

    case: str
    operators: tuple[str, ...]
    status: str
    detail: str = ""
    carries: bool = False
    refused: tuple[str, ...] = ()


def _is_floating(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in FLOATS


def node_modules() -> list[str]:
    """The modules of the standard with cases of single operators."""
    return sorted(path.stem for path in Path(standard.__file__).parent.glob("[!_]*.py"))


@cache
def node_cases(module: str) -> tuple[Case, ...]:
    """The cases of one module that have an input and an output of floating-point numbers.

    The standard draws the numbers of a case when its module is imported, each time the same.
    """
    name = f"{standard.__name__}.{module}"
    others = standard._NodeTestCases, standard._existing_names, sys.modules.pop(name, None)
    standard._NodeTestCases, standard._existing_names = [], {}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # some cases overflow on purpose
            importlib.import_module(name)
        tests = standard._NodeTestCases
    finally:
        standard._NodeTestCases, standard._existing_names, imported = others
        sys.modules.pop(name, None)
        if imported is not None:
            sys.modules[name] = imported
    sets = ((test, test.data_sets[0]) for test in tests if test.data_sets)
    cases = (Case(test.name, test.model, _arrays(inputs), _arrays(outputs)) for test, (inputs, outputs) in sets)
    return tuple(case for case in cases if case.is_differentiable and case.size <= LARGEST)


def stored_cases(kind: str) -> Iterator[Case]:
    """The cases of one of ``STORED_KINDS`` that have an input and an output of floating-point numbers.

    One of an opset before those that burnish reads is converted, or left out where the converter makes another model of it.
    """
    for test in load_model_tests(kind=kind):
        folder = Path(test.model_dir)
        sets = sorted(folder.glob("test_data_set_*"))
        if sets:
            case = _stored_case(f"{kind}:{test.name}", onnx.load(folder / "model.onnx"), sets[0])
            if case is not None and case.is_differentiable:
                yield case


def _stored_case(name: str, model: onnx.ModelProto, folder: Path) -> Case | None:
    arrays = []
    for what in ("input", "output"):
        paths = sorted(folder.glob(f"{what}_*.pb"), key=lambda path: int(path.stem.rpartition("_")[2]))
        try:
            arrays.append(tuple(numpy_helper.to_array(onnx.load_tensor(path)) for path in paths))
        except Exception:  # a sequence, which has no gradient
            return None
    if model.opset_import[0].version >= OLDEST_READ:
        return Case(name, model, *arrays)
    try:
        model = onnx.version_converter.convert_version(model, OLDEST_OPSET)
        model.ir_version = 8  # from 4 on an initializer need not be an input
        case = Case(name, model, *arrays)
        results = run(model, case.feeds)
    except RuntimeError:  # the converter lacks an operator, or its model does not run
        return None
    names = [value.name for value in model.graph.output]
    same = all(np.allclose(results[key], array, 1e-2, 1e-3) for key, array in zip(names, case.expected, strict=True))
    return case if same else None


def _arrays(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value for value in values)


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float64: inputs, outputs, weights, constants and the dtypes that attributes name."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for graph in (*_graphs(copy.graph), *copy.functions):
        if isinstance(graph, onnx.GraphProto):
            for info in (*graph.input, *graph.output, *graph.value_info):
                _widen_type(info.type)
            for tensor in graph.initializer:
                _widen_tensor(tensor)
        for node in graph.node:
            if node.op_type == "ConstantOfShape" and not node.attribute:
                zero = numpy_helper.from_array(np.zeros(1), "value")
                node.attribute.append(onnx.helper.make_attribute("value", zero))
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    _widen_tensor(attribute.t)
                if attribute.name in FLOATING_ATTRIBUTES and attribute.type == AttributeProto.INT and attribute.i in FLOATS:
                    attribute.i = TensorProto.DOUBLE
    _keep_what_is_float32(copy)
    return copy


ALWAYS_FLOAT = {"Resize": (1, 2), "Upsample": (1,)}
"""Operands that are float32 whatever the dtype of the data."""


def _keep_what_is_float32(model: onnx.ModelProto) -> None:
    """Let operands that are float32 whatever the dtype of the data come from a Cast."""
    for graph in _graphs(model.graph):
        nodes = []
        for node in graph.node:
            for index in ALWAYS_FLOAT.get(node.op_type, ()):
                if index < len(node.input) and node.input[index]:
                    name = f"{node.input[index]}:float32:{len(nodes)}"
                    nodes.append(onnx.helper.make_node("Cast", [node.input[index]], [name], to=TensorProto.FLOAT))
                    node.input[index] = name
            nodes.append(node)
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
                for body in (attribute.g, *attribute.graphs):
                    yield from _graphs(body)


def _widen_type(kind: onnx.TypeProto) -> None:
    if kind.HasField("tensor_type"):
        if kind.tensor_type.elem_type in FLOATS:
            kind.tensor_type.elem_type = TensorProto.DOUBLE
    elif kind.HasField("sequence_type"):
        _widen_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        _widen_type(kind.optional_type.elem_type)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def gradients_of(case: Case, of: str, cotangent: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The gradients that ``burnish.grad`` gives in float64, by input; and the errors of inputs that it refuses."""
    feeds = {**_wide_feeds(case), f"cotangent:{of}": cotangent}
    try:
        results = run(_gradient_model(case, case.wrt, of), feeds)
    except BurnishError as error:
        if len(case.wrt) == 1:
            return {}, {case.wrt[0]: f"{type(error).__name__}: {error}"}
    else:
        return {name: np.asarray(results[f"grad:{name}"]) for name in case.wrt}, {}
    gradients, refused = {}, {}
    for name in case.wrt:
        try:
            results = run(_gradient_model(case, [name], of), feeds)
        except BurnishError as error:
            refused[name] = f"{type(error).__name__}: {error}"
        else:
            gradients[name] = np.asarray(results[f"grad:{name}"])
    return gradients, refused


def _gradient_model(case: Case, wrt: list[str], of: str) -> onnx.ModelProto:
    """The gradient in float64; of an operator that the standard has in float32 at most, the float32 gradient computed so."""
    target = "onnxruntime"
    try:
        narrow = burnish.grad(case.model, wrt, of)
    except UnsupportedOperatorError:  # of an opset that only the evaluator of the standard has
        target = "reference"
        narrow = burnish.grad(case.model, wrt, of, target=target)
    try:
        return ir.to_proto(burnish.grad(widened(case.model), wrt, of, target=target))
    except BurnishError:
        return widened(ir.to_proto(narrow))


def _wide_feeds(case: Case) -> dict[str, Any]:
    return {name: in_float64(array) for name, array in case.feeds.items()}


def with_constants(case: Case) -> Case:
    """The case with every input that is not of floating-point numbers as an initializer, such as axes and shapes."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    constant = {name for name, array in case.feeds.items() if name not in case.wrt and isinstance(array, np.ndarray)}
    inputs = [value for value in model.graph.input if value.name not in constant]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(numpy_helper.from_array(case.feeds[name], name) for name in sorted(constant))
    remaining = tuple(array for name, array in case.feeds.items() if name not in constant)
    return Case(case.name, model, remaining, case.expected)


def compare(case: Case) -> Finding:
    """Differentiate every floating-point output of a case and compare with differences.

    Where it is refused because an axis or a shape is computed when it runs, it is compared with constants there.
    """
    finding = _compare(case)
    if finding.status == "refused" and "needs a constant" in finding.detail:
        return _compare(with_constants(case))
    return finding


def _compare(case: Case) -> Finding:
    operators = tuple(sorted(case.operators))
    seed = zlib.crc32(case.name.encode())
    rng = np.random.default_rng(seed)
    feeds, names = _wide_feeds(case), [value.name for value in case.model.graph.output]
    expected = dict(zip(names, case.expected, strict=True))
    function, nearby, carries, refusals = None, None, False, {}
    for of in case.outputs:
        cotangent = np.asarray(rng.standard_normal(np.shape(expected[of]))) if np.ndim(expected[of]) else np.ones(())
        try:
            gradients, refused = gradients_of(case, of, cotangent)
        except Exception as error:  # whatever it is, a person met it
            return Finding(case.name, operators, "crash", f"{of}: {type(error).__name__}: {error}")
        refusals.update(refused)
        if not gradients:
            continue
        if function is None:
            function = function_in_float64(widened(case.model), feeds, case.wrt, case.outputs, expected)
        if case.is_random:
            return Finding(case.name, operators, "random", refused=tuple(refusals))
        if function is None:
            return Finding(case.name, operators, "unmeasured", "nothing here computes it in float64")
        nearby = nearby or remembering(function, feeds)
        for index, (name, gradient) in enumerate(gradients.items()):
            # Of an input the same elements move for every output.
            drawn = np.random.default_rng([seed, index])
            problem = gradient_problem(nearby, feeds, of, cotangent, name, gradient, drawn)
            if problem:
                return Finding(case.name, operators, "wrong", f"d {of} / d {name}: {problem}")
        carries = carries or any(np.any(gradient) for gradient in gradients.values())
    if function is None:
        return Finding(case.name, operators, "refused", next(iter(refusals.values())), refused=tuple(refusals))
    return Finding(case.name, operators, "right", carries=carries, refused=tuple(refusals))
