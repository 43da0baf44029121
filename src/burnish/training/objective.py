"""Warnings from numbers: an output of probabilities, data on another scale, rows from a table's end, copied labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.errors import EngineError, ObjectiveWarning
from burnish.graph import SIXTEEN_BIT, attribute_value, describe_node
from burnish.graph.uses import producer_of
from burnish.program import Program, Role
from burnish.program.layout import first_samples, sample_extent
from burnish.warn import warn

MOMENTUM = 0.9
"""The default momentum of BatchNormalization."""
OTHER_SCALE = 100.0
"""Factor of the variance: ten times the deviation. Pixels of 0 to 255 have 3,000 times that of standardized ones."""


class FirstStep:
    """The first step of a session, which warns of numbers that look like mistakes.

    Args:
        program: the trained program.
        threads: number of threads for the file.

    Attributes:
        file: file that the program was compiled from, to compare predictions; None to skip this.
    """

    def __init__(self, program: Program, threads: int | None = None):
        self._program, self._threads = program, threads
        self.file: Path | None = None

    def run(self, runner: ProgramRunner, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run the step on a checked batch and hyperparameters; ``runner`` is the program on an engine."""
        program = self._program
        if self.file is not None and all(array.size for array in inputs.values()):
            with suppress(EngineError):  # the step fails too, with an error that names its node
                warn_of_departure(self.file, program, runner.predict, inputs, self._threads)
        warn_of_probabilities(program, runner, inputs)
        warn_of_negative_rows(program, inputs)
        warn_of_copied_labels(program, inputs)
        layers = list(_first_normalizations(program))
        before = [runner.state_entry(variance) for _, variance, _ in layers]
        outputs = runner.step(inputs)
        for (node, variance, momentum), running in zip(layers, before, strict=True):
            times = _times_the_variance(running, runner.state_entry(variance), momentum)
            if times is not None and not 1 / OTHER_SCALE <= times <= OTHER_SCALE:
                said = f"{times:,.0f} times" if times > 1 else f"a {1 / times:,.0f}th of"
                example = "0 to 255 in place of 0 to 1" if times > 1 else "0 to 1 in place of 0 to 255"
                warn(
                    ObjectiveWarning(
                        f"{describe_node(node)} meets values of {said} the variance that it met when the model was trained: the "
                        f"data are perhaps on another scale, such as pixels of {example}: give them as the model was made to "
                        "read them"
                    )
                )
                break
        return outputs


def check_inputs(program: Program, runner: ProgramRunner, inputs: Mapping[str, np.ndarray]) -> None:
    """Check the first batch of a program with cached features, as its steps do not see the model's inputs.

    Args:
        program: the trained program.
        runner: the program on an engine.
        inputs: inputs of the model, checked.
    """
    warn_of_probabilities(program, runner, inputs)
    warn_of_negative_rows(program, inputs, "predict")


def _first_normalizations(program: Program) -> Iterator[tuple[ir.Node, str, float]]:
    """Yield the first batch normalizations on each path, if a step updates their statistics at the layer's own momentum.

    A later one sees values normalized by the batch, whatever the scale of the data.

    Yields:
        The node, the state entry of its running variance, and its momentum.
    """
    if any("momentum=" in policy for policy in program.options.get("norm_layers", {}).values()):
        return
    updates = program.signature["step"].updates
    behind: set[ir.Value] = set()
    for node in program.graphs.unlowered("predict").graph:
        if not behind.isdisjoint(value for value in node.inputs if value is not None):
            behind.update(node.outputs)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            behind.update(node.outputs)
            variance = "" if node.inputs[4] is None else node.inputs[4].name or ""
            if variance in updates:
                yield node, variance, float(attribute_value(node, "momentum", MOMENTUM))


