"""Read a program from a ``training_info`` that another tool wrote, if the file contains enough.

The standard describes one graph for a whole step. A program also needs its two halves: the gradients, and the update that depends
only on them. They are found by cutting the graph at its ``Gradient`` of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from burnish.compiler.draft import Draft, entry_of, finish
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.compiler.update import update_graphs
from burnish.errors import CheckpointError
from burnish.graph import FLOATING, TRAINING_DOMAIN, Builder, Tensor, attribute_value, describe_node, model_proto, replace_uses
from burnish.graph.uses import ancestors_of, is_used, remove_unused
from burnish.graph.versions import raise_opset
from burnish.importer import load
from burnish.importer.nodes import is_gradient
from burnish.modes import bind_as_exported, bind_inference, bind_training, numbered_draws
from burnish.norms import RunningVariance
from burnish.optim.arithmetic import Tensors
from burnish.optim.base import UpdateInputs
from burnish.program import Program
from burnish.program.signature import GRAPH_NAMES, Entry, Role, Signature
from burnish.random import KEY_DTYPE, KEY_SHAPE, initial_key, next_key
from burnish.rewriting.draw_dropout import draw_dropout
from burnish.rewriting.expand_gradients import expand_gradients
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.rewriting.stages import RECOGNIZED_IN_MODE
from burnish.targets import TARGETS

TARGET = "onnxruntime"


def load_foreign_training(name: str, proto: onnx.ModelProto) -> Program:
    """Return a program, with the state of the file; see ``Program.load``.

    Args:
        name: name of the model in messages.
        proto: a checked model that contains all tensors.

    Raises:
        CheckpointError: the file lacks something that a program needs.
        ModelError, GradientError, UnsupportedOperatorError: a graph of the file cannot be read, differentiated or lowered.
    """
    return _Foreign(name, proto).program()


@dataclass
class _Foreign:
    name: str
    proto: onnx.ModelProto

    def __post_init__(self) -> None:
        steps = len(self.proto.training_info)
        if steps != 1:
            raise self._lacks(f"has {steps} training_info, and a program is one training step")
        self.info = self.proto.training_info[0]
        self.bindings = {binding.key: binding.value for binding in self.info.update_binding}
        self.held = {tensor.name: tensor for tensor in (*self.proto.graph.initializer, *self.info.algorithm.initializer)}
        if not self.bindings:
            raise self._lacks("has no update_binding, so that a step changes nothing")
        for key in (*self.bindings, *(binding.key for binding in self.info.initialization_binding)):
            if key not in self.held:
                raise self._lacks(f"binds '{key}', which is no initializer of it")

    def program(self) -> Program:
        grad, grad_signature = finish(self._grad(), "grad", TARGETS[TARGET])
        predict, predict_signature = finish(self._predict(), "predict", TARGETS[TARGET])
        evaluate, evaluate_signature = finish(self._evaluate(), "evaluate", TARGETS[TARGET])
        for name in (entry.name for entry in (*grad_signature.inputs, *evaluate_signature.inputs)):
            if name.startswith("opt/"):
                raise self._lacks(
                    f"reads '{name.removeprefix('opt/')}' to compute its loss, and updates it like an optimizer's state"
                )
        update = self._update(grad)
        models, signatures = update_graphs(grad, grad_signature, (predict, evaluate), update, TARGETS[TARGET])
        graphs: dict[str, Any] = {**models, "grad": grad, "predict": predict, "evaluate": evaluate}
        signatures |= {"grad": grad_signature, "predict": predict_signature, "evaluate": evaluate_signature}
        signature = Signature({name: signatures[name] for name in GRAPH_NAMES})
        names = {self._state_name(name): name for name in self.bindings}
        weights = {
            entry.name: self.start[names[entry.name]]
            for entry in signature.state
            if entry.role in (Role.PARAMETER, Role.STATISTIC)
        }
        saved = {entry.name: _array(self.held[names[entry.name]]) for entry in signature.state if entry.name in names}
        options = {"optimizer": update.options(), "target": TARGET}
        program = Program(LoweredGraphs.read(graphs, signature, options), weights)
        program.saved_state = self._with_counters(signature, saved)
        return program

    def _with_counters(self, signature: Signature, saved: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the file's state with a random key and a step counter, which only programs have."""
        own = {"rng/key": initial_key(0), "step": np.asarray(0, np.int64)}
        return {entry.name: saved[entry.name] if entry.name in saved else own[entry.name] for entry in signature.state}

    @cached_property
    def model(self) -> ir.Model:
        """The graph of a step, canonical: bound initializers and defaults of hyperparameters become inputs of the same names."""
        whole = onnx.ModelProto()
        whole.CopyFrom(self.proto)
        for part in ("input", "initializer", "output", "node", "value_info"):
            getattr(whole.graph, part).extend(getattr(self.info.algorithm, part))
        return self._loaded(whole)

    @cached_property
    def inference(self) -> ir.Model:
        return self._loaded(self.proto)

    def _loaded(self, proto: onnx.ModelProto) -> ir.Model:
        whole = onnx.ModelProto()
        whole.CopyFrom(proto)
        del whole.training_info[:]
        graph = whole.graph
        declared = {value.name for value in graph.input}
        lifted = [tensor for tensor in graph.initializer if tensor.name in self.bindings or tensor.name in self.rates]
        kept = [tensor for tensor in graph.initializer if tensor.name not in self.bindings and tensor.name not in self.rates]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        for tensor in lifted:
            if tensor.name not in declared:
                graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        return load(whole)

    @cached_property
    def rates(self) -> dict[str, float | None]:
        """The scalar inputs of the algorithm, with their defaults."""
        rates: dict[str, float | None] = {}
        for value in self.info.algorithm.input:
            tensor_type = value.type.tensor_type
            is_scalar = tensor_type.HasField("shape") and not tensor_type.shape.dim
            if value.name not in self.bindings and is_scalar and ir.DataType(tensor_type.elem_type) in FLOATING:
                held = self.held.get(value.name)
                rates[value.name] = None if held is None else float(_array(held))
        return rates

    @cached_property
    def values(self) -> dict[str, ir.Value]:
        return Draft(self.model).values()

    @cached_property
    def gradient_nodes(self) -> list[ir.Node]:
        """The Gradient nodes of the loss: the value that no other Gradient depends on."""
        nodes = [node for node in self.model.graph if is_gradient(node)]
        targets = {value for node in nodes if (value := node.inputs[-1]) is not None}
        if not targets:
            raise self._lacks(
                f"has no {TRAINING_DOMAIN}.Gradient in its algorithm, so that gradients cannot be told from the "
                "update that reads them"
            )
        passed = {value for target in targets for value in ancestors_of(target) if value is not target}
        last = [target for target in targets if target not in passed]
        if len(last) != 1:
            names = ", ".join(f"'{value.name}'" for value in last)
            raise self._lacks(f"differentiates {names}, and a program has one loss")
        return [node for node in nodes if node.inputs[-1] is last[0]]

    @cached_property
    def loss(self) -> ir.Value:
        loss = self.gradient_nodes[0].inputs[-1]
        assert loss is not None
        if loss.shape is None or len(loss.shape) != 0:
            raise self._lacks(f"differentiates '{loss.name}', which is no scalar, and a loss is one")
        return loss

    @cached_property
    def gradients(self) -> dict[str, ir.Value]:
        """Trainable initializer -> gradient of the loss."""
        found: dict[str, ir.Value] = {}
        for node in self.gradient_nodes:
            xs, zs = (int(attribute_value(node, name, 0)) for name in ("xs", "zs"))
            for position, output in enumerate(node.outputs):
                point, x = node.inputs[position], node.inputs[xs + zs + position]
                name = "" if x is None else x.name or ""
                if point is not x or name not in self.bindings:
                    raise self._lacks(
                        f"has a gradient with respect to '{name}', which no update changes, at {describe_node(node)}"
                    )
                found[name] = output
        return found

    @cached_property
    def from_data(self) -> set[ir.Value]:
        """The values that depend on a batch other than through the gradients."""
        named = {*self.bindings, *self.rates}
        reached = {value for value in self.model.graph.inputs if value.name not in named}
        cut = set(self.gradient_nodes)
        for node in self.model.graph:
            if node not in cut and any(value in reached for value in node.inputs):
                reached.update(node.outputs)
        return reached

    def _next(self, name: str) -> ir.Value:
        value = self.values.get(self.bindings[name])
        if value is None:
            raise self._lacks(f"binds '{name}' to '{self.bindings[name]}', a value that its graphs do not have")
        return value

    @cached_property
    def statistics(self) -> set[str]:
        """The bound initializers that depend directly on a batch: running means and the like."""
        found = {name for name in self.bindings if self._next(name) in self.from_data}
        mixed = next((name for name in self.gradients if name in found), None)
        if mixed is not None:
            raise self._lacks(f"updates '{mixed}' from the batch itself, and not only from the gradient of the loss")
        return found

    def _state_name(self, name: str) -> str:
        kind = "param" if name in self.gradients else "stat" if name in self.statistics else "opt"
        return f"{kind}/{name}"

    def _draft(self, model: ir.Model, results: Iterable[ir.Value]) -> tuple[Draft, list[ir.Value]]:
        """Return a draft that computes ``results`` of the model, with only the inputs that they need, and the results in it."""
        names = [value.name or "" for value in results]
        draft = Draft(model.clone())
        graph, values = draft.model.graph, draft.values()
        graph.outputs.clear()
        graph.outputs.extend(values[name] for name in names)
        remove_unused(draft.model)
        for value in list(graph.inputs):
            name = value.name or ""
            if not is_used(value) and name in {*self.bindings, *self.rates}:
                graph.inputs.remove(value)
        return draft, list(graph.outputs)

    def _name_inputs(self, draft: Draft) -> None:
        data = {value.name for value in self.proto.graph.input}
        kinds = {"param": Role.PARAMETER, "stat": Role.STATISTIC, "opt": Role.OPTIMIZER}
        for value in draft.model.graph.inputs:
            name = value.name or ""
            if name in self.bindings:
                value.name = self._state_name(name)
                role = kinds[value.name.partition("/")[0]]
            else:
                role = Role.HYPERPARAMETER if name in self.rates else Role.DATA if name in data else Role.LABEL
            entry = entry_of(value, role)
            if role is Role.HYPERPARAMETER:
                entry = Entry(name, role, entry.dtype, (), default=self.rates[name])
            draft.inputs.append(entry)

    def _grad(self) -> Draft:
        gradients, statistics = self.gradients, sorted(self.statistics)
        following = [self._next(name) for name in statistics]
        draft, _ = self._draft(self.model, [self.loss, *following, *gradients.values()])
        self._name_inputs(draft)
        key = draft.add_input(Entry("rng/key", Role.KEY, KEY_DTYPE, KEY_SHAPE))
        graph = draft.model.graph
        draw_dropout(draft.model, key.value)
        bind_as_exported(graph)
        RECOGNIZED_IN_MODE.run(draft.model, None)
        lower_semantic_operators(draft.model, domains=(TRAINING_DOMAIN,))
        expand_gradients(draft.model)
        results = [draft.builder.tensor(value) for value in graph.outputs]
        graph.outputs.clear()
        draft.add_output(results[0], "loss", Role.LOSS)
        for name, tensor in zip(statistics, results[1 : 1 + len(statistics)], strict=True):
            draft.add_output(tensor, f"next:stat/{name}", Role.STATISTIC, updates=f"stat/{name}")
        draft.add_output(next_key(draft.builder, key), "next:rng/key", Role.KEY, updates="rng/key")
        for name, tensor in zip(gradients, results[1 + len(statistics) :], strict=True):
            draft.add_output(tensor, f"grad:{name}", Role.GRADIENT)
        return draft

    def _predict(self) -> Draft:
        draft, _ = self._draft(self.inference, self.inference.graph.outputs)
        names = [value.name or "" for value in draft.model.graph.outputs]
        self._name_inputs(draft)
        bind_inference(draft.model.graph)
        RECOGNIZED_IN_MODE.run(draft.model, None)
        for name, value in zip(names, list(draft.model.graph.outputs), strict=True):
            draft.add_output(draft.builder.tensor(value), name, Role.OUTPUT)
        draft.model.graph.outputs.clear()
        return draft

    def _evaluate(self) -> Draft:
        """Return the loss in inference mode. The file does not say how many terms it averages: a batch counts as one."""
        draft, _ = self._draft(self.model, [self.loss])
        self._name_inputs(draft)
        graph = draft.model.graph
        bind_inference(graph)
        RECOGNIZED_IN_MODE.run(draft.model, None)
        expand_gradients(draft.model)
        loss = draft.builder.tensor(graph.outputs[0])
        graph.outputs.clear()
        draft.add_output(loss, "loss", Role.LOSS)
        draft.add_output(draft.builder.op("Identity", loss), "sum:loss", Role.METRIC)
        draft.add_output(draft.builder.scalar(1.0, loss), "count:loss", Role.METRIC)
        return draft

    def _update(self, grad: ir.Model) -> GraphOptimizer:
        slots = [name for name in self.bindings if name not in self.gradients and name not in self.statistics]
        updated = [*self.gradients, *slots]
        model = self.model.clone()
        values = Draft(model).values()
        outputs = [values[self._next(name).name or ""] for name in updated]
        graph = model.graph
        graph.outputs.clear()
        graph.outputs.extend(outputs)
        for name, gradient in self.gradients.items():
            value = values[gradient.name or ""]
            given = ir.Value(name=f"grad:{name}", type=gradient.type, shape=gradient.shape)
            graph.inputs.append(given)
            replace_uses(value, given)
        bind_as_exported(graph)
        lower_semantic_operators(model, domains=(TRAINING_DOMAIN,))
        remove_unused(model)
        readable = {*self.gradients, *slots, *self.rates} | {f"grad:{name}" for name in self.gradients}
        for value in list(graph.inputs):
            name = value.name or ""
            if not is_used(value):
                graph.inputs.remove(value)
            elif name not in readable:
                raise self._lacks(f"updates its parameters from '{name}', and not only from gradients and the optimizer's state")
            elif name in self.bindings:
                value.name = self._state_name(name)
        expand_gradients(model)
        lower_semantic_operators(model)
        self._settle_together(grad, model)
        for name, value in zip(updated, list(graph.outputs), strict=True):
            index = list(graph.outputs).index(value)
            graph.outputs[index] = Builder(graph).op("Identity", Builder(graph).tensor(value)).value
            graph.outputs[index].name = f"next:{self._state_name(name)}"
        return GraphOptimizer(graph, {name: self.start[name] for name in slots}, self.rates)

    def _settle_together(self, grad: ir.Model, update: ir.Model) -> None:
        opset = max(grad.opset_imports[""], update.opset_imports[""])
        if not (raise_opset(grad.graph, opset) and raise_opset(update.graph, opset)):
            raise self._lacks(f"has operators whose gradients mean something else in its opset {opset}")

    @cached_property
    def start(self) -> dict[str, np.ndarray]:
        """The initial values of initializers: those of the file, updated by the initialization graph."""
        arrays = {name: _array(tensor) for name, tensor in self.held.items()}
        bound = {binding.key: binding.value for binding in self.info.initialization_binding}
        if not bound:
            return arrays
        proto = onnx.helper.make_model(self.info.initialization, opset_imports=self.proto.opset_import)
        proto.ir_version = self.proto.ir_version
        model = load(proto)
        if model.graph.inputs:
            raise self._lacks("has an initialization graph with inputs, which nothing gives")
        key = Builder(model.graph, before=next(iter(model.graph), None)).constant(initial_key(0))
        bind_training(model.graph, {}, RunningVariance.ONNX, key.value, _no_step, numbered_draws(model.graph, ()))
        lower_semantic_operators(model)
        remove_unused(model)
        names = [value.name or "" for value in model.graph.outputs]
        results = dict(zip(names, ReferenceEvaluator(model_proto(model)).run(None, {}), strict=True))
        for name, value in bound.items():
            if value not in results:
                raise self._lacks(f"initializes '{name}' with '{value}', which is no output of its initialization graph")
            array = np.asarray(results[value])
            if name in self.bindings and (array.dtype, array.shape) != (arrays[name].dtype, arrays[name].shape):
                raise self._lacks(
                    f"initializes '{name}', {arrays[name].dtype} of shape {list(arrays[name].shape)}, with "
                    f"{array.dtype} of shape {list(array.shape)}"
                )
            arrays[name] = array
        return arrays

    def _lacks(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} {what}. Compile its inference graph with burnish.compile, which takes the loss and the optimizer "
            "as options"
        )


