"""The signature of a program: every input and output of every graph, with name, role, dtype and shape.

An engine needs nothing else to run a program: the signature names the state, and the output with each entry's next value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.norms.requirements import ExtentRule
from burnish.validation import is_number, is_whole

GRAPH_NAMES = ("init", "step", "grad", "apply", "evaluate", "predict")
FEATURES = "features"
"""The name of the extra graph of a program with cached features."""


class Role(StrEnum):
    """The role of an input or output."""

    DATA = "data"  # an input of the model: x
    LABEL = "label"  # what the loss compares with: labels or targets
    PARAMETER = "parameter"  # param/<initializer>
    STATISTIC = "statistic"  # stat/<initializer>: a running mean or variance
    OPTIMIZER = "optimizer"  # opt/<slot>/<initializer>
    KEY = "key"  # rng/key
    STEP = "step"  # step
    SAMPLES = "samples"  # a worker's number of samples of the batch: only in graphs for several workers
    HYPERPARAMETER = "hyperparameter"  # lr: a scalar with a default, which a call may override
    SEED = "seed"  # seed of the init graph
    GRADIENT = "gradient"  # grad:<initializer>
    INDICES = "indices"  # indices:<initializer>: ascending row indices of a sparse gradient
    ROWS = "rows"  # rows:<initializer>: the rows of a sparse gradient
    WEIGHT = "weight"  # loss_weight: the divisor of the batch's loss, by which an accumulation weighs its gradients
    LOSS = "loss"
    METRIC = "metric"
    DIAGNOSTIC = "diagnostic"  # the outcome of a step: loss_scale, skipped
    RATE = "rate"  # lr: the learning rate of the step, if the graph computes it
    OUTPUT = "output"  # an output of the model: logits


GRADIENT_ROLES = (Role.GRADIENT, Role.INDICES, Role.ROWS, Role.WEIGHT)
"""Outputs of ``grad`` that only ``apply`` reads."""
FLAGS = ("by_rows", "two_values")
"""Fields of an entry that are written only if they are true."""
STATE_ROLES = frozenset({Role.PARAMETER, Role.STATISTIC, Role.OPTIMIZER, Role.KEY, Role.STEP})


@dataclass(frozen=True)
class Entry:
    """One input or output of a graph.

    Attributes:
        name: name in the graph.
        role: role of the value.
        dtype: ONNX element type.
        shape: extents; a string is a symbolic dimension (the batch), None an unknown one. None instead of a tuple: an output of
            the model with an unknown rank; inputs and state always have a rank.
        updates: for an output that is the next value of a state entry, the name of that entry.
        default: for a hyperparameter, the default value. NaN: a call gives a value only if there is a new one, which may be any
            finite number.
        minimum, maximum: for class indices, and for an input that selects rows of an embedding, the range of valid values.
        ignored: for class indices, the one valid value outside that range (``ignore_index``).
        two_values: for a label that is a sign, only the minimum and the maximum are valid.
        by_rows: for an output that is the next value of a state entry: it is a ScatterND that changes a few rows of axis 0, which
            may be written in place.
        fixed_by: for an input of data, open axes of the model whose extent something fixes: the layer and its parameter.
        sample_axis: for data, labels and outputs of the model, the axis of the samples; None: the value has no samples and is the
            same for all. Data sets have samples along axis 0 (``burnish.program.layout``). Unused for other roles.
    """

    name: str
    role: Role
    dtype: ir.DataType
    shape: tuple[int | str | None, ...] | None
    updates: str | None = None
    default: float | None = None
    minimum: int | None = None
    maximum: int | None = None
    ignored: int | None = None
    two_values: bool = False
    by_rows: bool = False
    fixed_by: tuple[tuple[int, str], ...] = ()
    sample_axis: int | None = 0

    @property
    def numpy_dtype(self) -> np.dtype:
        return self.dtype.numpy()

    @property
    def extents(self) -> tuple[int | str | None, ...]:
        """The shape of an input or state entry, which always has a rank."""
        if self.shape is None:
            raise AssertionError(f"'{self.name}' has no known rank; compile refuses such an input")
        return self.shape

    @property
    def bytes(self) -> int:
        """Size in bytes; open extents count as one."""
        return math.ceil(self.dtype.itemsize * math.prod(extent for extent in self.extents if isinstance(extent, int)))

    @property
    def is_state(self) -> bool:
        return self.role in STATE_ROLES


@dataclass(frozen=True)
class GraphSignature:
    """Inputs and outputs of one graph, in the graph's order.

    Attributes:
        inputs, outputs: entries of the graph.
        extents: constraints on symbolic dimensions of its inputs, such as a batch that is a multiple of a number.
        end: the first step without a defined learning rate; None without such an end.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    extents: tuple[ExtentRule, ...] = ()
    end: int | None = None

    def inputs_of(self, *roles: Role) -> tuple[Entry, ...]:
        return self._of("inputs", self.inputs, roles)

    def outputs_of(self, *roles: Role) -> tuple[Entry, ...]:
        return self._of("outputs", self.outputs, roles)

    @cached_property
    def updates(self) -> Mapping[str, str]:
        """State name -> name of the output that holds its next value."""
        return MappingProxyType({entry.updates: entry.name for entry in self.outputs if entry.updates is not None})

    def _of(self, side: str, entries: tuple[Entry, ...], roles: tuple[Role, ...]) -> tuple[Entry, ...]:
        """Cached: every step asks for the same, among hundreds of entries."""
        found = self._found.get((side, roles))
        if found is None:
            found = self._found[side, roles] = tuple(entry for entry in entries if entry.role in roles)
        return found

    @cached_property
    def _found(self) -> dict[tuple[str, tuple[Role, ...]], tuple[Entry, ...]]:
        return {}


