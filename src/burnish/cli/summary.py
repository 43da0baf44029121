"""The content of a model and its trainable parts: the figures that ``inspect`` and ``check`` print."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx_ir as ir

from burnish import losses
from burnish.analysis.dependence import left_out_weights, reasons_together, unreached_weights
from burnish.autodiff import passes_gradient
from burnish.cli.compilation_options import options_named
from burnish.cli.console import planned_batch, planned_line, what_trains
from burnish.compiler.compile import compile
from burnish.compiler.predictions import Prediction, find_predictions
from burnish.compiler.selection import why_nothing_trains
from burnish.data import DataDescription
from burnish.errors import BurnishError, ConfigurationError
from burnish.files.folder import MANIFEST
from burnish.graph import FLOATING, SIXTEEN_BIT, describe_node, integer_weights
from burnish.graph.annotations import LEFT_OUT, PREPARES
from burnish.graph.uses import captured_by
from burnish.importer import (
    Bind,
    InitializerKind,
    classify_initializers,
    folded_layers,
    load,
    perhaps_merged,
    read_proto,
    untrained_scalars,
)
from burnish.program import Program, Role
from burnish.rewriting.recognize_group_normalization import hold_group_normalization_constants
from burnish.rewriting.recognize_probabilities import recognize_probabilities
from burnish.surgery.folded import perhaps_folded

# Bound to a mode before differentiation, so they need no rule of their own.
BOUND_TO_A_MODE = frozenset({"BatchNormalization", "Dropout"})


def summarize(path: Path, outputs: str | list[str] | None = None, batch: str | None = None, bind: Bind = None) -> dict[str, Any]:
    """Return a model's signature, initializers by kind, operators, and nodes without gradients, as JSON-compatible values.

    Args:
        path: an ONNX file.
        outputs: output or outputs that the loss reads; None if there is only one, or none is chosen.
        batch, bind: as in ``burnish.load``.

    Raises:
        BurnishError: the model cannot be read, has no such output, or its batch cannot be opened.
    """
    model = load(path, batch=batch, bind=bind)
    hold_group_normalization_constants(model)
    recognize_probabilities(model)
    kinds = classify_initializers(model)
    initializers = model.graph.initializers
    operators = Counter(_operator(node) for node in model.graph)
    weights = [initializers[name] for name, kind in kinds.items() if kind is InitializerKind.WEIGHT]
    read = _read_by_the_loss(model, outputs)
    targets = [prediction.value for prediction in read] or list(model.graph.outputs)
    left_out = {} if bind else LEFT_OUT.get(model.graph) or {}
    unreached = unreached_weights(model.graph, kinds, targets) | integer_weights(model.graph)

    buffers = [initializers[name] for name, kind in kinds.items() if kind is InitializerKind.BUFFER]
    preparing = {value.name or "": why for value in buffers if (why := PREPARES.get(value)) is not None}

    def of_kind(kind: InitializerKind) -> list[dict[str, Any]]:
        return [_described(initializers[name]) for name in kinds if kinds[name] is kind and name not in unreached]

    trained = [value for value in weights if value.name not in unreached]
    path_nodes = _between(model.graph, trained, targets)
    lacking = [node for node in path_nodes if not _differentiable(node, model.graph.opset_imports[""])]
    without = {_operator(node) for node in lacking}
    return {
        "model": str(path),
        "opset": model.graph.opset_imports[""],
        **described_data(model.metadata_props),
        "inputs": [_described(value) for value in model.graph.inputs],
        "outputs": [_described(value) for value in model.graph.outputs],
        "prediction": read[0].name if len(read) == 1 else None,
        "predictions": [_described_prediction(prediction) for prediction in read],
        "parameters": of_kind(InitializerKind.WEIGHT),
        "statistics": of_kind(InitializerKind.STATISTIC),
        "buffers": [value for value in of_kind(InitializerKind.BUFFER) if value["name"] not in preparing],
        "preparing": [{**_described(initializers[name]), "reason": why} for name, why in preparing.items()],
        "constants": of_kind(InitializerKind.CONSTANT),
        "unreached": [
            *({**_described(initializers[name]), "reason": why} for name, why in unreached.items()),
            *({**_described(left_out[name]), "reason": why} for name, why in left_out_weights(model.graph).items() if left_out),
        ],
        "rounded": sorted({value.dtype.name.lower() for value in weights if value.dtype in SIXTEEN_BIT}),
        "perhaps_merged": perhaps_merged(model),
        "folded": list(folded_layers(model)),
        "perhaps_folded": perhaps_folded(model),
        "scalars": list(untrained_scalars(model)),
        "operators": [
            {"operator": operator, "count": count, "lacks_gradient": operator in without}
            for operator, count in sorted(operators.items())
        ],
        "lacking": [describe_node(node) for node in lacking],
        "nothing_trains": None if trained else _why_nothing_trains(model, weights, unreached),
    }


def judge(path: Path, outputs: str | list[str] | None = None, batch: str | None = None, bind: Bind = None) -> dict[str, Any]:
    """Return the result of ``summarize``, with the error of ``burnish.compile`` as ``refused``, or None.

    A model that compiles lacks no gradient, as compiler passes see more than the original graph.
    """
    summary = summarize(path, outputs, batch, bind)
    refused: str | None = None
    try:
        with warnings.catch_warnings(), options_named():
            warnings.simplefilter("ignore")  # compile and check give these warnings
            compile(path, outputs=outputs, batch=batch, bind=bind)
    except BurnishError as error:
        refused = str(error)
    if refused is None:
        summary |= {"lacking": [], "nothing_trains": None}
        summary["operators"] = [{**entry, "lacks_gradient": False} for entry in summary["operators"]]
    return {**summary, "refused": refused}


def described_data(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of data in a model's metadata: ``pixels``, ``sound``, ``columns``, ``classes``, if present."""
    described = DataDescription.read(metadata)
    pixels = {} if described.preprocessing is None else {"pixels": described.preprocessing.text()}
    pixels |= {} if described.sound is None else {"sound": described.sound.text()}
    if described.table is not None:
        names = ", ".join(f"'{name}'" for name, _ in described.table.columns)
        pixels["columns"] = described.table.text() or f"read by their names: {names}"
    return {**pixels, **({} if described.classes is None else {"classes": list(described.classes)})}


