"""Targets: descriptions of the runtimes that programs are lowered for and checked against.

A target file is TOML:

name = "accelerator"
opset = 21                      # newest version of the standard domain
ir_version = 10                 # newest ONNX file format
shapes = "static"               # or "symbolic", the default
float64 = false                 # support for float64; default true
dtypes = ["float32", "int64"]   # dtypes of operators that list none; default all
operators = ["Add", {name = "Conv", newest = 11, dtypes = ["float32"]}, {name = "MaxPool", outputs = 1}]    # "*": all
kernels = ["ConvWeightGrad"]    # semantic operators with kernels in the runtime
joins_updates = true            # join the updates of small tensors; default true with all operators
prefers_products = true         # use matrix products for convolutions of channels; default as above
gathers_blocks = false          # gather blocks that change their order; default false

[domains]                       # operators of other domains; "*": all of one
"com.microsoft" = ["FusedConv"]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, describe_node, quantization_of
from burnish.graph.inference import operator_version
from burnish.graph.versions import oldest_opset
from burnish.operators.semantic import SemanticOperator, declared_operators
from burnish.settings import suggestion
from burnish.untrusted_files import read_toml_file
from burnish.validation import is_whole

OLDEST_OPSET = 18
STANDARD_DOMAINS = ("", "ai.onnx")
CLASSICAL_DOMAIN = "ai.onnx.ml"
ANY_DOMAIN = "*"
"""Key in a target's domains for every domain except the standard's and burnish's own."""


@dataclass(frozen=True)
class Support:
    """Support of a runtime for one operator.

    Attributes:
        newest: newest supported version of the operator; None for any.
        dtypes: supported element types of inputs and outputs; None for any.
        outputs: number of supported outputs, from the first on; None for all. With 1, ``MaxPool`` has no ``Indices``.
    """

    newest: int | None = None
    dtypes: frozenset[ir.DataType] | None = None
    outputs: int | None = None


