"""``burnish.load``: from a source, a file or a PyTorch module, to the canonical model. PyTorch is imported for a module alone."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

import onnx
import onnx_ir as ir

from burnish.errors import BurnishError, ConfigurationError, ModelError, UnsupportedOperatorError
from burnish.graph import garbage_kept
from burnish.importer.bound_inputs import Bind
from burnish.importer.canonical import FOLDED, Import, canonicalize
from burnish.importer.limits import check_constant_sizes
from burnish.importer.reading import read_model
from burnish.importer.sequences import hold_optional_inputs
from burnish.sample_axes import AskedAxes
from burnish.untrusted_files import read_in_time

if TYPE_CHECKING:
    import torch

    from burnish.importer.pytorch import ExportedModule


def is_module(source: object) -> bool:
    """Whether this is a ``torch.nn.Module``; nothing is imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def exported_module(
    source: object, example_inputs: Any, dynamic_shapes: Any, verify: bool = True, sample_axis: AskedAxes = None
) -> ExportedModule | None:
    """Return the export of a module, and None for any other source.

    Args:
        source: what is to be loaded.
        example_inputs, dynamic_shapes, verify: as ``burnish.load`` takes them.
        sample_axis: the axes that are open where ``dynamic_shapes`` does not say it.

    Raises:
        ConfigurationError: a module without examples, or examples without a module.
        UnsupportedOperatorError: the module cannot be exported, or its graph computes something else.
    """
    if not is_module(source):
        if example_inputs is not None or dynamic_shapes is not None:
            raise ConfigurationError(
                "example_inputs and dynamic_shapes are for a torch.nn.Module: leave them out, a model of ONNX has its inputs"
            )
        return None
    if example_inputs is None:
        raise ConfigurationError(
            f"example_inputs: what does {type(source).__name__} take? Give inputs to call it with once, "
            "example_inputs=(torch.zeros(2, 3),), or by name, example_inputs={'x': torch.zeros(2, 3)}"
        )
    from burnish.importer.pytorch import export_module, open_along

    args, kwargs = _arguments(example_inputs)
    if dynamic_shapes is None and sample_axis is not None:
        dynamic_shapes = open_along(source, args, kwargs, sample_axis)  # type: ignore[arg-type]
    exported = export_module(source, args, kwargs, dynamic_shapes)  # type: ignore[arg-type]
    if exported.moving:
        raise UnsupportedOperatorError(
            f"forward changes the buffer '{exported.moving[0]}', and a training step moves no buffers but the running statistics "
            "of batch normalization. Train the module with burnish.torch.wrap, which writes buffers back, or compute the buffer "
            "outside of the module and pass it as an input"
        )
    if verify:
        # It runs the graph, and what runs graphs stands above what imports them.
        verification = importlib.import_module("burnish.torch.verification")
        verification.verify_export(source, exported, args, kwargs, dynamic_shapes)
    return exported


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments and those by name: a tuple or list is the first, a dictionary the second."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


BATCHES = (None, "open")

Source = Union[str, os.PathLike[str], bytes, onnx.ModelProto, ir.Model, "torch.nn.Module"]


