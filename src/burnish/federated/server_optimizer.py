"""Server optimizers, whose gradient is the difference to the clients' average.

With parameters p at the start of a round and the clients' average q, an optimizer updates p with the gradient ``p - q`` (Reddi et
al., "Adaptive federated optimization", 2021). SGD of rate 1 gives the average; with momentum it is FedAvgM (Hsu et al.,
"Measuring the effects of non-identical data distribution for federated visual classification", 2019); Adam is FedAdam, here with
bias correction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from burnish import engines, optim
from burnish.analysis.parameter_roles import parameter_infos
from burnish.compiler.draft import Draft, finish
from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.program import Program
from burnish.program.signature import Entry, Role
from burnish.program.state import Arrays, check_state
from burnish.registry import Registry
from burnish.targets import TARGETS

OPSET, IR_VERSION = 18, 10
TARGET = TARGETS["onnxruntime"]
STEP = Entry("step", Role.STEP, ir.DataType.INT64, ())


def fedavgm(lr: float = 1.0, momentum: float = 0.9) -> optim.Optimizer:
    """Return FedAvgM: SGD with momentum."""
    return optim.sgd(lr=lr, momentum=momentum)


def fedadam(lr: float = 0.01, betas: Sequence[float] = (0.9, 0.99), eps: float = 1e-3) -> optim.Optimizer:
    """Return FedAdam: Adam with the values of Reddi et al."""
    return optim.adam(lr=lr, betas=tuple(betas), eps=eps)


METHODS: Registry[optim.Optimizer] = Registry(
    "server optimizer",
    {"fedavgm": fedavgm, "fedadam": fedadam},
    home="burnish.federated",
    is_made=lambda given: isinstance(given, optim.Optimizer),
)
"""Server optimizers by name; FedAvg has none."""


class ServerOptimizer:
    """An optimizer of ``burnish.optim`` with its state, for the shared parameters.

    Args:
        optimizer: the optimizer.
        program: program of the run.
        names: parameters to update, by state name.
        state: initial values of the parameters, by state name.

    Attributes:
        state: the optimizer's state by name, and ``step``, its number of updates.

    Raises:
        ConfigurationError: it does not fit the parameters, or needs hyperparameters with each update.
    """

    def __init__(self, optimizer: optim.Optimizer, program: Program, names: Collection[str], state: Mapping[str, np.ndarray]):
        missing = [name for name, default in optimizer.hyperparameters().items() if default is None]
        if missing:
            raise ConfigurationError(f"The server's optimizer needs '{missing[0]}' with each update: give one that does not")
        entries = [entry for entry in program.signature.state if entry.name in names]
        self._entries = {entry.name.removeprefix("param/"): entry for entry in entries}
        infos = parameter_infos(
            (program.predict.graph, program.evaluate.graph),
            (optim.ParameterInfo(name, state[entry.name].shape, entry.dtype) for name, entry in self._entries.items()),
        )
        self._optimizer = optim.bind(optimizer, infos)
        init = self._init()
        self._slots = tuple(replace(entry, name=entry.name) for _, entry in init.outputs)
        model, _ = finish(init, "init", TARGET)
        engine = engines.get("onnxruntime")
        started = engine.load(model)({entry.name: state[entry.name] for entry in entries}) if self._slots else {}
        self.state: Arrays = {**started, STEP.name: np.zeros((), np.int64)}
        self._apply = engine.load(finish(self._update(), "apply", TARGET)[0])

    def update(self, before: Mapping[str, np.ndarray], average: Mapping[str, np.ndarray]) -> Arrays:
        """Return the parameters after the round, by state name, and advance ``state``.

        Args:
            before: parameters at the start of the round, by state name.
            average: the clients' average.
        """
        inputs = {entry.name: before[entry.name] for entry in self._entries.values()}
        inputs |= {f"grad:{name}": before[entry.name] - average[entry.name] for name, entry in self._entries.items()}
        outputs = self._apply({**inputs, **self.state})
        self.state = {name: outputs[f"next:{name}"] for name in self.state}
        return {entry.name: outputs[f"next:{entry.name}"] for entry in self._entries.values()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace ``state``.

        Raises:
            ConfigurationError: it is of another optimizer.
        """
        subject, remedy = "The state of the server's optimizer", "Give the server the optimizer that it was saved with"
        check_state((*self._slots, STEP), state, ConfigurationError, subject, remedy)
        self.state = dict(state)

    def _draft(self) -> tuple[Draft, dict[str, Tensor]]:
        draft = Draft(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}), ir_version=IR_VERSION))
        return draft, dict(zip(self._entries, draft.add_inputs(self._entries.values()), strict=True))

    def _init(self) -> Draft:
        draft, parameters = self._draft()
        for name, value in self._optimizer.init(draft.builder, parameters).items():
            draft.add_output(value, f"opt/{name}", Role.OPTIMIZER)
        return draft

    def _update(self) -> Draft:
        draft, parameters = self._draft()
        builder = draft.builder
        entries = [replace(entry, name=f"grad:{name}", role=Role.GRADIENT) for name, entry in self._entries.items()]
        gradients = dict(zip(parameters, draft.add_inputs(entries), strict=True))
        slots = draft.add_inputs(self._slots)
        state = {entry.name.removeprefix("opt/"): slot for entry, slot in zip(self._slots, slots, strict=True)}
        step = draft.add_input(STEP)
        rates = {
            name: builder.scalar(value or 0.0, ir.DataType.DOUBLE) for name, value in self._optimizer.hyperparameters().items()
        }
        inputs = optim.UpdateInputs(builder, parameters, gradients, state, step, rates)
        following, next_state = self._optimizer.apply(inputs)
        for name, value in following.items():
            draft.add_output(value, f"next:param/{name}", Role.PARAMETER)
        for name, value in next_state.items():
            draft.add_output(value, f"next:opt/{name}", Role.OPTIMIZER)
        draft.add_output(step + 1, "next:step", Role.STEP)
        return draft


def method(optimizer: str | optim.Optimizer | None) -> optim.Optimizer | None:
    """Return the server optimizer of a name, with settings after a colon (``fedadam:lr=0.01``), or the given object.

    Raises:
        ConfigurationError: an unknown name or setting.
    """
    if optimizer is None or optimizer == "fedavg":
        return None
    if isinstance(optimizer, str) and optimizer.partition(":")[0].strip() not in METHODS:
        raise ConfigurationError(
            f"server optimizer '{optimizer}' is unknown: choose among 'fedavg', {', '.join(map(repr, METHODS))}, or "
            "give an optimizer of burnish.optim"
        )
    made: optim.Optimizer = METHODS.resolve(optimizer)
    return made