_SCHEMAS = [(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()]
STANDARD_OPERATORS: Mapping[str, Support] = MappingProxyType({name: Support() for domain, name in _SCHEMAS if domain == ""})
CLASSICAL_OPERATORS = frozenset(name for domain, name in _SCHEMAS if domain == CLASSICAL_DOMAIN)


@dataclass(frozen=True)
class Target:
    """A runtime's capabilities: the standard operators that it runs and the semantic operators that it has kernels for.

    Attributes:
        name: name in options and errors.
        newest_opset: newest supported version of the standard domain.
        newest_ir_version: newest supported ONNX file format.
        operators: supported standard operators, with the details of each.
        domains: other domain -> supported operators, None for all; ``ANY_DOMAIN`` is the key for all other domains.
        kernels: names of the semantic operators that the runtime has kernels for; they are not lowered (``with_kernels``).
        collectives: names of additional semantic operators that it runs with a communicator to other workers.
        symbolic_shapes: True if inputs may have open dimensions, such as a batch of any size.
        float64: True if it supports float64. Otherwise values outside the model that are normally float64 (rates, optimizer
            factors, gradient norms) are float32.
        joins_updates: True if updates of small tensors are joined, by operators with many operands and results. Not useful for
            runtimes whose own kernels update many tensors in one call, nor for limited ones such as WebGPU, which may read only a
            few buffers at once.
        prefers_products: True if matrix products replace operators with slow CPU kernels in ONNX Runtime. Not useful for runtimes
            with their own kernels or on GPUs.
        gathers_blocks: True if reordering blocks of a tensor is fastest by a gather: ONNX Runtime slices and concatenates on one
            thread.
    """

    name: str
    newest_opset: int
    newest_ir_version: int
    operators: Mapping[str, Support] = field(default_factory=lambda: STANDARD_OPERATORS)
    domains: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()
    collectives: frozenset[str] = frozenset()
    symbolic_shapes: bool = True
    float64: bool = True
    joins_updates: bool = False
    prefers_products: bool = False
    gathers_blocks: bool = False

    def with_kernels(self, kernels: Collection[SemanticOperator | str]) -> Self:
        """Return this target with kernels for exactly these semantic operators."""
        names = (kernel.name if isinstance(kernel, SemanticOperator) else kernel for kernel in kernels)
        return replace(self, kernels=frozenset(names))

    def among_workers(self) -> Self:
        """Return this target with its collectives, for a runtime with a communicator to other workers."""
        return self.with_kernels(self.kernels | self.collectives)

    def has_kernel(self, node: ir.Node) -> bool:
        """True if a node is a semantic operator of burnish that the runtime has a kernel for."""
        return node.domain == BURNISH_DOMAIN and node.op_type in self.kernels

    def runs(self, node: ir.Node) -> bool:
        """True if the runtime has an operator of this domain and name."""
        if node.domain in STANDARD_DOMAINS:
            return node.op_type in self.operators
        if node.domain == BURNISH_DOMAIN:
            return self.has_kernel(node)
        operators = self.domains.get(node.domain, self.domains.get(ANY_DOMAIN, frozenset()))
        return operators is None or node.op_type in operators

    @property
    def output_limits(self) -> dict[str, int]:
        """Return the number of supported outputs of each standard operator with a limit."""
        return {name: support.outputs for name, support in self.operators.items() if support.outputs is not None}

    def covers(self, other: Target) -> bool:
        """True if this target, independent of the graph, runs everything that another target runs."""
        return (
            self.newest_opset >= other.newest_opset
            and self.newest_ir_version >= other.newest_ir_version
            and self.operators == other.operators
            and self.kernels >= other.kernels
            and self.symbolic_shapes >= other.symbolic_shapes
            and self.float64 >= other.float64
            and self.domains.items() >= other.domains.items()
        )


ONNXRUNTIME = Target(
    "onnxruntime",
    newest_opset=26,
    newest_ir_version=13,
    domains=MappingProxyType({CLASSICAL_DOMAIN: CLASSICAL_OPERATORS}),
    joins_updates=True,
    prefers_products=True,
    gathers_blocks=True,
)
WEBGPU = Target(
    "webgpu",
    newest_opset=26,
    newest_ir_version=13,
    operators=MappingProxyType({**STANDARD_OPERATORS, "BatchNormalization": Support(outputs=1), "MaxPool": Support(outputs=1)}),
    float64=False,
)
"""onnxruntime-web 1.30 with WebGPU; operators without a kernel there run on the CPU."""

TARGETS = {
    "onnxruntime": ONNXRUNTIME,
    "web": replace(ONNXRUNTIME, name="web", gathers_blocks=False),
    "webgpu": WEBGPU,
    "mobile": replace(ONNXRUNTIME, name="mobile", gathers_blocks=False),
    "ort-minimal": replace(ONNXRUNTIME, name="ort-minimal", domains=MappingProxyType({}), gathers_blocks=False),
    "reference": Target(
        "reference",
        newest_opset=onnx.defs.onnx_opset_version(),
        newest_ir_version=int(onnx.IR_VERSION),
        domains=MappingProxyType({CLASSICAL_DOMAIN: CLASSICAL_OPERATORS}),
        joins_updates=True,
        prefers_products=True,
    ),
}


def settle_opset(model: ir.Model, target: Target) -> bool:
    """Declare the oldest opset (at least 18) in which every node keeps its meaning, so that most runtimes load the model.

    Returns:
        True if the opset or the IR version changed.

    Raises:
        UnsupportedOperatorError: a node needs a newer opset than the target supports.
    """
    before = model.opset_imports[""], model.ir_version
    model.opset_imports[""] = _needed_opset(model, target)
    model.ir_version = min(max(model.ir_version, 10), target.newest_ir_version)
    return before != (model.opset_imports[""], model.ir_version)


def _needed_opset(model: ir.Model, target: Target) -> int:
    declared = model.opset_imports[""]
    needed = OLDEST_OPSET
    for node in model.graph.all_nodes():
        if node.domain not in STANDARD_DOMAINS:
            continue
        version = oldest_opset(node, declared, OLDEST_OPSET)
        if version > target.newest_opset:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is of opset {version}, and {target.name} loads opset {target.newest_opset} at most: "
                "update the runtime, or export the model with an older opset"
            )
        needed = max(needed, version)
    return needed