@dataclass(frozen=True)
class Signature:
    """Signatures of a program's graphs: ``init step grad apply evaluate predict``, and ``features`` if features are cached."""

    graphs: dict[str, GraphSignature]

    @classmethod
    def ordered(cls, graphs: Mapping[str, GraphSignature]) -> Signature:
        """Return the signature of a program with these graphs, given in any order."""
        return cls({name: graphs[name] for name in (*GRAPH_NAMES, FEATURES) if name in graphs or name in GRAPH_NAMES})

    def __getitem__(self, graph: str) -> GraphSignature:
        return self.graphs[graph]

    def __iter__(self) -> Iterator[str]:
        return iter(self.graphs)

    @property
    def samples(self) -> tuple[Entry, ...]:
        """The inputs that a data set fills: those of ``step``, with the inputs of the backbone in place of the features."""
        if FEATURES not in self.graphs:
            return self.graphs["step"].inputs_of(Role.DATA)
        features = self.graphs[FEATURES]
        computed = {entry.name for entry in features.outputs}
        entries = {entry.name: entry for entry in features.inputs_of(Role.DATA)}
        for entry in self.graphs["step"].inputs_of(Role.DATA):
            if entry.name not in computed:
                entries.setdefault(entry.name, entry)
        return tuple(entries.values())

    @property
    def state(self) -> tuple[Entry, ...]:
        """Every state entry, in the order of the step graph; then the ones that only evaluation and prediction read."""
        entries: dict[str, Entry] = {}
        for graph in ("step", "evaluate", "predict"):
            for entry in self.graphs[graph].inputs if graph in self.graphs else ():
                if entry.is_state:
                    entries.setdefault(entry.name, entry)
        return tuple(entries.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the signature as JSON-compatible values; ``from_dict`` reads them."""
        return {
            name: {
                "inputs": [_entry_to_dict(entry) for entry in graph.inputs],
                "outputs": [_entry_to_dict(entry) for entry in graph.outputs],
                **({"extents": [asdict(rule) for rule in graph.extents]} if graph.extents else {}),
                **({} if graph.end is None else {"end": graph.end}),
            }
            for name, graph in self.graphs.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Signature:
        """Read the result of ``to_dict``.

        Raises:
            KeyError, TypeError, ValueError: the values are not a signature: for example a text in place of a number.
        """
        return cls(
            {
                name: GraphSignature(
                    tuple(_entry_from_dict(entry, has_rank=True) for entry in graph["inputs"]),
                    tuple(_entry_from_dict(entry) for entry in graph["outputs"]),
                    tuple(_rule_from_dict(rule) for rule in graph.get("extents", ())),
                    _checked("end", graph.get("end"), _is_index, optional=True),
                )
                for name, graph in values.items()
            }
        )


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    optional = {name: getattr(entry, name) for name in ("updates", "default", "minimum", "maximum", "ignored")}
    if entry.default is not None and math.isnan(entry.default):
        optional["default"] = "NaN"  # JSON has no NaN
    return {
        "name": entry.name,
        "role": entry.role.value,
        "dtype": entry.dtype.name,
        "shape": None if entry.shape is None else list(entry.shape),
        **{name: value for name, value in optional.items() if value is not None},
        **{name: True for name in FLAGS if getattr(entry, name)},
        **({"fixed_by": [list(pair) for pair in entry.fixed_by]} if entry.fixed_by else {}),
        **({} if entry.sample_axis == 0 else {"sample_axis": entry.sample_axis}),
    }


def _entry_from_dict(values: Mapping[str, Any], has_rank: bool = False) -> Entry:
    _checked("name", values["name"], _is_text)
    _checked("shape", values["shape"], lambda shape: shape is not None or not (has_rank or Role(values["role"]) in STATE_ROLES))
    shape = None if values["shape"] is None else tuple(values["shape"])
    for extent in shape or ():
        if extent is not None and not isinstance(extent, str):
            _checked("shape", extent, _is_index)
    read = {**values, "role": Role(values["role"]), "dtype": ir.DataType[values["dtype"]], "shape": shape}
    _checked("updates", read.get("updates"), _is_text, optional=True)
    if read.get("default") == "NaN":
        read["default"] = math.nan
    else:
        _checked("default", read.get("default"), is_number, optional=True)
    for name in FLAGS:
        _checked(name, read.get(name, False), lambda flag: isinstance(flag, bool))
    for name in ("minimum", "maximum", "ignored"):
        _checked(name, read.get(name), _is_index, optional=True)
    read["fixed_by"] = tuple(
        (_checked("fixed_by", axis, _is_index), _checked("fixed_by", reason, _is_text))
        for axis, reason in read.get("fixed_by", ())
    )
    rank = 2**63 if shape is None else max(1, len(shape))
    _checked("sample_axis", read.get("sample_axis"), lambda axis: _is_index(axis) and 0 <= axis < rank, optional=True)
    return Entry(**read)


def _rule_from_dict(values: Mapping[str, Any]) -> ExtentRule:
    for field in fields(ExtentRule):
        if field.name in values:
            _checked(field.name, values[field.name], _is_index if field.type == "int" else _is_text)
    _checked("multiple", values.get("multiple", 1), lambda multiple: multiple >= 1)
    return ExtentRule(**values)


def _checked(name: str, value: Any, fits: Callable[[Any], bool], optional: bool = False) -> Any:
    if not fits(value) and not (optional and value is None):
        raise ValueError(f"{name}={value!r}")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_index(value: object) -> bool:
    """True if the value is an integer of at most 64 bits."""
    return is_whole(value) and -(2**63) <= value < 2**63


LEAST_SAVED = 1 << 25
"""The size in bytes from which updates in place are worth two graphs in a step. They save a second copy of the updated state, but
keep the gradients of all parameters until the last one is computed.
"""


def is_updated_in_place(apply: GraphSignature) -> bool:
    """True if a step of a program with this signature of ``apply`` overwrites the present state."""
    updated = sum(entry.bytes for entry in apply.outputs if entry.updates is not None and not entry.by_rows)
    return updated - sum(entry.bytes for entry in apply.inputs_of(*GRADIENT_ROLES)) >= LEAST_SAVED


def outputs_in_place(apply: ir.Model, signature: GraphSignature) -> frozenset[str]:
    """Return the outputs of ``step`` that overwrite the present values; none if that saves too little.

    Args:
        apply: the graph that updates the state.
        signature: its signature.
    """
    from burnish.analysis.memory_plan import written_in_place

    if not is_updated_in_place(signature):
        return frozenset()
    updates = {entry.updates: entry.name for entry in signature.outputs if entry.updates is not None and not entry.by_rows}
    return frozenset(updates[entry] for entry in written_in_place(apply.graph, updates))