def _times_the_variance(running: np.ndarray, following: np.ndarray, momentum: float) -> float | None:
    """Return the ratio of the batch's variance to the running variance, the median over channels.

    None if it is unknown: the layer was never trained, or the batch is constant.
    """
    known = running > 0
    if not known.any() or (running == running.flat[0]).all() or momentum >= 1:
        return None
    growth = float(np.median(following[known].astype(np.float64) / running[known]))
    times = (growth - momentum) / (1 - momentum)
    return times if times > 8 * np.finfo(running.dtype).eps / (1 - momentum) else None


def warn_of_negative_rows(program: Program, inputs: Mapping[str, np.ndarray], graph: str = "step") -> None:
    """Warn of negative row indices: the standard counts them from the table's end, but people mean no row by them.

    Args:
        program: the trained program.
        inputs: a checked batch.
        graph: graph that takes the batch.
    """
    for entry in program.signature[graph].inputs_of(Role.DATA):
        array = inputs.get(entry.name)
        if entry.minimum is None or entry.maximum is None or array is None or not array.size or array.min() >= 0:
            continue
        smallest = int(array.min())
        warn(
            ObjectiveWarning(
                f"the input '{entry.name}' holds {smallest}, and the model takes numbers below 0 for rows from the end of its "
                f"table, here row {entry.maximum + 1 + smallest}: where {smallest} stands for no token, give the number that the "
                "model was made to read there, such as that of its padding token"
            )
        )


def warn_of_copied_labels(program: Program, inputs: Mapping[str, np.ndarray]) -> None:
    """Warn of labels equal to an input at each position: the model learns to copy instead of predicting the next token.

    Args:
        program: the trained program.
        inputs: a checked batch.
    """
    signature = program.signature["step"]
    for label in signature.inputs_of(Role.LABEL):
        labels = inputs.get(label.name)
        if labels is None or label.dtype.is_floating_point() or labels.ndim < 2:
            continue
        counts = np.ones(labels.shape, bool) if label.ignored is None else labels != label.ignored
        if np.unique(labels[counts]).size < 2:
            continue
        for entry in signature.inputs_of(Role.DATA):
            array = inputs.get(entry.name)
            if array is None or array.dtype.kind not in "iu" or array.shape != labels.shape:
                continue
            if (array[counts] == labels[counts]).all():
                ignored = "" if label.ignored is None else f" and {label.ignored} for the last, which has none"
                warn(
                    ObjectiveWarning(
                        f"'{label.name}' holds what the input '{entry.name}' holds, each number in the same place, so that the "
                        "model learns to copy: of a model of language that tells the next token, give each place the token after "
                        f"it (labels[:, :-1] = {entry.name}[:, 1:]){ignored}"
                    )
                )


def warn_of_probabilities(program: Program, runner: ProgramRunner, inputs: Mapping[str, np.ndarray]) -> None:
    """Warn if a loss that applies a softmax reads an output with probabilities on these inputs.

    Nothing runs if the graph settles the question, as nearly all do, or for a batch of cached features, which the model does not
    take: ``check_inputs`` sees the inputs of these.

    Args:
        program: the trained program.
        runner: the program on an engine.
        inputs: a checked batch; labels are ignored here.
    """
    doubtful = {
        prediction["reads"]: prediction["class_axis"]
        for prediction in program.options.get("predictions", ())
        if "class_axis" in prediction
    }
    signature = program.signature["predict"]
    outputs = {entry.name for entry in signature.outputs}
    data = [entry.name for entry in signature.inputs_of(Role.DATA)]
    is_whole = all(name in inputs and inputs[name].size for name in data)
    if not is_whole or not outputs.intersection(doubtful):
        return
    from burnish.compiler.predictions import REMEDY
    from burnish.compiler.probabilities import are_probabilities

    try:
        predicted = runner.predict({name: inputs[name] for name in data})
    except EngineError:
        return  # the step fails too, with an error that names its node
    for name, class_axis in doubtful.items():
        if name in outputs and are_probabilities(predicted[name], class_axis):
            loss = program.options["loss"]["name"]
            warn(
                ObjectiveWarning(
                    f"the loss {loss} applies an activation itself, and the output '{name}' that it reads lies in [0, 1] and "
                    f"sums to 1 along axis {class_axis}: {REMEDY.format('...')}"
                )
            )