def check_allowed(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError for the first node that the target does not run.

    Checks the domain of each node and, for standard operators, the version in the model's opset and the element types.
    """
    opset = model.opset_imports[""]
    for node in model.graph.all_nodes():
        if not target.runs(node):
            if quantized := quantization_of(node):
                raise UnsupportedOperatorError(quantized)
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is not among the operators that {target.name} runs: "
                "lower it (burnish.operators.lowering) or choose another target"
            )
        if node.domain in STANDARD_DOMAINS:
            _check_support(node, opset, target)


def _check_support(node: ir.Node, opset: int, target: Target) -> None:
    support = target.operators[node.op_type]
    if support.newest is not None:
        version = operator_version(node.op_type, opset)
        if version is not None and version > support.newest:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is of version {version} of its operator, and {target.name} runs version {support.newest} "
                "at most: export the model with an older opset, or choose another target"
            )
    given = sum(1 for output in node.outputs if output.uses() or output.is_graph_output())
    if support.outputs is not None and given > support.outputs:
        raise UnsupportedOperatorError(
            f"{describe_node(node)} is read from its output '{node.outputs[given - 1].name}', and {target.name} gives "
            f"{support.outputs} of the outputs of {node.op_type}: give the model's inputs fixed sizes, but for the batch, "
            "or choose another target"
        )
    if not target.float64:
        _check_no_float64(node, target)
    if support.dtypes is None:
        return
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype is not None and value.dtype not in support.dtypes:
            taken = ", ".join(sorted(dtype.name.lower() for dtype in support.dtypes))
            raise UnsupportedOperatorError(
                f"{describe_node(node)} reads or returns '{value.name}', {value.dtype.name.lower()}, and {target.name} runs "
                f"{node.op_type} over {taken}: change the model's dtypes, or choose another target"
            )


def _check_no_float64(node: ir.Node, target: Target) -> None:
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype == ir.DataType.DOUBLE:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} reads or returns '{value.name}', float64, which {target.name} has not: convert the model "
                "to float32, or choose another target"
            )


def check_has_dtypes(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError if a model has float64 inputs, outputs or weights and the target does not support them."""
    if target.float64:
        return
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *model.graph.outputs):
        if value.dtype == ir.DataType.DOUBLE:
            raise UnsupportedOperatorError(
                f"'{value.name}' of the model is float64, which {target.name} has not: convert the model to float32, or choose "
                "another target"
            )


def check_runs(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError if the target does not run a finished model without changes."""
    if model.opset_imports[""] > target.newest_opset:
        _needed_opset(model, target)
    check_allowed(model, target)


ALL = "*"
SHAPES = {"symbolic": True, "static": False}
_PREFERENCES = ("joins_updates", "prefers_products", "gathers_blocks")
_KEYS = (
    "name",
    "opset",
    "ir_version",
    "shapes",
    "dtypes",
    "operators",
    "kernels",
    "collectives",
    "domains",
    "float64",
    *_PREFERENCES,
)
_NUMPY_NAMES = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}

TargetLike = str | Path | Target
"""A target, its name, or the path of its TOML file."""


def target_of(target: TargetLike) -> Target:
    """Return a target.

    Args:
        target: a name in ``TARGETS``, a path that ends in ``.toml``, or a Target, which is returned unchanged.

    Raises:
        ConfigurationError: the name is unknown, or the file is invalid.
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, str) and target in TARGETS:
        return TARGETS[target]
    if isinstance(target, str | Path) and Path(target).suffix == ".toml":
        return read_target(target)
    raise ConfigurationError(
        f"target: unknown '{target}'; choose among {', '.join(map(repr, TARGETS))}, or give a file that describes one, such as "
        "accelerator.toml"
    )


