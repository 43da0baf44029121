"""The shared state of a federated run, with rules to combine every kind of state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from burnish import optim
from burnish.errors import ConfigurationError
from burnish.graph.annotations import changing_masks
from burnish.optim.accumulate import Accumulate
from burnish.optim.base import layers_of
from burnish.optim.slots import Slot, parameter_of, slot_of, slots_of
from burnish.program import Program, Role
from burnish.program.state import Arrays
from burnish.settings import matches_pattern

NORM = ("shared", "local")
SLOTS = ("average", "reset", "local")


@dataclass(frozen=True)
class Sharing:
    """The state that clients of a federated run share.

    State that steps do not change, such as frozen parameters, is not sent, nor is that of local parameters.

    Args:
        norm: ``shared``, or ``local`` to leave statistics, scales and biases of batch normalization with each client (Li et al.,
            "FedBN: federated learning on non-IID features via local batch normalization", 2021).
        local: patterns of initializers that stay with each client, such as its own head (``"head.*"``).
        slots: treatment of the optimizer's state. ``average`` combines it with the parameters, so a single client trains as if
            without rounds. ``reset`` restarts it and the step count in each round, and ``local`` leaves both with the client;
            neither is sent.

    Raises:
        ConfigurationError: another value, or patterns that are not texts.
    """

    norm: Literal["shared", "local"] = "shared"
    local: tuple[str, ...] = ()
    slots: Literal["average", "reset", "local"] = "average"

    def __post_init__(self) -> None:
        for name, value, values in (("norm", self.norm, NORM), ("slots", self.slots, SLOTS)):
            if value not in values:
                raise ConfigurationError(f"Sharing: {name}={value!r}: choose among {', '.join(map(repr, values))}")
        if isinstance(self.local, str) or not all(isinstance(pattern, str) for pattern in self.local):
            raise ConfigurationError(
                f"Sharing: local={self.local!r}: give a list of patterns of initializers, such as ['head.*']"
            )
        object.__setattr__(self, "local", tuple(self.local))

    def options(self) -> dict[str, Any]:
        """Return the arguments as JSON-compatible values."""
        return {**asdict(self), "local": list(self.local)}


@dataclass(frozen=True)
class Rules:
    """Treatment of each state entry of a program, by name. Entries in none of these are constant or local.

    Attributes:
        mean: averaged, weighted by the clients' samples.
        moments: running mean and variance of a batch normalization, combined as statistics of one sample set.
        counted: taken from the client with the most steps: integers, changing masks and related entries.
        key: the random key, which each client offsets; None if local.
        anchors: slot -> the parameter whose value at the start of the round it takes.
        reset: initialized by ``init`` at the start of each round.
        held_rows: entry -> rows that never change.
    """

    mean: tuple[str, ...]
    moments: tuple[tuple[str, str], ...]
    counted: tuple[str, ...]
    key: str | None
    anchors: Mapping[str, str]
    reset: tuple[str, ...]
    held_rows: Mapping[str, Sequence[int]]

    @property
    def travelling(self) -> tuple[str, ...]:
        """Entries of a round and an update."""
        pairs = tuple(name for pair in self.moments for name in pair)
        return (*self.mean, *pairs, *self.counted, *(() if self.key is None else (self.key,)))


def rules_of(program: Program, sharing: Sharing) -> Rules:
    """Return the treatment of each state entry of a program.

    Raises:
        ConfigurationError: a pattern matches no initializer, nothing would be shared, or the optimizer does not support it.
    """
    _check_optimizer(program, sharing)
    return _Sorting(program, sharing).rules()


class _Sorting:
    def __init__(self, program: Program, sharing: Sharing):
        step = program.signature["step"]
        self._entries = {entry.name: entry for entry in program.signature.state if entry.name in step.updates}
        self._sharing = sharing
        self._held = program.options.get("hold_rows", {})
        self._slots = slots_of(program.optimizer)
        self._layers = list(normalizations(program))
        self._masks = changing_masks(program.graphs.unlowered("predict").graph)
        self._staying = self._staying_initializers()

    def rules(self) -> Rules:
        kinds: dict[str, list[str]] = {"mean": [], "counted": [], "reset": []}
        anchors: dict[str, str] = {}
        key = None
        for name, entry in self._entries.items():
            if entry.role is Role.KEY:
                key = name if self._sharing.slots == "average" else None
            elif entry.role is Role.OPTIMIZER and self._slot(name).is_anchor:
                anchors[name] = f"param/{parameter_of(name)}"
            elif entry.role in (Role.OPTIMIZER, Role.STEP):
                self._sort_method(name, kinds)
            elif _initializer(name) not in self._staying:
                is_whole = entry.numpy_dtype.kind in "iub"
                kinds["counted" if is_whole or name in self._masks else "mean"].append(name)
        pairs = [layer.statistics for layer in self._layers]
        moments = tuple(dict.fromkeys(pair for pair in pairs if all(name in kinds["mean"] for name in pair)))
        paired = {name for pair in moments for name in pair}
        mean = tuple(name for name in kinds["mean"] if name not in paired)
        if not any(name.startswith("param/") for name in mean):
            raise ConfigurationError("Sharing: every parameter that trains stays with the clients: leave some out of local=")
        held = {f"param/{name}": rows for name, rows in self._held.items()}
        held |= {name: rows for name in mean if (rows := self._held.get(parameter_of(name) or ""))}
        return Rules(mean, moments, tuple(kinds["counted"]), key, anchors, tuple(kinds["reset"]), held)

    def _sort_method(self, name: str, kinds: Mapping[str, list[str]]) -> None:
        """Sort an optimizer entry or the step count, which belong together."""
        owner = parameter_of(name) if name.startswith("opt/") else None
        slot = self._slot(name) if name.startswith("opt/") else None
        if slot is not None and slot.is_average:
            if owner not in self._staying:
                kinds["mean"].append(name)  # a value of the parameter itself
        elif self._sharing.slots == "reset":
            kinds["reset"].append(name)
        elif self._sharing.slots == "average" and (owner is None or owner not in self._staying):
            is_mean = owner is not None and self._entries[name].numpy_dtype.kind not in "iub"
            kinds["mean" if is_mean else "counted"].append(name)

    def _slot(self, name: str) -> Slot:
        return slot_of(name, self._slots)

    def _staying_initializers(self) -> set[str]:
        initializers = {_initializer(name) for name in self._entries if name.startswith(("param/", "stat/"))}
        for pattern in self._sharing.local:
            if not any(matches_pattern(name, pattern) for name in initializers):
                raise ConfigurationError(
                    f"Sharing: local={pattern!r} matches no initializer that training changes, such as '{min(initializers)}'"
                )
        staying = {name for name in initializers if any(matches_pattern(name, pattern) for pattern in self._sharing.local)}
        if self._sharing.norm == "local":
            staying |= {_initializer(name) for layer in self._layers for name in layer.entries}
        return staying


@dataclass(frozen=True)
class Normalization:
    """State entries of a batch normalization with running statistics."""

    statistics: tuple[str, str]
    entries: tuple[str, ...]


def normalizations(program: Program) -> Iterator[Normalization]:
    """Yield the batch normalizations of a program's inference graph, also in bodies."""
    predict = program.graphs.unlowered("predict")
    for node in ir.traversal.RecursiveGraphIterator(predict.graph):
        if node.op_type == "BatchNormalization" and node.domain == "":
            scale, bias, mean, variance = (_state_entry(value) for value in node.inputs[1:5])
            if mean is not None and variance is not None:
                entries = tuple(name for name in (scale, bias, mean, variance) if name is not None)
                yield Normalization((mean, variance), entries)