SAMPLES = 2
"""Most samples compared, so that a comparison is faster than a step; a single one would not reveal mixing between samples."""
TOLERANCE, OF_SIXTEEN_BITS, OF_INTEGERS = 1e-4, 2e-2, 2e-3
"""Differences that rounding may explain, relative to the largest number of an output; with integers half a step of eight bits."""
MOVES = {TOLERANCE: 2.0**-20, OF_SIXTEEN_BITS: 2.0**-9, OF_INTEGERS: 2.0**-8}
"""Relative size of the perturbation that measures rounding in a file: some last bits, or half a step of eight bits."""
MOVED = 4.0
"""A difference counts if it is more than this many times the effect of the perturbation."""
LARGEST_MESSAGE = 2**31 - 1
"""Bytes."""
LEAST = 1e-3
"""Least size assumed for an output of Sigmoid, which has few digits near 0."""

Predict = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class FileComparison:
    """The difference between a program and its file.

    Attributes:
        output: output with the largest difference.
        apart: difference relative to the file's largest number in that output.
        tolerance: difference that rounding may explain.
        reasons: known reasons.
    """

    output: str
    apart: float
    tolerance: float
    reasons: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.apart <= self.tolerance

    def message(self, file: Path) -> str:
        """Return the result in words; for a difference, with its size and reasons."""
        if self.agrees:
            return f"predict computes what {file} computes, to {self.apart:.0e} of the largest output"
        why = "; ".join(self.reasons) or "no reason is known, which is worth a report"
        return (
            f"predict does not compute what {file} computes: '{self.output}' is off by {self.apart:.2g} of its largest number on "
            f"the first samples: {why}"
        )


def compare_with_file(
    file: Path, program: Program, predict: Predict, batch: Mapping[str, np.ndarray], threads: int | None = None
) -> FileComparison | None:
    """Compare a file on ONNX Runtime with ``predict``, on the same few samples.

    Args:
        file: an ONNX file.
        program: program compiled from it, with no options beyond those of a command.
        predict: prediction function in the initial state.
        batch: a checked batch, in the model's own layout.
        threads: threads of ONNX Runtime; None is its default.

    Returns:
        The difference; None if they cannot be compared: the file does not run, takes other inputs than the program (``bind``), or
        is not deterministic.
    """
    entries = program.signature["predict"].inputs_of(Role.DATA)
    if program.options.get("bind") or any(entry.name not in batch for entry in entries):
        return None
    is_opened = bool(program.options.get("batch"))
    extents = {sample_extent(entry) for entry in entries if entry.extents and entry.sample_axis is not None}
    few = 1 if is_opened else SAMPLES
    # With an open batch, a few samples are enough.
    is_batch = len(extents) == 1 and not isinstance(next(iter(extents)), int)
    samples = {entry.name: first_samples(batch[entry.name], entry, few) if is_batch else batch[entry.name] for entry in entries}
    if is_opened and not is_batch:
        return None
    run = _runner(file, threads)
    if run is None:
        return None
    try:
        own = run(samples)
    except Exception:  # ONNX Runtime has no class of errors; the file may need inputs that the program does not
        return None
    tolerance, reasons = _tolerance(program), tuple(program.options.get("departures", ()))
    least = _least_sizes(program)
    apart = _differences(predict(samples), own, least)
    allowed = dict.fromkeys(apart, tolerance)
    if any(each > tolerance for each in apart.values()):
        again = run(samples)
        apart = {name: each for name, each in apart.items() if _is_same(own[name], again[name])}
        moved = {} if reasons else _moved(file, samples, tolerance, threads)
        allowed |= {name: max(tolerance, MOVED * each) for name, each in _differences(moved, own, least).items()}
    worst = max(apart, key=lambda name: apart[name] / allowed[name], default="")
    return FileComparison(worst, apart.get(worst, 0.0), allowed.get(worst, tolerance), reasons)


