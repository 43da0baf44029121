"""``burnish.load``: reads a file, bytes, a proto or a PyTorch module as a canonical model.

PyTorch is imported only for modules.
"""

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
    """True for a ``torch.nn.Module``; imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def exported_module(
    source: object, example_inputs: Any, dynamic_shapes: Any, verify: bool = True, sample_axis: AskedAxes = None
) -> ExportedModule | None:
    """Return the export of a module; None for any other source.

    Args:
        source: the source to load.
        example_inputs, dynamic_shapes, verify: as for ``burnish.load``.
        sample_axis: the axes to open if ``dynamic_shapes`` is None.

    Raises:
        ConfigurationError: a module without examples, or examples without a module.
        UnsupportedOperatorError: the module cannot be exported, or its graph computes something different.
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
        # It runs the graph, so it belongs to a layer above the importer and cannot be imported statically.
        verification = importlib.import_module("burnish.torch.verification")
        verification.verify_export(source, exported, args, kwargs, dynamic_shapes)
    return exported


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments (from a tuple or list) and keyword arguments (from a dictionary)."""
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
            mode, with ``example_inputs``. Objects are not changed. Large external tensors are read on demand. Large weights
            inside the file are read again after a session took them over (``Program.release_weights``). The files stay open: they
            may be moved, replaced or removed, but are refused after being written to in place.
        batch: None to keep the extents of the inputs. ``open`` to make a model exported at batch 1 accept batches of any size:
            each input has samples along its first axis of extent 1, or along its second if a recurrent layer reads it; inputs
            without such an axis are the same for all samples. If all inputs are vectors, they get a leading sample axis. Results
            of a sample do not depend on other samples, except through batch normalization in training.
        sample_axis: the sample axis of the inputs, as for ``burnish.compile``; it is recorded with the inputs and opened.
        bind: {input: value} to fix inputs to a number or an array that broadcasts to the input's shape, and remove them: ``{"sr":
            16000, "state": 0}``. Everything that depends only on them is computed, and an If that they decide becomes its branch.
            Open dimensions of such an input follow the other inputs at run time. An open dimension may also be fixed to an
            extent: ``{"sequence": 576}``.

        example_inputs: for a module: example arguments, as a tuple, or a dictionary of keyword arguments. Values other than
            tensors are fixed.
        dynamic_shapes: for a module: its open axes, as for ``torch.export.export``. None opens those of ``sample_axis``, else the
            first axis of all inputs with as many samples there as the first input.
        verify: for a module: compare it with its graph on the PyTorch engine, for the examples and other inputs, in training and
            evaluation, including gradients. False skips this.

    Raises:
        ConfigurationError: ``batch`` is invalid, or no input has an axis of extent 1; ``bind`` does not fit the inputs; or a
            module comes without examples.
        ModelError: the source is missing, corrupt, not valid ONNX, has an opset below 7 or above that of the installed ``onnx``,
            or its external data is missing, too short or outside the model's folder.
        UnsupportedOperatorError: an old operator has no equivalent today (batch normalization with ``spatial=0``, Scan of opset
            8), or cannot take several samples when the batch is opened; or a module cannot be exported or differs from its graph.
            For modules the message names the line and the part.
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
        # A file with flipped bits can pass all checks of the standard and still not be a graph.
        raise ModelError(
            f"the model passes the checks of ONNX and cannot be read all the same ({type(error).__name__}: {error}). "
            "Export the model again; if that does not help, this is a defect of burnish worth reporting"
        ) from error
    return model


def _file_of(source: Source) -> tuple[str, int]:
    if isinstance(source, bytes | bytearray | memoryview):
        return "the bytes", len(source)
    if not isinstance(source, str | os.PathLike):
        return "the model", 0
    try:
        return f"'{os.fspath(source)}'", os.stat(source).st_size
    except (OSError, ValueError):  # reported by the reader
        return f"'{os.fspath(source)}'", 0


def with_plain_tensors(model: ir.Model) -> ir.Model:
    """Convert a canonical model's optional inputs, which are then required, and its optional outputs to tensors, in place.

    Raises:
        ConfigurationError: an input is a sequence or an optional sequence.
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
