"""What an exported module is: its graph, and what ONNX does not keep of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from burnish.importer.pytorch.extents import Extents


@dataclass(frozen=True)
class Structure:
    """How values of the user's, in tuples, dictionaries and dataclasses, are inputs or outputs of a graph.

    Attributes:
        spec: the structure, as ``torch.utils._pytree`` describes it; of inputs that of ``(args, kwargs)``.
        names: of each leaf the name in the graph; None where the leaf is no tensor.
        constants: of each leaf what it was at the export, where it is no tensor; else None.
        kinds: what leaves are that are no real tensors in PyTorch, by their names in the graph: ``complex``, where the graph has
            pairs of real numbers along a last axis, or ``number``.
    """

    spec: pytree.TreeSpec
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """Return the user's structure with these values, by their names in the graph."""
        if self.kinds:
            values = {name: _as_returned(value, self.kinds.get(name)) for name, value in values.items()}
        leaves = (constant if name is None else values[name] for name, constant in zip(self.names, self.constants, strict=True))
        return pytree.tree_unflatten(list(leaves), self.spec)

    def flatten(self, value: Any) -> dict[str, Any]:
        """Return the tensors of a value of this structure, by their names in the graph.

        Raises:
            ValueError: the value has another structure.
        """
        leaves, spec = pytree.tree_flatten(value)
        if spec != self.spec:
            raise ValueError(f"the structure of the values is {spec}, and that of the export was {self.spec}")
        return {name: leaf for name, leaf in zip(self.names, leaves, strict=True) if name is not None}


def _as_returned(value: torch.Tensor, kind: str | None) -> Any:
    if kind == "complex":
        return torch.view_as_complex(value.contiguous())
    return value.item() if kind == "number" else value


@dataclass(frozen=True)
class ExportedModule:
    """A module as a graph, and what ONNX does not keep of it.

    Attributes:
        model: the graph of training, not yet bound to a mode where normalization and dropout are all that differs. Initializers
            have their names in ``state_dict``; weights are copies.
        inference: the graph of ``eval()``, where that differs in more than normalization and dropout; else None.
        inputs: how ``(args, kwargs)`` are the inputs of the graph.
        outputs: how the outputs of the graph are what ``forward`` returns.
        outputs_in_evaluation: the same of ``eval()``, which may return something else.
        constants: the tensors that ``forward`` reads from elsewhere, whose values are in the graphs.
        extents: what the trace of training takes for granted of the extents of inputs.
        extents_in_evaluation: the same of ``eval()``.
        failed: why there is no graph of training (True) or evaluation (False), where only the other was asked for.
        parameters: of every parameter whether it trains (``requires_grad``), by the first of its names.
        buffers: of every buffer whether it is in ``state_dict``.
        shared: the other names of parameters and buffers that have several, by the name that the model has.
        moving: the buffers that ``forward`` changes in training or evaluation, other than running statistics and counts. They are
            inputs of the models, after those of ``forward``, where these read or write them.
        written: those that it changes in training, with the names of the outputs of ``model`` that are their next values, which
            come after what ``forward`` returns.
        written_in_evaluation: the same of ``eval()``, in ``inference`` where there is one.
        written_inputs: the inputs that ``forward`` writes over in training, with the names of the outputs that are what it leaves
            there: after what it returns, before the buffers. Such outputs are there where they were asked for.
        written_inputs_in_evaluation: the same of ``eval()``.
        norm_policies: the policy of each batch normalization, by the name of its node: ``frozen`` where the module has the layer
            in evaluation mode.
        held_rows: rows of embeddings that do not train, ``padding_idx``.
        counted_batches: the counts of batches that normalization layers keep (``num_batches_tracked``), as they stand.
        batches_per_call: how many batches a call adds to each of them: a layer that runs twice counts two.
        attributes: those of ``buffers`` that are attributes of the module, which its hooks compute before each call.
        running_variance: which variance running statistics hold.
    """

    model: ir.Model
    inference: ir.Model | None
    inputs: Structure
    outputs: Structure
    outputs_in_evaluation: Structure
    parameters: Mapping[str, bool]
    buffers: Mapping[str, bool]
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    moving: Sequence[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    written_in_evaluation: Mapping[str, str] = field(default_factory=dict)
    written_inputs: Mapping[str, str] = field(default_factory=dict)
    written_inputs_in_evaluation: Mapping[str, str] = field(default_factory=dict)
    norm_policies: Mapping[str, str] = field(default_factory=dict)
    held_rows: Mapping[str, list[int]] = field(default_factory=dict)
    counted_batches: Mapping[str, int] = field(default_factory=dict)
    batches_per_call: Mapping[str, int] = field(default_factory=dict)
    attributes: Sequence[str] = ()
    failed: Mapping[bool, Exception] = field(default_factory=dict)
    constants: Sequence[torch.Tensor] = ()
    extents: Extents = field(default_factory=Extents)
    extents_in_evaluation: Extents = field(default_factory=Extents)
    running_variance: str = "pytorch"