def warn_of_departure(
    file: Path, program: Program, predict: Predict, batch: Mapping[str, np.ndarray], threads: int | None = None
) -> None:
    """Warn if ``predict`` differs from the file.

    Args:
        file, program, predict, batch, threads: as in ``compare_with_file``.
    """
    found = compare_with_file(file, program, predict, batch, threads)
    if found is not None and not found.agrees:
        warn(ObjectiveWarning(found.message(file)))


def _moved(file: Path, samples: Mapping[str, np.ndarray], tolerance: float, threads: int | None) -> dict[str, np.ndarray]:
    """The outputs of a file with its weights perturbed in their last bits, and its inputs by its own rounding.

    Empty if ONNX Runtime cannot load it so, for example with weights larger than a message.
    """
    generator = np.random.default_rng(0)

    def beside(array: np.ndarray, part: float) -> np.ndarray:
        if array.dtype.kind != "f" or not array.size:
            return array
        step = part * float(np.abs(array, dtype=np.float64)[np.isfinite(array)].max(initial=0.0))
        return (array + step * generator.uniform(-1, 1, array.shape)).astype(array.dtype)

    model = onnx.load(file)
    of_weights = MOVES[TOLERANCE] if tolerance == OF_INTEGERS else MOVES[tolerance]
    for tensor in model.graph.initializer:
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16):
            moved = beside(onnx.numpy_helper.to_array(tensor), of_weights)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    run = _runner(model.SerializeToString(), threads) if model.ByteSize() <= LARGEST_MESSAGE else None
    return {} if run is None else run({name: beside(array, MOVES[tolerance]) for name, array in samples.items()})


def _runner(file: Path | bytes, threads: int | None) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]] | None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # It runs once or twice, so optimizing would take longer than running.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(
            file if isinstance(file, bytes) else str(file), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # from ONNX Runtime: no kernel, no memory, a newer opset
        return None

    def run(samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = session.run(None, {value.name: samples[value.name] for value in session.get_inputs()})
        names = (value.name for value in session.get_outputs())
        return {name: array for name, array in zip(names, outputs, strict=True) if isinstance(array, np.ndarray)}

    return run


def _tolerance(program: Program) -> float:
    graph = program.graphs.unlowered("predict").graph
    values = [value for node in graph.all_nodes() for value in node.outputs]
    if any("Quantize" in node.op_type or node.op_type.endswith("Integer") for node in graph.all_nodes()):
        return OF_INTEGERS
    is_narrow = any(value.dtype in SIXTEEN_BIT for value in (*graph.inputs, *values))
    return OF_SIXTEEN_BITS if is_narrow else TOLERANCE


def _least_sizes(program: Program) -> dict[str, float]:
    graph = program.graphs.unlowered("predict").graph
    return {value.name or "": LEAST for value in graph.outputs if producer_of(value, "Sigmoid") is not None}


def _is_same(array: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(array, other, equal_nan=array.dtype.kind == "f")


def _differences(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], least: Mapping[str, float]
) -> dict[str, float]:
    return {
        name: _apart(np.asarray(actual[name]), array, least.get(name, 0.0)) for name, array in expected.items() if name in actual
    }


def _apart(actual: np.ndarray, expected: np.ndarray, least: float) -> float:
    """The largest difference relative to the largest number; for integers, the share that differs."""
    if actual.shape != expected.shape:
        return float("inf")
    if expected.size == 0 or expected.dtype.kind in "OSU":
        return 0.0
    if expected.dtype.kind in "iub":
        return float(np.mean(actual != expected))
    wide, own = (np.asarray(array, np.float64) for array in (actual, expected))
    finite = np.isfinite(own)
    if not np.array_equal(wide[~finite], own[~finite], equal_nan=True):
        return float("inf")
    largest = np.abs(own[finite]).max(initial=least)
    return float(np.abs(wide[finite] - own[finite]).max(initial=0.0) / (largest or 1.0))
