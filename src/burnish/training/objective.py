"""What only the numbers tell of a model: whether the output that the loss reads holds probabilities already."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np

from burnish.compiler.predictions import REMEDY
from burnish.compiler.probabilities import are_probabilities
from burnish.engines import ProgramRunner
from burnish.errors import EngineError, ObjectiveWarning
from burnish.program import Program


def warn_of_probabilities(program: Program, runner: ProgramRunner, inputs: Mapping[str, np.ndarray]) -> None:
    """Warn where a loss that applies a softmax reads an output that holds probabilities on these inputs.

    Nothing runs where the model's graph tells what the output is, as nearly all do.

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
    if not outputs.intersection(doubtful) or any(array.size == 0 for array in inputs.values()):
        return
    try:
        predicted = runner.predict({entry.name: inputs[entry.name] for entry in signature.inputs if entry.name in inputs})
    except EngineError:
        return  # the step fails alike, and its error names the node of the step
    for name, class_axis in doubtful.items():
        if name in outputs and are_probabilities(predicted[name], class_axis):
            loss = program.options["loss"]["name"]
            warnings.warn(
                ObjectiveWarning(
                    f"the loss {loss} applies an activation itself, and the output '{name}' that it reads lies in [0, 1] and "
                    f"sums to 1 along axis {class_axis}: {REMEDY.format('...')}"
                ),
                stacklevel=3,
            )