@garbage_kept()
def load(
    source: Source,
    *,
    batch: str | None = None,
    sample_axis: AskedAxes = None,
    bind: Bind = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    verify: bool = True,
) -> ir.Model:
    """Return the canonical form of a model.

    Args:
        source: the path of an ONNX file, its bytes, a ``ModelProto``, an ``onnx_ir.Model``, or a ``torch.nn.Module`` in training
            mode, with ``example_inputs``. Objects are left as they are.
            Large tensors of a file with external data stay there, and are read when they are asked for; large weights in the file
            itself are read again after a session took them over (``Program.release_weights``). These files stay open: they may be
            moved, replaced or removed, and are refused once they have been written to in place.
        batch: None: the extents of the inputs stay as the model has them. ``open``: a model that was exported at batch 1 takes
            batches of any size. Each input holds samples along its first axis of extent 1, or along its second where a recurrent
            layer begins with it; one without such an axis is the same for all samples. Vectors of a model that takes nothing else
            get an axis for samples in front. What the model computes of a sample does
            not depend on the others beside it, except that batch normalization in training takes statistics of all.
        sample_axis: along which axis of the inputs samples stand, as ``burnish.compile`` takes it: what is said here is noted
            with the inputs, and opened there.
        bind: {input: value}: inputs that are fixed to a value, a number or an array that broadcasts to the input's shape, and
            that the model then no longer has: ``{"sr": 16000, "state": 0}``. What depends on them alone is computed, and an If
            that they decide becomes its branch. Where such an input has an open dimension, it follows the other inputs at run
            time. An open dimension may be fixed too, to an extent: ``{"sequence": 576}``.

        example_inputs: of a module, what it is called with: a tuple of arguments, or a dictionary of those that are given by
            name. What is no tensor in them is fixed.
        dynamic_shapes: of a module, which axes are open, as ``torch.export.export`` takes it. None: those that ``sample_axis``
            names, else the first, of all inputs that have as many samples there as the first input.
        verify: of a module: run it beside its graph on the PyTorch engine, on the examples and on others, in training and
            evaluation, and compare what both return, and the gradients. False skips that.

    Raises:
        ConfigurationError: ``batch`` is neither, or no input has an axis of extent 1; ``bind`` does not fit the inputs; or a
            module comes without examples.
        ModelError: the source is missing, corrupt, not valid ONNX, of an opset before 7 or newer than the installed ``onnx``
            knows, or its external data is missing, too short or outside the model's folder.
        UnsupportedOperatorError: an operator in an old form that has no equivalent today (batch normalization with
            ``spatial=0``, Scan of opset 8); or, where the batch is to be opened, one that cannot take several samples; or a
            module that cannot be exported, or computes something else than its graph: its line and its part are named.
    """
    module = exported_module(source, example_inputs, dynamic_shapes, verify, sample_axis)
    if module is not None:
        source = module.model
    if batch not in BATCHES:
        raise ConfigurationError(f"batch must be None or 'open', not {batch!r}")
    name, size = _file_of(source)
    model = read_in_time(name, size, ModelError, read_model, source)
    weights = (value.const_value for value in model.graph.initializers.values())
    size = max(size, sum(tensor.nbytes for tensor in weights if tensor is not None and tensor.dtype != ir.DataType.STRING))
    try:
        read_in_time(name, size, ModelError, canonicalize, model, Import({} if bind is None else bind, sample_axis, batch))
    except BurnishError:
        raise
    except Exception as error:
        # A file whose bits have changed can pass every check of the standard and still be no graph.
        raise ModelError(
            f"the model passes the checks of ONNX and cannot be read all the same ({type(error).__name__}: {error}). "
            "Export the model again; if that does not help, this is a defect of burnish worth reporting"
        ) from error
    return model


def _file_of(source: Source) -> tuple[str, int]:
    """Return what the file of a model is called, and its bytes; 0 of an object, which is copied."""
    if isinstance(source, bytes | bytearray | memoryview):
        return "the bytes", len(source)
    if not isinstance(source, str | os.PathLike):
        return "the model", 0
    try:
        return f"'{os.fspath(source)}'", os.stat(source).st_size
    except (OSError, ValueError):  # which the reader names
        return f"'{os.fspath(source)}'", 0


def with_plain_tensors(model: ir.Model) -> ir.Model:
    """Make what a batch holds of a canonical model tensors, in place: optional inputs, which are there, and optional outputs.

    Raises:
        ConfigurationError: an input is a sequence, or an optional one.
        ModelError: a constant would take more memory than reading the model may.
    """
    check_constant_sizes(model)
    ends = (*model.graph.inputs, *model.graph.outputs)
    if any(isinstance(value.type, ir.OptionalType) for value in ends) and hold_optional_inputs(model):
        FOLDED.run(model, Import())
    for value in model.graph.inputs:
        if isinstance(value.type, ir.SequenceType | ir.OptionalType):
            raise ConfigurationError(
                f"the model's input '{value.name}' is a sequence of tensors, and a batch holds tensors: export the model with a "
                "tensor in its place, or with an input for each element"
            )
    return model
