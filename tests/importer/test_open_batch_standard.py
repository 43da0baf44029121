"""``batch="open"`` on the standard's own cases of operators that have no gradient, and so no record in ``tests/specs``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
from onnx import helper, numpy_helper

from burnish import engines
from burnish.errors import BurnishError, UnsupportedOperatorError
from burnish.importer import load
from oracles.batches import assert_as_alone
from oracles.combinations import spread
from oracles.standard_cases import standard_cases

OPERATORS = "AffineGrid Attention CenterCropPad CumProd DFT DeformConv RotaryEmbedding STFT".split()
MODULES = "affinegrid attention center_crop_pad cumprod dft deformconv rotaryembedding stft".split()
SAMPLES = 3


@cache
def cases_by_operator() -> dict[str, list]:
    found: dict[str, list] = {operator: [] for operator in OPERATORS}
    for case in standard_cases(MODULES):
        for operator in {node.op_type for node in case.model.graph.node}.intersection(OPERATORS):
            found[operator].append(case)
    return found


def forms(case) -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Models whose floating-point operands are of a sample: in an axis more that is squeezed, and in their first, cut to 1."""
    arrays = [np.asarray(array) for array in case.data_sets[0][0]]
    floating = [index for index, array in enumerate(arrays) if array.dtype.kind == "f" and array.ndim]
    yield _fed(case.model, arrays, floating[:1], squeezed=True)
    yield _fed(case.model, arrays, floating, squeezed=True)
    count = arrays[0].shape[0]
    cut = [array[:1] if array.ndim and array.shape[0] == count else array for array in arrays]
    yield _fed(case.model, cut, [index for index in floating if cut[index].shape[0] == 1], squeezed=False)


def _fed(
    source: onnx.ModelProto, arrays: list[np.ndarray], sampled: list[int], squeezed: bool
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = onnx.ModelProto()
    model.CopyFrom(source)
    graph = model.graph
    inputs, nodes = list(graph.input), list(graph.node)
    del graph.input[:], graph.node[:]
    for output in graph.output:
        output.type.tensor_type.ClearField("shape")
    fed = {}
    for index, (value, array) in enumerate(zip(inputs, arrays, strict=True)):
        if index not in sampled:
            graph.initializer.append(numpy_helper.from_array(array, value.name))
            continue
        array = array[None] if squeezed else array
        name = f"{value.name}_of_one" if squeezed else value.name
        fed[name] = array
        graph.input.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, array.shape))
        if squeezed:
            graph.node.append(helper.make_node("Squeeze", [name, "first"], [value.name]))
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), "first"))
    graph.node.extend(nodes)
    return model, fed


@spread("operator", OPERATORS, test=1)
def test_samples_together_are_as_each_alone(operator):
    rng = np.random.default_rng(3)
    equal = 0
    for case in cases_by_operator()[operator]:
        for model, fed in forms(case):
            samples = [
                {name: rng.permutation(array.reshape(-1)).reshape(array.shape) for name, array in fed.items()}
                for _ in range(SAMPLES)
            ]
            try:
                single = load(model)
                run = engines.get("reference").load(single)
                alone = [run(sample) for sample in samples]
            except (BurnishError, ValueError):
                continue  # operands that do not fit once they are cut
            if not fed:
                continue  # numbers of a few bits, whose arrays numpy does not count as floating-point
            try:
                opened = load(model, batch="open")
            except UnsupportedOperatorError:
                continue
            assert_as_alone(single, opened, samples, alone, rtol=3e-6)
            equal += 1
    assert equal >= len(cases_by_operator()[operator])