def read_target(path: str | Path) -> Target:
    """Read a target from a TOML file.

    Raises:
        ConfigurationError: the file cannot be read, is not TOML, or does not describe a target.
    """
    try:
        values = read_toml_file(Path(path))
    except OSError as error:
        raise ConfigurationError(f"the target '{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"the target '{path}' is no TOML: {error}") from error
    return target_from_dict(values, f"the target '{path}'")


def target_from_dict(values: Mapping[str, Any], what: str = "the target") -> Target:
    """Return the target described by the values of a target file; the inverse of ``target_to_dict``.

    Args:
        values: the keys of a target file.
        what: name for errors.

    Raises:
        ConfigurationError: they do not describe a target.
    """
    return _Reader(what, values).target()


def target_to_dict(target: Target) -> dict[str, Any]:
    """Return a target as JSON-compatible values for ``target_from_dict``."""
    operators = ALL if target.operators == STANDARD_OPERATORS else [_support_to_dict(*item) for item in target.operators.items()]
    return {
        "name": target.name,
        "opset": target.newest_opset,
        "ir_version": target.newest_ir_version,
        "shapes": "symbolic" if target.symbolic_shapes else "static",
        "float64": target.float64,
        "joins_updates": target.joins_updates,
        "prefers_products": target.prefers_products,
        "gathers_blocks": target.gathers_blocks,
        "operators": operators,
        "kernels": sorted(target.kernels),
        "collectives": sorted(target.collectives),
        "domains": {domain: ALL if names is None else sorted(names) for domain, names in target.domains.items()},
    }


def _support_to_dict(name: str, support: Support) -> dict[str, Any]:
    values: dict[str, Any] = {"name": name}
    if support.newest is not None:
        values["newest"] = support.newest
    if support.dtypes is not None:
        values["dtypes"] = sorted(dtype.name.lower() for dtype in support.dtypes)
    if support.outputs is not None:
        values["outputs"] = support.outputs
    return values


class _Reader:
    def __init__(self, what: str, values: Mapping[str, Any]):
        self._what = what
        self._values = values

    def target(self) -> Target:
        for key in self._values:
            if key not in _KEYS:
                raise self._error(f"there is no key '{key}'{suggestion(key, _KEYS)}", f"keys are {', '.join(_KEYS)}")
        shapes = self._values.get("shapes", "symbolic")
        if shapes not in SHAPES:
            raise self._error(f"shapes is {shapes!r}", 'give "static" or "symbolic"')
        name = self._text("name")
        opset, ir_version = self._whole("opset", self._values), self._whole("ir_version", self._values)
        operators = self._operators()
        runs_all = operators == STANDARD_OPERATORS
        return Target(
            name,
            opset,
            ir_version,
            operators=operators,
            domains=self._domains(),
            kernels=self._semantic("kernels"),
            collectives=self._semantic("collectives"),
            symbolic_shapes=SHAPES[shapes],
            float64=self._flag("float64", True),
            joins_updates=self._flag("joins_updates", runs_all),
            prefers_products=self._flag("prefers_products", runs_all),
            gathers_blocks=self._flag("gathers_blocks", False),
        )

    def _error(self, problem: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"{self._what} does not describe a target: {problem}; {remedy}")

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or not value:
            raise self._error(f"{key} is {value!r}", f"give it a {key}, as text")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._error(f"{key} is {value!r}", "give true or false")
        return value

    def _whole(self, key: str, values: Mapping[str, Any]) -> int:
        value = values.get(key)
        if not is_whole(value) or value < 1:
            raise self._error(f"{key} is {value!r}", "give a whole number of at least one")
        return int(value)

    def _names(self, key: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error(f"{key} is {value!r}", "give a list of names")
        return value

    def _operators(self) -> Mapping[str, Support]:
        default = self._dtypes("dtypes", self._values)
        listed = self._values.get("operators")
        if listed == ALL:
            return STANDARD_OPERATORS if default is None else dict.fromkeys(STANDARD_OPERATORS, Support(dtypes=default))
        if not isinstance(listed, list):
            raise self._error(f"operators is {listed!r}", 'give a list of standard operators, or "*" for all of them')
        operators = {}
        for entry in listed:
            values = {"name": entry} if isinstance(entry, str) else entry
            if not isinstance(values, dict) or not isinstance(values.get("name"), str):
                raise self._error(
                    f"{entry!r} is among the operators", 'give a name, or {name = "Conv", newest = 11, dtypes = [...]}'
                )
            name = values["name"]
            if name not in STANDARD_OPERATORS:
                remedy = "operators of other domains stand under [domains], semantic ones under kernels"
                raise self._error(f"the standard has no operator '{name}'{suggestion(name, STANDARD_OPERATORS)}", remedy)
            if unknown := values.keys() - {"name", "newest", "dtypes", "outputs"}:
                raise self._error(f"the operator {name} has '{min(unknown)}'", "it may have newest, dtypes and outputs")
            newest = self._whole("newest", values) if "newest" in values else None
            outputs = self._whole("outputs", values) if "outputs" in values else None
            operators[name] = Support(newest, self._dtypes("dtypes", values) if "dtypes" in values else default, outputs)
        return operators

    def _dtypes(self, key: str, values: Mapping[str, Any]) -> frozenset[ir.DataType] | None:
        if key not in values:
            return None
        known = {dtype.name.lower(): dtype for dtype in ir.DataType} | _NUMPY_NAMES
        names = self._names(key, values[key])
        for name in names:
            if name not in known:
                raise self._error(
                    f"there is no dtype '{name}'{suggestion(name, known)}", "give names such as float32, int64 and bool"
                )
        return frozenset(known[name] for name in names)

    def _semantic(self, key: str) -> frozenset[str]:
        names = self._names(key, self._values.get(key, []))
        known = declared_operators()
        for name in names:
            if name not in known:
                raise self._error(
                    f"there is no semantic operator '{name}' for {key}{suggestion(name, known)}",
                    "burnish.operators.semantic.declared_operators() has them",
                )
        return frozenset(names)

    def _domains(self) -> dict[str, frozenset[str] | None]:
        domains = self._values.get("domains", {})
        if not isinstance(domains, Mapping):
            raise self._error(f"domains is {domains!r}", 'give a table of domains, as in "com.microsoft" = ["FusedConv"]')
        for domain in domains:
            if domain in STANDARD_DOMAINS:
                raise self._error(
                    f"'{domain}' is among the domains", "it is the standard's, whose operators stand under operators"
                )
        return {
            domain: None if names == ALL else frozenset(self._names(f"the domain '{domain}'", names))
            for domain, names in domains.items()
        }