def _array(tensor: onnx.TensorProto) -> np.ndarray:
    return np.array(ir.serde.deserialize_tensor(tensor).numpy())


def _no_step() -> ir.Value:
    raise AssertionError("no layer of an initialization graph counts steps")


@dataclass(frozen=True)
class GraphOptimizer:
    """An optimizer whose update is a graph, which is copied into the graphs of a program.

    Attributes:
        graph: a graph of standard operators. Its inputs are some of ``param/*``, ``grad:*``, ``opt/*`` and the names of the
            hyperparameters; its outputs are ``next:param/*`` and ``next:opt/*`` for every parameter and slot.
        initial: state by slot and initializer -> first value.
        rates: hyperparameter -> default, None for one that every step must give.
    """

    name = "training_info"
    graph: ir.Graph
    initial: Mapping[str, np.ndarray]
    rates: Mapping[str, float | None]

    def hyperparameters(self) -> dict[str, float | None]:
        return dict(self.rates)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return {name: builder.op("Identity", builder.constant(array)) for name, array in self.initial.items()}

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        builder = inputs.builder
        tensors = {f"param/{name}": tensor for name, tensor in inputs.params.items()}
        tensors |= {f"grad:{name}": tensor for name, tensor in inputs.gradients.items()}
        tensors |= {f"opt/{name}": tensor for name, tensor in inputs.state.items()}
        copy = self.graph.clone()
        for value in copy.inputs:
            tensor = tensors.get(value.name or "") or builder.cast(
                inputs.hyperparameters[value.name or ""], value.dtype or ir.DataType.FLOAT
            )
            replace_uses(value, tensor.value)
        for value in list(copy.initializers.values()):
            assert value.const_value is not None
            constant = builder.constant(value.const_value.numpy())
            replace_uses(value, constant.value)
        names = [output.name or "" for output in self.graph.outputs]
        results = dict(zip(names, list(copy.outputs), strict=True))
        copy.outputs.clear()
        for node in list(copy):
            copy.remove(node)
            node.name = None
            for output in node.outputs:
                output.name = None
            builder.graph.append(node)
        following = {name: builder.tensor(results[f"next:param/{name}"]) for name in inputs.params}
        return following, {name: builder.tensor(results[f"next:opt/{name}"]) for name in inputs.state}

    def options(self) -> dict[str, Any]:
        """Return only the name: the formulas are in the graphs of the program."""
        return {"name": self.name}
