"""A program's predictions as a plain module of PyTorch, which nothing of burnish computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import fx

from burnish.engines.torch.translate.dtypes import tensor_of
from burnish.engines.torch.translate.translation import translate
from burnish.errors import ConfigurationError
from burnish.program.program import Program
from burnish.program.signature import Entry, Role
from burnish.torch.attributes import place_for
from burnish.training import Session


def to_module(source: Program | Session, state: Mapping[str, np.ndarray] | None = None) -> fx.GraphModule:
    """Return what a program predicts as a module of PyTorch's own operators, with the weights.

    Weights are parameters and running statistics buffers, copies, under the names of their initializers in ``state_dict``. The
    module can be edited, exported, quantized and saved as any ``torch.fx.GraphModule``, and PyTorch differentiates it; it
    computes predictions, in training mode too: normalization reads its running statistics, and nothing is dropped.

    Args:
        source: a session, whose state the module gets; or a program.
        state: of a program, by state name; by default ``source.initial_state()``.

    Returns:
        A module that takes the model's inputs in the order of the file, and returns its output, or a tuple of them where it has
        several.

    Raises:
        ConfigurationError: the source is neither; a weight is missing in ``state`` or has another shape, or a session comes
            with a state.
        EngineError: PyTorch lacks an operator or an element type of the model.
    """
    if not isinstance(source, Program | Session):
        raise ConfigurationError(
            f"source: give a session or a program, not {type(source).__name__}; burnish.torch.Layer takes an ONNX file"
        )
    program = source.program if isinstance(source, Session) else source
    if state is None:
        state = source.state() if isinstance(source, Session) else source.initial_state()
    elif isinstance(source, Session):
        raise ConfigurationError("state: a session has a state of its own; give it the state with session.load_state")
    module = translate(program.predict, torch.device("cpu"))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, entry in zip(placeholders, program.signature["predict"].inputs, strict=True):
        if entry.is_state:
            _hold(module, node, entry, _checked(entry, state))
    result = next(iter(reversed(module.graph.nodes)))
    if len(result.args[0]) == 1:
        result.args = (result.args[0][0],)
    module.recompile()
    return module


def _hold(module: fx.GraphModule, node: fx.Node, entry: Entry, array: np.ndarray) -> None:
    """Let a module hold a tensor that its graph takes as an input, in place."""
    tensor = tensor_of(array, entry.dtype).clone()
    owner, attribute = place_for(module, entry.name.partition("/")[2])
    if entry.role is Role.PARAMETER:
        owner.register_parameter(attribute, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    else:
        owner.register_buffer(attribute, tensor)
    path = next(f"{prefix}.{attribute}" if prefix else attribute for prefix, inner in module.named_modules() if inner is owner)
    with module.graph.inserting_before(node):
        held = module.graph.get_attr(path)
    node.replace_all_uses_with(held)
    module.graph.erase_node(node)


def _checked(entry: Entry, state: Mapping[str, np.ndarray]) -> np.ndarray:
    if entry.name not in state:
        raise ConfigurationError(f"state: '{entry.name}' is missing; give all of what session.state() returns")
    array = np.asarray(state[entry.name])
    if array.shape != entry.extents:
        raise ConfigurationError(
            f"state: '{entry.name}' has shape {list(array.shape)}, and the program has {list(entry.extents)}: give a state of "
            "this program"
        )
    return array
