"""A graph compiled ahead of time by AOTInductor: one ``.pt2`` file that libtorch runs, in C++ or Python.

The package takes the graph's inputs in the signature's order, contiguous, and returns its outputs in that order, also contiguous,
so that the next state can be passed back unchanged. Its metadata describe them:

    burnish.graph      the name of the graph
    burnish.signature  the graph's signature in JSON, as ``Signature.to_dict`` has it
    burnish.inputs     the names of the inputs, one per line
    burnish.outputs    the names of the outputs, one per line
    burnish.updates    for each output, one per line, the place of the input whose next value it is, or -1

It contains none of the engine's own kernels: all code is generated, or is an operator of libtorch.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from burnish.engines.torch.bindings.precision import narrow_dtypes, widened
from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.fusion import fuse
from burnish.engines.torch.runtime.devices import device_of
from burnish.engines.torch.runtime.inductor import check_compiler
from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.translation import translate
from burnish.errors import CheckpointError, EngineError
from burnish.program.signature import GraphSignature, Signature
from burnish.rewriting.recompute import wait_by_selection

if TYPE_CHECKING:
    from burnish.program import Program


def package(program: Program, path: Path, graph: str, extents: Mapping[str, int], device: str) -> None:
    """Write a package; see ``Program.package``.

    Raises:
        EngineError: there is no compiler or no such device, or the graph cannot be compiled.
        CheckpointError: the file cannot be written.
    """
    place = device_of(device, "A package cannot be made for the device")
    check_compiler(place, "program.package")
    signature = program.signature[graph]
    module = _with_signed_constants(_contiguous(_translated(program, graph, place)))
    inputs, dynamic = _examples(signature, extents, place)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target, and under its final name, which the archive contains.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".package-") as folder:
            written = Path(folder) / path.name
            _compile(module, inputs, dynamic, written, _metadata(signature, graph), graph)
            os.replace(written, path)
    except OSError as error:
        raise CheckpointError(f"The package '{path}' cannot be written: {error.strerror or error}") from error


def _translated(program: Program, graph: str, device: torch.device) -> fx.GraphModule:
    graphs = program.graphs.lowered_to(TorchEngine(compile="none").target)
    model = graphs.copy_of(graph)
    wait_by_selection(model)
    if graph not in ("init", "apply"):
        return translate(fuse(model, kernels=False, narrow=narrow_dtypes(device)), device)
    return translate(widened(model, device), device)


def _contiguous(module: fx.GraphModule) -> fx.GraphModule:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    with module.graph.inserting_before(output):
        output.args = (tuple(module.graph.call_method("contiguous", (node,)) for node in output.args[0]),)
    module.recompile()
    return module


def _with_signed_constants(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module with its unsigned constants as int64, cast for their readers.

    Inductor writes small constants into its code as a selection between their elements, which it does not support for unsigned
    types.
    """
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        constant = module.get_buffer(node.target)
        if constant.dtype not in (torch.uint16, torch.uint32):
            continue
        module.register_buffer(node.target, constant.to(torch.int64))
        with module.graph.inserting_after(node):
            cast = module.graph.call_method("to", (node, constant.dtype))
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
    module.recompile()
    return module


def _examples(
    signature: GraphSignature, extents: Mapping[str, int], device: torch.device
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any], ...]]:
    """Return inputs of valid extents for the graph, and their open dimensions."""
    sizes = dict(extents)
    tensors, dynamic = [], []
    for entry in signature.inputs:
        shape = []
        for name in entry.extents:
            if isinstance(name, int):
                shape.append(name)
                continue
            rules = [rule for rule in signature.extents if rule.dimension == name]
            multiple = math.lcm(*(rule.multiple for rule in rules))
            least = max([4, *(rule.minimum for rule in rules)])
            shape.append(sizes.setdefault(name or "", -(-least // multiple) * multiple) if name else 4)
        tensors.append(torch.zeros(shape, dtype=torch_dtype(entry.dtype), device=device))
        open_axes = [axis for axis, name in enumerate(entry.extents) if not isinstance(name, int) and name not in extents]
        dynamic.append({axis: torch.export.Dim.DYNAMIC for axis in open_axes})
    return tuple(tensors), tuple(dynamic)


def _metadata(signature: GraphSignature, graph: str) -> dict[str, str]:
    places = {entry.name: place for place, entry in enumerate(signature.inputs)}
    updates = [-1 if entry.updates is None else places.get(entry.updates, -1) for entry in signature.outputs]
    return {
        "burnish.graph": graph,
        "burnish.signature": json.dumps(Signature({graph: signature}).to_dict()[graph]),
        "burnish.inputs": "\n".join(entry.name for entry in signature.inputs),
        "burnish.outputs": "\n".join(entry.name for entry in signature.outputs),
        "burnish.updates": "\n".join(map(str, updates)),
    }


def _compile(
    module: fx.GraphModule,
    inputs: tuple[torch.Tensor, ...],
    dynamic: tuple[dict[int, Any], ...],
    path: Path,
    metadata: dict[str, str],
    graph: str,
) -> None:
    try:
        with torch.no_grad():
            exported = torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs={"aot_inductor.metadata": metadata}
            )
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        raise EngineError(
            f"PyTorch {torch.__version__} cannot package the {graph} graph: {reason}. Nothing was written. If an open "
            'dimension is at fault, give it an extent, as in program.package(path, extents={"batch": 16})'
        ) from error