def _why_nothing_trains(model: ir.Model, weights: Sequence[ir.Value], unreached: Mapping[str, str]) -> str:
    """Return the reason why no weight of a model trains; ``unreached`` has the reason for each unreached weight."""
    if not weights:
        return why_nothing_trains(model)
    return f"no gradient reaches {reasons_together({value.name or '': unreached[value.name or ''] for value in weights})}"


def _described_prediction(prediction: Prediction) -> dict[str, str | None]:
    nodes = {"stepped_over": prediction.stepped_over, "bounded_by": prediction.bounded_by}
    described = {name: None if node is None else describe_node(node) for name, node in nodes.items()}
    return {"output": prediction.output, "reads": prediction.name, **described}


def _read_by_the_loss(model: ir.Model, outputs: str | list[str] | None) -> list[Prediction]:
    """The values that a loss with its own activation reads; empty if there are several outputs and no choice."""
    names = outputs if isinstance(outputs, list) else [outputs]
    try:
        return [_read_behind_activation(model, name) for name in names]
    except ConfigurationError:
        if outputs is not None:
            raise
        return []


def _read_behind_activation(model: ir.Model, output: str | None) -> Prediction:
    for loss in map(losses.get, ("cross_entropy", "bce_with_logits")):
        (prediction,) = find_predictions(model, output, loss.readings, loss.name)
        if prediction.stepped_over is not None:
            break
    return prediction


def program_at(path: Path) -> Path | None:
    """Return the program at a path: the folder of a program or of a run, or an ONNX file with its training.

    Raises:
        ModelError: the path is neither a folder nor an ONNX file.
    """
    for folder in (path, path / "program"):
        if (folder / MANIFEST).is_file():
            return folder
    return path if len(read_proto(path)[0].training_info) else None


def summarize_program(path: Path) -> dict[str, Any]:
    """Return the options, state and graphs of a saved program, as JSON-compatible values.

    Raises:
        CheckpointError: the program is damaged.
    """
    program = Program.load(path)
    signature = program.signature["step"]
    fed = (Role.DATA, Role.LABEL, Role.HYPERPARAMETER)
    batch = planned_batch(program)
    return {
        "program": str(path),
        "options": program.options,
        "inputs": [
            {"name": entry.name, "role": entry.role.value, "dtype": entry.dtype.name.lower(), "shape": list(entry.extents)}
            for entry in signature.inputs_of(*fed)
        ],
        "trains": what_trains(program),
        **described_data(program.metadata),
        "graphs": {name: sum(1 for _ in graph.graph) for name, graph in program.graphs.items()},
        "planned_peak": {"batch": batch, **asdict(program.planned_peak(batch))},
        "planned": planned_line(program),
    }


def _described(value: ir.Value) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": value.name,
        "dtype": None if value.dtype is None else value.dtype.name.lower(),
        "shape": None,
    }
    if value.shape is not None:
        described["shape"] = [extent if isinstance(extent, int) else extent.value for extent in value.shape.dims]
    if value.const_value is not None:
        described["count"] = value.const_value.size
    return described


def _operator(node: ir.Node) -> str:
    return node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}"


def _differentiable(node: ir.Node, opset: int) -> bool:
    return (node.domain == "" and node.op_type in BOUND_TO_A_MODE) or passes_gradient(node, opset)


def _between(graph: ir.Graph, weights: Iterable[ir.Value], targets: Iterable[ir.Value]) -> list[ir.Node]:
    """Return the nodes through which a gradient flows from ``targets`` to ``weights``."""
    active = set(weights)
    for node in graph:
        if any(value in active for value in (*node.inputs, *captured_by(node)) if value is not None):
            active.update(output for output in node.outputs if output.dtype is None or output.dtype in FLOATING)
    needed = set(targets)
    path = []
    for node in reversed(list(graph)):
        if any(output in needed and output in active for output in node.outputs):
            needed.update(value for value in (*node.inputs, *captured_by(node)) if value is not None)
            path.append(node)
    return path[::-1]
