"""Reading of models: converts files, bytes, protos and ``onnx_ir`` models into a canonical ``onnx_ir.Model``.

A canonical model is checked and has one standard opset of at least 18. It has no functions, no branches decided by shapes and no
loops over embedding bags. Batched matrix transpositions are single nodes. Weights are initializers instead of graph inputs, and
parameters merged by an exporter are separate again. Every node and value has a name and every value a dtype; shapes are inferred
with a symbolic batch. Training or inference mode, losses and gradients come later.
"""

from burnish.importer.bound_inputs import Bind, described_bindings
from burnish.importer.export_notes import folded_layers, lost_parameters, shared_statistics
from burnish.importer.file_tensors import FileTensor
from burnish.importer.limits import check_constant_sizes
from burnish.importer.load import Source, exported_module, load, with_plain_tensors
from burnish.importer.nodes import refuse_gradients
from burnish.importer.reading import SOURCE, SourceModel, read_proto
from burnish.importer.tensors import external_tensors, forget_data_locations, load_external_data, own_tensors
from burnish.importer.weights import (
    InitializerKind,
    classify_initializers,
    computed_ahead,
    of_unknown_origin,
    perhaps_copied,
    perhaps_learned_scalars,
    perhaps_merged,
    perhaps_shared,
    reached_by_gradients,
    untrained_scalars,
)

__all__ = [
    "SOURCE",
    "Bind",
    "FileTensor",
    "InitializerKind",
    "Source",
    "SourceModel",
    "check_constant_sizes",
    "classify_initializers",
    "computed_ahead",
    "described_bindings",
    "exported_module",
    "external_tensors",
    "folded_layers",
    "forget_data_locations",
    "load",
    "load_external_data",
    "lost_parameters",
    "of_unknown_origin",
    "own_tensors",
    "perhaps_copied",
    "perhaps_learned_scalars",
    "perhaps_merged",
    "perhaps_shared",
    "reached_by_gradients",
    "read_proto",
    "refuse_gradients",
    "shared_statistics",
    "untrained_scalars",
    "with_plain_tensors",
]
