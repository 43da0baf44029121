"""Link drafts into a program: add the graphs that update the state, and record the options.

A program with a memory limit is linked repeatedly, each time with more recomputation in the backward pass, until a step that is
run fits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from burnish.analysis.dependence import reasons_together
from burnish.compiler.differentiate import OPTIONS, Drafts, draft_evaluation, draft_inference, folded
from burnish.compiler.draft import finish
from burnish.compiler.loss_and_metrics import LOSS
from burnish.compiler.lowered_graphs import LoweredGraphs, wrapped
from burnish.compiler.memory_limit import program_within, read_limit
from burnish.compiler.options import STEPS_PER_EPOCH, CompileOptions
from burnish.compiler.prepare import PreparedModel
from burnish.compiler.sparse_tables import warning_of
from burnish.compiler.update import WEIGHS_ALIKE, warn_of_accumulation, warn_of_no_effect
from burnish.errors import DenseGradientWarning, UntrainedWeightsWarning
from burnish.graph.constants import is_quantized
from burnish.importer import described_bindings
from burnish.program.program import Inference, Program
from burnish.program.signature import GraphSignature
from burnish.program.state import ROUNDED
from burnish.quantization.graph import freezes_by_epochs
from burnish.rewriting import precision, recompute_request
from burnish.rewriting.compute_integers import compute_integers
from burnish.rewriting.recompute_request import Recompute
from burnish.targets import TARGETS, target_of, target_to_dict
from burnish.warn import warn


def link(drafts: Drafts, options: CompileOptions) -> Program:
    """Make a program from the drafts of its graphs; warn about options that have no effect."""
    linked = partial(_linked, drafts, options)
    if options.memory is None:
        program = linked(recompute_request.get(options.recompute))
    else:
        program = program_within(read_limit(options.memory), linked)
    _warn_of_result(drafts, program)
    return program


def _linked(drafts: Drafts, options: CompileOptions, recompute: Recompute | None) -> Program:
    model, kept = drafts.model, program_options(drafts, options, recompute)
    optimizer = wrapped(model.optimizer, kept)
    graphs = LoweredGraphs.linked(drafts.graphs, drafts.signatures, optimizer, target_of(options.target), kept)
    source = None if model.source is None else model.source.beside(model.weights.as_they_came())
    return Program(graphs, model.weights, source)


def program_options(drafts: Drafts, options: CompileOptions, recompute: Recompute | None = None) -> dict[str, Any]:
    """Return the options that a program records, as JSON-compatible values."""
    model, normalization, target = drafts.model, drafts.model.normalization, target_of(options.target)
    mixed, source = precision.get(options.precision), model.trained.model.graph
    steps_per_epoch = {STEPS_PER_EPOCH: options.steps_per_epoch}
    return {
        "loss": model.loss.options(),
        **({} if drafts.coefficients == {LOSS: 1.0} else {"loss_terms": drafts.coefficients}),
        "optimizer": model.optimizer.options(),
        "metrics": [metric.name for metric in model.metrics],
        "precision": precision.FULL if mixed is None else mixed.options(),
        "predictions": [prediction.options() for prediction in model.trained.predictions],
        "trainable": list(model.state.trainable),
        **({"preparing": dict(model.state.preparing)} if model.state.preparing else {}),
        **({"hold_rows": model.held_rows} if model.held_rows else {}),
        **({"sparse": model.sparse.option} if model.sparse.option else {}),
        **({WEIGHS_ALIKE: drafts.weighs_alike} if drafts.weighs_alike else {}),
        **({} if model.backbone is None else {"cached_features": list(model.backbone.features)}),
        **({"batch": options.batch} if options.batch else {}),
        **({"bind": described_bindings(options.bind)} if options.bind else {}),
        **(steps_per_epoch if is_quantized(source) and freezes_by_epochs(source) else {}),
        "norm": normalization.option,
        "norm_layers": {layer: str(policy) for layer, policy in zip(normalization.layers, normalization.policies, strict=True)},
        **({"auto_frozen_layers": list(normalization.auto_frozen)} if normalization.auto_frozen else {}),
        **({ROUNDED: model.rounded} if model.rounded else {}),
        **({"departures": list(model.departures)} if model.departures else {}),
        **({"counted_batches": model.counted_batches} if model.counted_batches else {}),
        "running_variance": normalization.running_variance.value,
        "recompute": None if recompute is None else recompute.options(),
        "target": target.name if TARGETS.get(target.name) == target else target_to_dict(target),
    }


def _warn_of_result(drafts: Drafts, program: Program) -> None:
    optimizer = drafts.model.optimizer
    warn_of_accumulation(optimizer, drafts.weighs_alike)
    warn_of_no_effect(optimizer, program.signature["grad"], (program.predict, program.evaluate))
    if drafts.dense:
        warn(DenseGradientWarning(warning_of(drafts.dense)))
    weights = {**drafts.untrained, **drafts.model.unselected}
    if not weights:
        return
    one, several = "weight stays as it is: no gradient reaches it", "weights stay as they are: no gradient reaches them"
    stay = one if len(weights) == 1 else several
    problem = (
        f"{len(weights)} {stay}. {reasons_together(weights)}. Where that is meant, select only what is to train; else let "
        "the loss read another output, or export the model without what stands in the way. `burnish inspect` lists them all"
    )
    warn(UntrainedWeightsWarning(problem, OPTIONS, weights))


def link_inference(model: PreparedModel, options: CompileOptions, *, evaluates: bool) -> Inference:
    """Make the graphs of a model that predicts, and ``evaluate`` if ``evaluates``; its weights stay constants."""
    target = target_of(options.target)
    coefficients: dict[str, float] = {}
    drafts = {"predict": draft_inference(model.trained.in_file, model)}
    if evaluates:
        drafts["evaluate"], coefficients = draft_evaluation(folded(model.trained.model), model, None)
    graphs: dict[str, ir.Model] = {}
    signatures: dict[str, GraphSignature] = {}
    for name, draft in drafts.items():
        graphs[name], signatures[name] = finish(draft, name, target)
        compute_integers(graphs[name], target.float64)
    said = program_options(Drafts(model, graphs, signatures, coefficients, {}, {}, ""), options) if evaluates else {}
    noted = {name: value for name, value in said.items() if name in ("loss", "loss_terms", "metrics", "predictions")}
    return Inference(graphs["predict"], graphs.get("evaluate"), signatures, noted, dict(model.trained.model.metadata_props))
