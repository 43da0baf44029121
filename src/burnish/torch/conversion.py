"""Conversion of weights: a PyTorch module from a program, and a session's weights in an existing module."""

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
from burnish.settings import nearest
from burnish.training import Session


def to_module(source: Program | Session, state: Mapping[str, np.ndarray] | None = None) -> fx.GraphModule:
    """Return a program's prediction as a module of PyTorch operators, including the weights.

    Weights become parameters, running statistics buffers. They are copies, named after their initializers in ``state_dict``. The
    module can be edited, exported, quantized, saved and differentiated like any ``torch.fx.GraphModule``. It always computes
    predictions, even in training mode: normalization uses running statistics, and dropout is off.

    Args:
        source: a session, which provides the state; or a program.
        state: state of a program, by name; by default ``source.initial_state()``.

    Returns:
        A module that takes the model's inputs in the order of the file, and returns its output, or a tuple if there are several.

    Raises:
        ConfigurationError: the source is neither; a weight is missing in ``state`` or has another shape; or a session is given
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


PARAMETER, STATISTIC, STEP = "param/", "stat/", "step"


def load_into(module: torch.nn.Module, session: Session) -> None:
    """Write the weights that a session trained into a module, in place: parameters, running statistics and batch counts.

    Optimizers and other holders of the module's tensors remain valid. Tensors that the program does not have, such as a parameter
    that ``forward`` does not read, stay unchanged.

    Args:
        module: the module that was compiled, or another with tensors of the same names and shapes; it keeps dtypes and devices.
        session: a session, after any number of steps.

    Raises:
        ConfigurationError: a tensor is missing in the module or has another shape; nothing is written in that case.
    """
    state = session.state()
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    written = {
        name: array
        for state_name, array in state.items()
        for kind in (PARAMETER, STATISTIC)
        if (name := state_name.removeprefix(kind)) != state_name
    }
    for name, array in written.items():
        _check(name, array, tensors)
    steps = int(state[STEP])
    with torch.no_grad():
        for name, array in written.items():
            tensors[name].copy_(_tensor(array))
        for name, (start, per_step) in session.program.options.get("counted_batches", {}).items():
            if name in tensors:
                tensors[name].fill_(start + steps * per_step)


def _check(name: str, array: np.ndarray, tensors: Mapping[str, torch.Tensor]) -> None:
    if name not in tensors:
        raise ConfigurationError(
            f"the module has no parameter or buffer '{name}', which the program trains; did you mean {nearest(name, tensors)}? "
            "Give the module that was compiled"
        )
    if tuple(tensors[name].shape) != array.shape:
        raise ConfigurationError(
            f"'{name}' has shape {list(tensors[name].shape)} in the module and {list(array.shape)} in the program: give the "
            "module that was compiled"
        )


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def place_for(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Return the submodule and the attribute name under which to register a tensor.

    A dotted name is a path through submodules, created as needed, so that ``state_dict`` has the original name. If the path is
    impossible, the tensor belongs to the module itself, with underscores instead of dots.

    Args:
        module: the module to hold the tensor.
        name: name of the tensor in its file.
    """
    *path, last = name.split(".")
    owner = module
    for part in path:
        inner = owner._modules.get(part)
        if inner is None and (not part or hasattr(owner, part)):
            return module, _free(module, name)
        if inner is None:
            inner = torch.nn.Module()
            owner.add_module(part, inner)
        owner = inner
    if not last or hasattr(owner, last):
        return module, _free(module, name)
    return owner, last


def _free(module: torch.nn.Module, name: str) -> str:
    name = name.replace(".", "_") or "_"
    while hasattr(module, name):
        name += "_"
    return name
