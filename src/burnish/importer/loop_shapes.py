"""The shapes of what loops carry: the standard's inference says nothing of them, as an iteration may change them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import bodies, same_dimension
from burnish.graph.inference import infer_outputs
from burnish.importer.shapes import infer_shapes


@dataclass(frozen=True)
class _State:
    """A state of a Loop: before the loop, at the start and at the end of an iteration, and after the loop."""

    initial: ir.Value
    entering: ir.Value
    leaving: ir.Value
    final: ir.Value

    def shared(self, shape: ir.Shape) -> ir.Shape | None:
        """What of a shape holds before the first iteration and after each; None where not even the number of axes does."""
        others = (self.initial.shape, self.leaving.shape)
        if any(other is None or len(other) != len(shape) for other in others):
            return None
        columns = zip(shape.dims, *(other.dims for other in others if other is not None), strict=True)
        return ir.Shape([dim if all(same_dimension(dim, each) for each in rest) else None for dim, *rest in columns])


def settle_loop_shapes(model: ir.Model) -> None:
    """Infer, in place, the shapes of the states of every Loop, and of what is computed from them.

    Each state is taken to keep the shape that it begins with. Where an iteration, with that, gives another extent, that extent is
    not known, and the rest is looked at again: what is left holds for any number of iterations.

    Args:
        model: its other shapes have been inferred (``infer_shapes``).
    """
    states = list(_states(model.graph))
    if not states:
        return
    told = _shapes(model)
    taken = _walked(model, states)
    # Each round takes a state more or gives an extent up, so that they come to an end.
    while True:
        # What followed from a shape that has been given up is not known any more.
        _restore(told)
        fits = _infer(model, taken)
        # What an inner loop begins with may follow from what is taken of an outer one.
        following: dict[_State, ir.Shape | None] = {
            state: state.initial.shape for state in states if state not in taken and state.initial.shape is not None
        }
        if not following:
            following = {state: None if shape is None else state.shared(shape) for state, shape in taken.items()}
        if all(state in taken and taken[state] == shape for state, shape in following.items()):
            break
        taken |= following
    if not fits:
        _restore(told)
        infer_shapes(model)


def _walked(model: ir.Model, states: list[_State]) -> dict[_State, ir.Shape | None]:
    """What states begin with if each keeps that: one walk carries it from loop to loop, where a round carries it to the next.

    A shape with an extent that the walk does not find is left out: the standard's inference of the whole graph may find it.
    """
    try:
        _walk(model.graph, model.opset_imports, {state.final: state for state in states})
    except ModelError:  # of a branch that is never taken, perhaps
        return {}
    shapes = {state: state.initial.shape for state in states}
    return {
        state: ir.Shape(shape.dims)
        for state, shape in shapes.items()
        if shape is not None and all(isinstance(dim, int) or dim.value is not None for dim in shape.dims)
    }


def _walk(graph: ir.Graph, imports: Mapping[str, int], states: Mapping[ir.Value, _State]) -> None:
    for node in graph:
        for output in node.outputs:
            state = states.get(output)
            if state is not None and state.initial.shape is not None:
                state.entering.shape = ir.Shape(state.initial.shape.dims)
                state.final.shape = ir.Shape(state.initial.shape.dims)
        inner = bodies(node)
        for body in inner:
            _walk(body, imports, states)
        if not inner and any(output.shape is None for output in node.outputs):
            infer_outputs(node, imports)


def _shapes(model: ir.Model) -> list[tuple[ir.Value, ir.Shape | None]]:
    bodies = [graph.inputs for graph in model.graph.subgraphs()]
    nodes = [node.outputs for node in model.graph.all_nodes()]
    return [(value, value.shape) for values in (*bodies, *nodes) for value in values]


def _restore(told: list[tuple[ir.Value, ir.Shape | None]]) -> None:
    for value, shape in told:
        value.shape = shape


def _states(graph: ir.Graph) -> Iterator[_State]:
    for node in graph.all_nodes():
        if node.op_type != "Loop" or node.domain != "":
            continue
        body = node.attributes["body"].as_graph()
        columns = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
        for initial, entering, leaving, final in columns:
            if initial is not None and isinstance(initial.type, ir.TensorType):
                yield _State(initial, entering, leaving, final)


def _infer(model: ir.Model, taken: dict[_State, ir.Shape | None]) -> bool:
    """Infer shapes with those that states are taken to have; return whether they fit the operators that read them.

    Where they don't, others follow all the same: what one loop changes says nothing of the rest.
    """
    known = set()
    for state, shape in taken.items():
        state.entering.shape = None if shape is None else ir.Shape(shape.dims)
        state.final.shape = None if shape is None else ir.Shape(shape.dims)
        if shape is not None and state.final.name:
            known.add(state.final.name)
    try:
        infer_shapes(model, known=known)
    except ModelError:
        infer_shapes(model, strict=False, known=known)
        return False
    return True
