"""Build the graphs ``init``, ``apply`` and ``step`` from ``grad`` and an optimizer.

Nothing is differentiated here, so that another optimizer, or other parameters that train, cost only these three graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from burnish import optim
from burnish.analysis.parameter_roles import parameter_infos
from burnish.compiler.draft import Draft, finish, name_taken, name_taken_twice
from burnish.compiler.sparse_tables import check_optimizer
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.graph import Tensor
from burnish.graph.annotations import LAYER, POLICY
from burnish.graph.uses import producer_of
from burnish.norms.policies import Frozen
from burnish.operators.collectives import PARTS_OF
from burnish.operators.row_gradients import coalesced
from burnish.optim.accumulate import LOSS_WEIGHT, steps_to_an_update, weighing, weighs
from burnish.optim.arithmetic import where
from burnish.optim.base import Scheduled, UpdateInputs, options_without_effect
from burnish.optim.gradient_transforms import centralizes, uncentred
from burnish.optim.groups import frozen_by_pattern
from burnish.optim.loss_scale import LOSS_SCALE, all_finite
from burnish.optim.parameters import Infos
from burnish.optim.row_updates import apply_to_rows, has_rows_of, held_rows_of, skips_steps, without_rows
from burnish.optim.slots import parameter_of
from burnish.program.signature import GRADIENT_ROLES, Entry, GraphSignature, Role
from burnish.random import key_from_seed
from burnish.targets import TARGETS, Target
from burnish.warn import warn

STEP = Entry("step", Role.STEP, ir.DataType.INT64, ())
SCALE = Entry(LOSS_SCALE.entry(), Role.OPTIMIZER, ir.DataType.FLOAT, ())
HOST = TARGETS["onnxruntime"]
"""The target of ``init``, which runs once and on no engine."""
OPTIMIZER = "the optimizer"
"""The name of the part that its nodes belong to."""
WEIGHS_ALIKE = "weighs_alike"
"""The option of a program with the reason why accumulation gives micro-batches of any size the same weight."""
SKIPPED = "skipped"
"""The output that is 1 if a step is skipped because the gradients of a scaled loss overflowed, else 0."""


def update_graphs(
    grad: ir.Model,
    signature: GraphSignature,
    forward: Iterable[ir.Model],
    optimizer: optim.Optimizer,
    target: Target,
    graphs: Collection[str] = ("init", "step", "apply"),
) -> tuple[dict[str, ir.Model], dict[str, GraphSignature]]:
    """Return the graphs ``init``, ``step`` and ``apply``, or the selected ones, and their signatures.

    Args:
        grad: the finished graph of the gradients; not modified.
        signature: its signature.
        forward: the finished graphs that predict and evaluate, which show how the parameters are used.
        optimizer: the optimizer of the parameters with a gradient in ``grad``. Gradients of the rows that it holds are zeros.
        target: runtime that the graphs are lowered for, except ``init``, which runs once and not on an engine.
        graphs: names of the graphs to build.

    Raises:
        ConfigurationError: the optimizer does not fit the parameters, or leaves nothing to train.
    """
    parameters = _parameters(signature)
    names = [*parameters]
    infos = _infos(parameters, forward)
    weight = next(iter(signature.outputs_of(Role.WEIGHT)), None)
    bound = optim.bind(optimizer if weight is None else weighing(optimizer, weight.dtype), infos)
    frozen = optim.frozen_parameters(bound)
    trained = {name: entry for name, entry in parameters.items() if name not in frozen}
    if not trained:
        raise ConfigurationError(
            f"nothing would train: every parameter with a gradient, such as '{names[0]}', is in a frozen group of the optimizer; "
            "let a group train"
        )
    check_optimizer((entry.name.partition(":")[2] for entry in signature.outputs_of(Role.INDICES)), bound)
    update = _Update(grad, signature, bound, trained)
    targets = dict.fromkeys(graphs, target) | {"init": replace(HOST, float64=target.float64)}
    finished = {name: finish(getattr(update, name)(), name, targets[name]) for name in graphs}
    models = {name: model for name, (model, _) in finished.items()}
    signatures = {name: entries for name, (_, entries) in finished.items()}
    if isinstance(bound, Scheduled):
        signatures |= {name: replace(signatures[name], end=bound.end) for name in graphs if name != "init"}
    return models, signatures


def warn_of_accumulation(optimizer: optim.Optimizer, reason: str) -> None:
    """Warn if an optimizer accumulates and ``weight_of_batch`` gave a reason why the mean differs from that of one batch."""
    if reason and steps_to_an_update(optimizer.options()) > 1:
        problem = (
            f"accumulate: micro-batches weigh alike, however many samples or labelled tokens they have, for the loss has no one "
            f"weight of a batch: {reason}. Give micro-batches of one size, or a loss whose terms are means over the same"
        )
        warn(ObjectiveWarning(problem))


def warn_of_no_effect(optimizer: optim.Optimizer, signature: GraphSignature, forward: Iterable[ir.Model]) -> None:
    """Warn about optimizer options that change nothing, and weights whose gradients the optimizer ignores.

    Args:
        optimizer: optimizer of a program.
        signature: signature of its gradient graph.
        forward: the graphs that predict and evaluate.
    """
    infos = _infos(_parameters(signature), forward)
    bound = optim.bind(optimizer, infos)
    frozen = optim.frozen_parameters(bound)
    problems = options_without_effect(bound, [name for name in infos if name not in frozen])
    names = [name for name in uncentred(infos) if name not in frozen] if centralizes(optimizer) else []
    if names:
        which = f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        problems.append(
            f"centralize leaves the gradient of {which} as it is: no MatMul, Gemm, convolution, recurrent layer or Einsum "
            "reads the weight, or what keeps its axes, so that those that an output sums over are not known. Freeze such "
            "weights, or leave centralize out, if that is not meant"
        )
    for problem in problems:
        warn(ObjectiveWarning(problem))


def layers_left_moving(grad: ir.Model | None, optimizer: optim.Optimizer) -> list[str]:
    """Return the names of layers that normalize by the batch although the optimizer freezes their scale and bias.

    Args:
        grad: the training graph before lowering; None if it is not available, which gives an empty list.
        optimizer: the optimizer.
    """
    moving = []
    for node in grad.graph if grad is not None else ():
        policy = POLICY.get(node)
        if policy is None or policy.startswith(Frozen.name):
            continue
        names = [value.name or "" for value in node.inputs if value is not None and value.is_graph_input()]
        parameters = [name.removeprefix("param/") for name in names if name.startswith("param/")]
        if parameters and len(frozen_by_pattern(optimizer, parameters)) == len(parameters):
            moving.append(LAYER.get(node) or "")
    return moving


def _parameters(signature: GraphSignature) -> dict[str, Entry]:
    entries = {entry.name.removeprefix("param/"): entry for entry in signature.inputs_of(Role.PARAMETER)}
    names = (entry.name.partition(":")[2] for entry in signature.outputs_of(Role.GRADIENT, Role.ROWS))
    return {name: entries[name] for name in names}


def _infos(parameters: Mapping[str, Entry], forward: Iterable[ir.Model]) -> Infos:
    return parameter_infos((model.graph for model in forward), (_info(name, entry) for name, entry in parameters.items()))


def _info(name: str, entry: Entry) -> optim.ParameterInfo:
    return optim.ParameterInfo(name, tuple(extent for extent in entry.extents if isinstance(extent, int)), entry.dtype)


def joined_signature(grad: GraphSignature, apply: GraphSignature) -> GraphSignature:
    """Return the signature of ``step``, which is ``grad`` followed by ``apply``.

    Raises:
        ConfigurationError: the two use a name for different things.
    """
    grad_inputs = {entry.name: entry for entry in grad.inputs}
    read = [entry for entry in apply.inputs if entry.role not in GRADIENT_ROLES]
    for entry in read:
        if grad_inputs.get(entry.name, entry) != entry:
            raise name_taken(entry)
    added = {entry.name: entry for entry in read if entry.name not in grad_inputs}
    remaining = tuple(entry for entry in grad.outputs if entry.role not in GRADIENT_ROLES)
    for entries, inputs in ((apply.outputs, grad_inputs), (remaining, added)):
        for entry in entries:
            if entry.name in inputs:
                raise name_taken_twice(entry.name, "step")
    return GraphSignature(grad.inputs + tuple(added.values()), remaining + apply.outputs, grad.extents, apply.end)


@dataclass
class _Update:
    grad: ir.Model
    signature: GraphSignature
    optimizer: optim.Optimizer
    parameters: dict[str, Entry]  # the updated ones, in the order of their gradients

    def init(self) -> Draft:
        return self._init

    @cached_property
    def _init(self) -> Draft:
        draft = self._empty()
        seed = draft.add_input(Entry("seed", Role.SEED, ir.DataType.INT64, ()))
        for name, value in self.optimizer.init(draft.builder, self._add_parameters(draft)).items():
            draft.add_output(value, f"opt/{name}", Role.OPTIMIZER, updates=f"opt/{name}")
        draft.add_output(key_from_seed(draft.builder, seed), "rng/key", Role.KEY, updates="rng/key")
        draft.add_output(draft.builder.constant(np.asarray(0, np.int64)), "step", Role.STEP, updates="step")
        return draft

    def apply(self) -> Draft:
        draft = self._empty()
        parameters = self._add_parameters(draft)
        entries = [self.gradients[name] for name in parameters]
        gradients = dict(zip(parameters, draft.add_inputs(entries), strict=True))
        held = held_rows_of(self.optimizer)
        indices: dict[str, Tensor] = {}
        with draft.builder.attributed(OPTIMIZER):
            for name in self.indices:
                parts = [(draft.add_input(self.indices[name]), gradients[name])]
                indices[name], gradients[name] = coalesced(parts, parameters[name], held.get(name, ()))
            gradients = without_rows(gradients, {name: rows for name, rows in held.items() if name not in indices})
        weight = None if self.weight is None else draft.add_input(self.weight)
        self._add_update(draft, parameters, gradients, indices, weight)
        return draft

    def step(self) -> Draft:
        draft = Draft.reopened(self.grad, self.signature)
        weight = draft.take_weight()
        all_gradients = draft.take_gradients()
        indices = {name: tensor for name, tensor in draft.take_indices().items() if name in self.parameters}
        gradients = {name: all_gradients[name] for name in self.parameters}
        values = draft.values()
        parameters = {name: draft.builder.tensor(values[f"param/{name}"]) for name in gradients}
        finite = self._finite(draft, all_gradients, gradients)
        self._add_update(draft, parameters, gradients, indices, weight, finite)
        return draft

    def _finite(self, draft: Draft, every: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> Tensor | None:
        """Return True if the gradients of a scaled loss are finite, otherwise the step is skipped; None without a scale.

        The graph of the gradients checks all of them. If the optimizer freezes some, the step only checks the ones it reads.
        """
        skipped = next((value for value, entry in draft.outputs if entry.name == SKIPPED), None)
        if skipped is None:
            return None
        builder = draft.builder
        statistics = {entry.name: value for value, entry in draft.outputs if entry.role is Role.STATISTIC}
        denied = producer_of(skipped, "Cast")
        opposite = None if denied is None else producer_of(denied.inputs[0], "Not")
        flag = None if opposite is None else opposite.inputs[0]
        choices = {name: producer_of(value, "Where") for name, value in statistics.items()}
        are_chosen = all(node is not None and node.inputs[0] is flag for node in choices.values())
        if read.keys() == every.keys() or flag is None or not are_chosen:
            return builder.op("Equal", builder.tensor(skipped), 0)
        finite = all_finite(builder, read, PARTS_OF)
        followed = {SKIPPED: builder.cast(builder.op("Not", finite), builder.tensor(skipped).dtype)}
        for name, node in choices.items():
            assert node is not None
            new, old = (builder.tensor(value) for value in node.inputs[1:] if value is not None)
            followed[name] = where(finite, new, old)
        draft.outputs = [(followed[e.name].value if e.name in followed else value, e) for value, e in draft.outputs]
        return finite

    @cached_property
    def gradients(self) -> dict[str, Entry]:
        """The gradient of each updated parameter, as an input."""
        entries = self.signature.outputs_of(Role.GRADIENT, Role.ROWS)
        return {name: entry for entry in entries if (name := entry.name.partition(":")[2]) in self.parameters}

    @cached_property
    def indices(self) -> dict[str, Entry]:
        """The row indices of each gradient of rows, as an input."""
        entries = self.signature.outputs_of(Role.INDICES)
        return {name: entry for entry in entries if (name := entry.name.partition(":")[2]) in self.parameters}

    @cached_property
    def weight(self) -> Entry | None:
        """The divisor of the loss, as an input, if the optimizer weighs gradients by it."""
        entry = next(iter(self.signature.outputs_of(Role.WEIGHT)), None)
        return entry if weighs(self.optimizer) else None

    @cached_property
    def slots(self) -> tuple[Entry, ...]:
        """The state of the optimizer, as entries."""
        return tuple(
            replace(entry, name=entry.updates or "", updates=None)
            for _, entry in self._init.outputs
            if entry.role is Role.OPTIMIZER
        )

    def _empty(self) -> Draft:
        opset = {"": self.grad.opset_imports[""]}
        return Draft(ir.Model(ir.Graph([], [], nodes=[], opset_imports=opset), ir_version=self.grad.ir_version))

    def _add_parameters(self, draft: Draft) -> dict[str, Tensor]:
        return dict(zip(self.parameters, draft.add_inputs(self.parameters.values()), strict=True))

    def _add_update(
        self,
        draft: Draft,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        indices: Mapping[str, Tensor],
        weight: Tensor | None = None,
        finite: Tensor | None = None,
    ) -> None:
        """Emit the optimizer; its own rates, next parameters, next optimizer state and next step become outputs.

        ``indices`` are the rows of sparse gradients, ``weight`` is the divisor of the loss, and ``finite`` is the result of an
        earlier check.
        """
        slots = draft.add_inputs(self.slots)
        state = {entry.name.removeprefix("opt/"): slot for entry, slot in zip(self.slots, slots, strict=True)}
        step = draft.add_input(STEP)
        hyperparameters = {
            name: draft.add_input(Entry(name, Role.HYPERPARAMETER, ir.DataType.FLOAT, (), default=default))
            for name, default in self.optimizer.hyperparameters().items()
        }
        if weight is not None and self.weight is not None:
            hyperparameters[LOSS_WEIGHT] = weight
        with draft.builder.attributed(OPTIMIZER):
            next_step = step + 1
            is_scaled = skips_steps(self.optimizer)
            if is_scaled and finite is None:
                finite = all_finite(draft.builder, gradients, PARTS_OF)
            inputs = UpdateInputs(draft.builder, parameters, gradients, state, step, hyperparameters, finite)
            following, next_state = apply_to_rows(self.optimizer, inputs, indices)
            if is_scaled and finite is not None:
                next_step = where(finite, next_step, step)
            if isinstance(self.optimizer, Scheduled):
                for name, tensor in self.optimizer.rates(inputs).items():
                    draft.add_output(tensor, name, Role.RATE)
        for name, tensor in following.items():
            by_rows = name in indices
            draft.add_output(tensor, f"next:param/{name}", Role.PARAMETER, updates=f"param/{name}", by_rows=by_rows)
        for name, tensor in next_state.items():
            owner = parameter_of(name) or ""
            by_rows = owner in indices and has_rows_of(state[name].shape, parameters[owner].shape)
            draft.add_output(tensor, f"next:opt/{name}", Role.OPTIMIZER, updates=f"opt/{name}", by_rows=by_rows)
        draft.add_output(next_step, "next:step", Role.STEP, updates="step")