def _state_entry(value: ir.Value | None) -> str | None:
    """Return the state entry of a value, also through a cast; None for a computed one."""
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Identity"):
        value = node.inputs[0]
    name = None if value is None else value.name
    return name if name is not None and name.startswith(("param/", "stat/")) else None


def _initializer(entry: str) -> str:
    return entry.partition("/")[2]


def _check_optimizer(program: Program, sharing: Sharing) -> None:
    options = program.options.get("optimizer")
    layers = [] if options is None else list(layers_of(optim.get(options)))
    if sharing.slots != "local" and any(isinstance(layer, Accumulate) for layer in layers):
        raise ConfigurationError(
            "Sharing: the optimizer accumulates gradients, and clients may end a round at different micro-batches of an update: "
            "leave accumulate out, or give slots='local', which keeps what was accumulated with the client"
        )
    if sharing.slots == "reset" and program.signature["step"].outputs_of(Role.RATE):
        raise ConfigurationError(
            "Sharing: slots='reset' would begin the learning-rate schedule anew in each round: compile with a plain rate and "
            "give lr to each round, or share with slots='average'"
        )


def joined(rules: Rules, before: Mapping[str, np.ndarray], states: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Return the combined state of clients.

    With n_r samples of client r, N in total, and each client's value of an entry::

          x = sum of n_r / N x_r                                           parameters, slots
          mean = sum of n_r / N mean_r                                     running mean
          var = sum of n_r / N (var_r + (mean_r - mean)^2)                 running variance (Chan et al. 1983)

    Sums are in float64, in the order of the clients; a single client's state is returned bit for bit.

    Args:
        rules: rules of the program.
        before: entries at the start of the round, for held rows.
        states: shared entries of each client, at least one; their order affects the last bits.
        weights: samples of each client, above 0.
    """
    total = float(sum(weights))
    shares = [float(weight) / total for weight in weights]
    result = {name: _mean(name, states, shares).astype(states[0][name].dtype) for name in rules.mean}
    for mean, variance in rules.moments:
        center = _mean(mean, states, shares)
        spread = [
            share * (state[variance].astype(np.float64) + np.square(state[mean].astype(np.float64) - center))
            for state, share in zip(states, shares, strict=True)
        ]
        result[mean] = center.astype(states[0][mean].dtype)
        result[variance] = sum(spread[1:], start=spread[0]).astype(states[0][variance].dtype)
    for name, rows in rules.held_rows.items():
        if name in result:
            result[name][list(rows)] = before[name][list(rows)]
    return result


def _mean(name: str, states: Sequence[Arrays], shares: Sequence[float]) -> np.ndarray:
    total = states[0][name].astype(np.float64) * shares[0]
    for state, share in zip(states[1:], shares[1:], strict=True):
        total += state[name].astype(np.float64) * share
    return np.asarray(total)
