"""The signature of a program: every input and output of every graph, by name, role, dtype and shape.

An engine needs nothing else to run a program: which inputs are state, and which output is the next value of each.
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
"""The graph that a program with cached features has beside the six."""


class Role(StrEnum):
    """What a value is for."""

    DATA = "data"  # an input of the model: x
    LABEL = "label"  # what the loss compares with: labels or targets
    PARAMETER = "parameter"  # param/<initializer>
    STATISTIC = "statistic"  # stat/<initializer>: a running mean or variance
    OPTIMIZER = "optimizer"  # opt/<slot>/<initializer>
    KEY = "key"  # rng/key
    STEP = "step"  # step
    SAMPLES = "samples"  # how many samples a worker has of the batch: in graphs of several workers alone
    HYPERPARAMETER = "hyperparameter"  # lr: a scalar with a default, which a call may override
    SEED = "seed"  # seed of the init graph
    GRADIENT = "gradient"  # grad:<initializer>
    INDICES = "indices"  # indices:<initializer>: the rows that a gradient is of, ascending
    ROWS = "rows"  # rows:<initializer>: the gradient of these rows
    WEIGHT = "weight"  # loss_weight: what the loss of a batch is divided by, which an accumulation weighs its gradients by
    LOSS = "loss"
    METRIC = "metric"
    DIAGNOSTIC = "diagnostic"  # how a step went: loss_scale, skipped
    RATE = "rate"  # lr: the learning rate of the step, where the graph computes it
    OUTPUT = "output"  # an output of the model: logits


GRADIENT_ROLES = (Role.GRADIENT, Role.INDICES, Role.ROWS, Role.WEIGHT)
"""Of what ``grad`` gives for ``apply`` alone."""
FLAGS = ("by_rows", "two_values")
"""Fields of an entry that are written where they are true."""
STATE_ROLES = frozenset({Role.PARAMETER, Role.STATISTIC, Role.OPTIMIZER, Role.KEY, Role.STEP})


@dataclass(frozen=True)
class Entry:
    """One input or output of a graph.

    Attributes:
        name: its name in the graph.
        role: what it is for.
        dtype: ONNX element type.
        shape: extents; a string is a symbolic dimension (the batch), None an unknown one. None as a whole: an output of the
            model whose rank is not known; inputs and state always have a rank.
        updates: for an output that is the next value of a state entry, the name of that entry.
        default: for a hyperparameter, the value when a call does not give one. NaN: a call gives one only where there is
            something new, and any finite number will do.
        minimum, maximum: for class indices, and for an input that selects rows of an embedding, the smallest and largest that are
            valid.
        ignored: for class indices, the one value outside that range that is valid too (``ignore_index``).
        two_values: for a label that is a sign, the minimum and the maximum alone are valid, and nothing between them.
        by_rows: for an output that is the next value of a state entry: it differs from the present one in a few rows of axis 0,
            and is a ScatterND of these rows, which may be written over the present ones in their place.
        fixed_by: for an input of data, axes that the model leaves open, with what fixes their extent: a layer and its parameter.
        sample_axis: of data, labels and outputs of the model, the axis along which the samples of a batch stand; None: there are
            no samples in it, and it is the same for all. Data sets have their samples along axis 0 (``burnish.program.layout``).
            Of no meaning for other roles.
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
        """Of a value of the shape, whose open extents count as one."""
        return math.ceil(self.dtype.itemsize * math.prod(extent for extent in self.extents if isinstance(extent, int)))

    @property
    def is_state(self) -> bool:
        return self.role in STATE_ROLES


@dataclass(frozen=True)
class GraphSignature:
    """Inputs and outputs of one graph, in the graph's order.

    Attributes:
        inputs, outputs: what the graph takes and gives.
        extents: what it asks of symbolic dimensions of its inputs, such as a batch that is a multiple of a number.
        end: the first step that the learning rate is not defined for; None without such an end.
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
        """Found once: every step asks for the same, of hundreds of entries."""
        found = self._found.get((side, roles))
        if found is None:
            found = self._found[side, roles] = tuple(entry for entry in entries if entry.role in roles)
        return found

    @cached_property
    def _found(self) -> dict[tuple[str, tuple[Role, ...]], tuple[Entry, ...]]:
        return {}


@dataclass(frozen=True)
class Signature:
    """Signatures of a program's graphs: ``init step grad apply evaluate predict``, and ``features`` where they are cached."""

    graphs: dict[str, GraphSignature]

    @classmethod
    def ordered(cls, graphs: Mapping[str, GraphSignature]) -> Signature:
        """The signature of a program with these graphs, in whatever order."""
        return cls({name: graphs[name] for name in (*GRAPH_NAMES, FEATURES) if name in graphs or name in GRAPH_NAMES})

    def __getitem__(self, graph: str) -> GraphSignature:
        return self.graphs[graph]

    def __iter__(self) -> Iterator[str]:
        return iter(self.graphs)

    @property
    def samples(self) -> tuple[Entry, ...]:
        """What a data set fills: the inputs of ``step``, with those that features are computed from in place of the features."""
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
        """Every state entry, in the order of the step graph; then what only evaluation and prediction read."""
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
        """Read what ``to_dict`` returned.

        Raises:
            KeyError, TypeError, ValueError: the values are not those of a signature: a text where a number belongs, for example.
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
        optional["default"] = "NaN"  # which JSON has no number for
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
    """Whether something is a whole number that 64 bits hold."""
    return is_whole(value) and -(2**63) <= value < 2**63


LEAST_SAVED = 1 << 25
"""Bytes from which on updates in place are worth two graphs in a step. They save a second set of what is updated, and keep the
gradients of all parameters until the last one is computed."""


def is_updated_in_place(apply: GraphSignature) -> bool:
    """Whether a step of a program, of which this is the signature of ``apply``, writes over the present state."""
    updated = sum(entry.bytes for entry in apply.outputs if entry.updates is not None and not entry.by_rows)
    return updated - sum(entry.bytes for entry in apply.inputs_of(*GRADIENT_ROLES)) >= LEAST_SAVED


def outputs_in_place(apply: ir.Model, signature: GraphSignature) -> frozenset[str]:
    """Return the outputs of ``step`` that are written over the present values; none where that saves too little.

    Args:
        apply: the graph that updates the state.
        signature: its signature.
    """
    from burnish.analysis.memory_plan import written_in_place

    if not is_updated_in_place(signature):
        return frozenset()
    updates = {entry.updates: entry.name for entry in signature.outputs if entry.updates is not None and not entry.by_rows}
    return frozenset(updates[entry] for entry in written_in_place(apply.graph, updates))
