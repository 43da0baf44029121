"""A comparison of what a program predicts in its initial state with what the file that it was compiled of computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from burnish.errors import ObjectiveWarning
from burnish.graph import SIXTEEN_BIT
from burnish.graph.uses import producer_of
from burnish.program import Program, Role
from burnish.program.layout import first_samples, sample_extent
from burnish.warn import warn

SAMPLES = 2
"""The most samples that are compared, so that a comparison takes less time than a step; one would not show what mixes several."""
TOLERANCE, OF_SIXTEEN_BITS, OF_INTEGERS = 1e-4, 2e-2, 2e-3
"""Parts of the largest number of an output that rounding may explain; of integers half a step of eight bits."""
MOVES = {TOLERANCE: 2.0**-20, OF_SIXTEEN_BITS: 2.0**-9, OF_INTEGERS: 2.0**-8}
"""By which part numbers are moved to see what rounding comes to in a file: some last bits, or half a step of eight bits."""
MOVED = 4.0
"""A difference counts if it is more than so many times the one that such a move makes."""
LARGEST_MESSAGE = 2**31 - 1
"""Bytes."""
LEAST = 1e-3
"""An output of Sigmoid is taken for at least as large: near 0 it has few digits."""

Predict = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class FileComparison:
    """How far a program is from its file.

    Attributes:
        output: where they differ most.
        apart: by how much, as a part of the largest number that the file gives there.
        tolerance: how much rounding may explain.
        reasons: why, as far as it is known.
    """

    output: str
    apart: float
    tolerance: float
    reasons: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.apart <= self.tolerance

    def message(self, file: Path) -> str:
        """Return in words whether the two agree; where not, by how much and why."""
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
    """Run a file on ONNX Runtime and ``predict``, on the same few samples.

    Args:
        file: an ONNX file.
        program: compiled of it, with no other options than a command has.
        predict: predicts in the initial state.
        batch: a checked batch, in the model's own layout.
        threads: for ONNX Runtime; None is its choice.

    Returns:
        How far the two are apart; None where they cannot be compared: the file does not run, takes other inputs than the program
        (``bind``), or gives something else each time.
    """
    entries = program.signature["predict"].inputs_of(Role.DATA)
    if program.options.get("bind") or any(entry.name not in batch for entry in entries):
        return None
    is_opened = bool(program.options.get("batch"))
    extents = {sample_extent(entry) for entry in entries if entry.extents and entry.sample_axis is not None}
    few = 1 if is_opened else SAMPLES
    # Of an open batch a few samples will do.
    is_batch = len(extents) == 1 and not isinstance(next(iter(extents)), int)
    samples = {entry.name: first_samples(batch[entry.name], entry, few) if is_batch else batch[entry.name] for entry in entries}
    if is_opened and not is_batch:
        return None
    run = _runner(file, threads)
    if run is None:
        return None
    try:
        own = run(samples)
    except Exception:  # of ONNX Runtime, which has no class for them; the file may ask for what the program does without
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
    """Warn where ``predict`` does not compute what the file does.

    Args:
        file, program, predict, batch, threads: as for ``compare_with_file``.
    """
    found = compare_with_file(file, program, predict, batch, threads)
    if found is not None and not found.agrees:
        warn(ObjectiveWarning(found.message(file)))


def _moved(file: Path, samples: Mapping[str, np.ndarray], tolerance: float, threads: int | None) -> dict[str, np.ndarray]:
    """What a file gives where its weights differ in their last bits, and its inputs by as much as its own rounding makes of them.

    Nothing where ONNX Runtime does not load it so: with weights that do not fit into a message, for one.
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
    """Return what runs a file; None where ONNX Runtime does not load it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # It runs once or twice: optimizing it would take longer than that.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(
            file if isinstance(file, bytes) else str(file), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # of ONNX Runtime: no kernel, no memory, a newer opset
        return None

    def run(samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = session.run(None, {value.name: samples[value.name] for value in session.get_inputs()})
        names = (value.name for value in session.get_outputs())
        return {name: array for name, array in zip(names, outputs, strict=True) if isinstance(array, np.ndarray)}

    return run


def _tolerance(program: Program) -> float:
    """How much rounding may explain, by the digits that the file computes with."""
    graph = (program.semantic.get("predict") or program.predict).graph
    values = [value for node in graph.all_nodes() for value in node.outputs]
    if any("Quantize" in node.op_type or node.op_type.endswith("Integer") for node in graph.all_nodes()):
        return OF_INTEGERS
    is_narrow = any(value.dtype in SIXTEEN_BIT for value in (*graph.inputs, *values))
    return OF_SIXTEEN_BITS if is_narrow else TOLERANCE


def _least_sizes(program: Program) -> dict[str, float]:
    """The size that outputs are taken to have at least, by name."""
    graph = (program.semantic.get("predict") or program.predict).graph
    return {value.name or "": LEAST for value in graph.outputs if producer_of(value, "Sigmoid") is not None}


def _is_same(array: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(array, other, equal_nan=array.dtype.kind == "f")


def _differences(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], least: Mapping[str, float]
) -> dict[str, float]:
    """How far outputs are apart, by name, of those that both hold."""
    return {
        name: _apart(np.asarray(actual[name]), array, least.get(name, 0.0)) for name, array in expected.items() if name in actual
    }


def _apart(actual: np.ndarray, expected: np.ndarray, least: float) -> float:
    """The largest difference as a part of the largest number; of integers, the part of them that differ."""
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
