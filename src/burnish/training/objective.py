"""What only the numbers tell: an output of probabilities, data on another scale, rows from a table's end, copied labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.errors import EngineError, ObjectiveWarning
from burnish.graph import attribute_value, describe_node
from burnish.program import Program, Role
from burnish.training.file_comparison import warn_of_departure
from burnish.warn import warn

MOMENTUM = 0.9
"""Of a BatchNormalization that says nothing."""
OTHER_SCALE = 100.0
"""Times the variance: ten times the deviation. Pixels of 0 to 255 have 3,000 times that of standardized ones."""


class FirstStep:
    """The first step of a session, which warns of what its numbers tell that is perhaps not what was meant.

    Args:
        program: what is trained.
        threads: for the file.

    Attributes:
        file: which the program was compiled of, to be compared with what it predicts; None where it is not.
    """

    def __init__(self, program: Program, threads: int | None = None):
        self._program, self._threads = program, threads
        self.file: Path | None = None

    def run(self, runner: ProgramRunner, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run it on a checked batch, and the hyperparameters; ``runner`` is the program on an engine."""
        program = self._program
        if self.file is not None and all(array.size for array in inputs.values()):
            with suppress(EngineError):  # the step fails alike, and its error names the node of the step
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
    """Warn of what the first batch of a program with cached features tells, whose steps do not see the inputs of the model.

    Args:
        program: what is trained.
        runner: the program on an engine.
        inputs: of the model, checked.
    """
    warn_of_probabilities(program, runner, inputs)
    warn_of_negative_rows(program, inputs, "predict")


def _first_normalizations(program: Program) -> Iterator[tuple[ir.Node, str, float]]:
    """Give the batch normalizations that no other one stands before, whose statistics a step updates at the layer's own momentum.

    What stands behind another one meets values that are normalized by the batch, whatever the scale of the data.

    Yields:
        The node, the state entry of its running variance, and its momentum.
    """
    if any("momentum=" in policy for policy in program.options.get("norm_layers", {}).values()):
        return
    updates = program.signature["step"].updates
    behind: set[ir.Value] = set()
    for node in (program.semantic.get("predict") or program.predict).graph:
        if not behind.isdisjoint(value for value in node.inputs if value is not None):
            behind.update(node.outputs)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            behind.update(node.outputs)
            variance = "" if node.inputs[4] is None else node.inputs[4].name or ""
            if variance in updates:
                yield node, variance, float(attribute_value(node, "momentum", MOMENTUM))


def _times_the_variance(running: np.ndarray, following: np.ndarray, momentum: float) -> float | None:
    """Return how many times the running variance that of the batch was, in the median over channels.

    None where that is not known: the running variance is that of a layer that was never trained, or nothing varies in the batch.
    """
    known = running > 0
    if not known.any() or (running == running.flat[0]).all() or momentum >= 1:
        return None
    growth = float(np.median(following[known].astype(np.float64) / running[known]))
    times = (growth - momentum) / (1 - momentum)
    return times if times > 8 * np.finfo(running.dtype).eps / (1 - momentum) else None


def warn_of_negative_rows(program: Program, inputs: Mapping[str, np.ndarray], graph: str = "step") -> None:
    """Warn of numbers below 0 for rows of a table: the standard counts them from its end, and people mean no row by them.

    Args:
        program: what is trained.
        inputs: a checked batch.
        graph: that takes it.
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
    """Warn of labels that are the numbers of an input, each in its place: a model learns to copy them, and no next token.

    Args:
        program: what is trained.
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
    """Warn where a loss that applies a softmax reads an output that holds probabilities on these inputs.

    Nothing runs where the model's graph tells what the output is, as nearly all do, and of a batch of cached features, which
    the model does not take: ``check_inputs`` sees what they are computed from.

    Args:
        program: what is trained.
        runner: the program on an engine.
        inputs: a checked batch; labels are left out here.
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
        return  # the step fails alike, and its error names the node of the step
    for name, class_axis in doubtful.items():
        if name in outputs and are_probabilities(predicted[name], class_axis):
            loss = program.options["loss"]["name"]
            warn(
                ObjectiveWarning(
                    f"the loss {loss} applies an activation itself, and the output '{name}' that it reads lies in [0, 1] and "
                    f"sums to 1 along axis {class_axis}: {REMEDY.format('...')}"
                )
            )
