"""``batch="open"``, operator after operator: several distinct samples together against each alone, in forms of all tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from burnish import engines
from burnish.errors import BurnishError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, static_shape
from burnish.importer import load
from oracles.batches import assert_as_alone
from oracles.combinations import spread
from oracles.gradient_harness import as_stored, cast_inputs
from oracles.operator_cases import CASES, FIRST_OF_EACH, Case

SAMPLES = 3


WEIGHTS = {"Conv": (1, 2), "ConvTranspose": (1, 2), "LSTM": (1, 2, 3, 7), "GRU": (1, 2, 3), "RNN": (1, 2, 3)}
"""Operands that are the same for all samples, and are refused otherwise."""

BATCH_AXES = {0: 1, 4: 0, 5: 1, 6: 1}
"""Where the operands of a recurrent layer have their batch."""


class Form:
    """A model of one node of which some operands are inputs that hold samples.

    Args:
        case: the node.
        sampled: the operands that are of a sample.
        axes: for each where the axis of extent 1 stands.
        in_place: whether that is an axis that the operand has, cut to its first place; else it is one more, which is squeezed.
        cut: further operands that are cut to the first place along an axis.
    """

    def __init__(
        self, case: Case, sampled: Sequence[int], axes: Mapping[int, int], in_place: bool, cut: Mapping[int, int] | None = None
    ):
        self.case, self.axes, self.in_place = case, axes, in_place
        self.arrays = list(cast_inputs(case.sample, case.widest))
        for index, axis in {**(cut or {}), **({index: axes[index] for index in sampled} if in_place else {})}.items():
            if index < len(self.arrays) and (array := self.arrays[index]) is not None:
                self.arrays[index] = array[(slice(None),) * axis + (slice(0, 1),)]
        self.fed = {index: self._of_one(index) for index in sampled}

    def _of_one(self, index: int) -> np.ndarray:
        array = self.arrays[index]
        assert array is not None
        return array if self.in_place else np.expand_dims(array, self.axes[index])

    def __repr__(self) -> str:
        return f"operands {list(self.fed)}, axes {self.axes}{' in place' if self.in_place else ''}"

    def model(self) -> ir.Model:
        sample = self.case.sample
        graph = ir.Graph([], [], nodes=[], name="form", opset_imports={"": sample.opset, BURNISH_DOMAIN: 1})
        builder = Builder(graph)
        tensors = [None if array is None else self._operand(builder, index) for index, array in enumerate(self.arrays)]
        if sample.build is not None:
            results = sample.build(builder, tensors)
        else:
            attributes = as_stored(sample.attributes)
            results = builder.op(self.case.spec.op_type, *tensors, outputs=sample.outputs, **attributes)
        for index, tensor in enumerate(results if isinstance(results, tuple) else (results,)):
            tensor.value.name = f"output{index}"
            graph.outputs.append(tensor.value)
        return ir.Model(graph, ir_version=10)

    def _operand(self, builder: Builder, index: int) -> Tensor:
        array = self.fed.get(index, self.arrays[index])
        assert array is not None
        dtype = ir.DataType.from_numpy(array.dtype)
        value = ir.Value(name=f"input{index}", type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
        if index not in self.fed:
            value.const_value = ir.tensor(np.array(array, order="C"), name=value.name)
            builder.graph.register_initializer(value)
            return builder.tensor(value)
        builder.graph.inputs.append(value)
        tensor = builder.tensor(value)
        return tensor if self.in_place else builder.op("Squeeze", tensor, builder.integers([self.axes[index]]))

    def samples(self, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
        """The operands with their elements in different orders: so they stay in the range in which the operator is defined."""
        return [
            {f"input{index}": rng.permutation(array.reshape(-1)).reshape(array.shape) for index, array in self.fed.items()}
            for _ in range(SAMPLES)
        ]


def forms(case: Case) -> Iterator[Form]:
    operator, arrays = case.spec.op_type, case.sample.inputs
    fixed = WEIGHTS.get(operator, ())
    candidates = [index for index, array in enumerate(arrays) if array is not None and index not in fixed][:4]
    subsets = [[index] for index in candidates]
    subsets += [candidates] if len(candidates) == 2 else [candidates[:2], candidates] if len(candidates) > 2 else []
    if operator in ("LSTM", "GRU", "RNN"):
        axes = dict.fromkeys(BATCH_AXES, 0) if case.sample.attributes.get("layout") else BATCH_AXES
        for sampled in subsets:
            yield Form(case, sampled, axes, in_place=True, cut=axes)
        return
    for sampled in subsets:
        ranks = {index: np.ndim(arrays[index]) for index in sampled}
        for axis in (0, 1) if len(sampled) == 1 else (0,):
            yield Form(case, sampled, {index: min(axis, rank) for index, rank in ranks.items()}, in_place=False)
        for axis in range(min(*ranks.values(), 3)):
            if all(np.shape(arrays[index])[axis] for index in sampled):
                yield Form(case, sampled, dict.fromkeys(sampled, axis), in_place=True)


def has_its_shapes(model: ir.Model, results: Mapping[str, np.ndarray]) -> bool:
    """Whether what a model computes has the shapes that it is said to have: where operands do not fit, evaluators differ."""
    for value in model.graph.outputs:
        shape = static_shape(value)
        if shape is not None and results[value.name or ""].shape != shape:
            return False
    return True


def outcomes(case: Case, chosen: Iterable[Form], enough: int | None = None) -> tuple[int, list[tuple[Form, str]]]:
    """How many forms come to the same together as alone, of the first so many; and the refused ones with their messages."""
    equal, refused = 0, []
    for form in chosen:
        if equal == enough:
            break
        rng = np.random.default_rng(5)
        try:
            single = load(form.model())
            run = engines.get("reference").load(single)
            samples = form.samples(rng)
            alone = [run(sample) for sample in samples]
            if not has_its_shapes(single, alone[0]):
                continue
        except (BurnishError, ValueError, TypeError, IndexError):
            continue  # no form that a model of one sample could have
        try:
            opened = load(form.model(), batch="open")
        except UnsupportedOperatorError as error:
            refused.append((form, str(error)))
            continue
        try:
            assert_as_alone(single, opened, samples, alone, rtol=1e-12 if case.widest == "float64" else 1e-6)
        except Exception as error:
            raise AssertionError(f"{form}: {error}") from error
        equal += 1
    return equal, refused


LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


def is_refused(case: Case) -> bool:
    """Whether no form of a case can take several samples: how many it gives depends on them, it goes over all of them, or it has
    regions, of which a sample may have any number, or which may cut samples out, or it has bodies, which run once for all."""
    if case.spec.op_type in LOSSES:
        return case.sample.attributes.get("reduction", "mean") != "none"
    if case.spec.op_type == "Resize":
        return case.sample.name.startswith("crop")
    return case.spec.op_type in ("Compress", "If", "Loop", "MaxRoiPool", "Range", "RoiAlign", "Scan", "Unique")


@spread(("number", "case"), list(enumerate(CASES.values())), test=129, test_all=387, ids=list(CASES))
def test_some_form_of_each_case(number, case):
    """Each case begins with another of its forms, so that the cases of an operator go through them all."""
    every = list(forms(case))
    start = number % len(every) if every else 0
    enough = 2 if case in FIRST_OF_EACH.values() else 1
    check(case, *outcomes(case, every[start:] + every[:start], enough))


@pytest.mark.campaign
@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES.values())), ids=list(CASES))
def test_samples_together_are_as_each_alone(number, case):
    """Every form of an operator's first case; of its others two more than the quick test runs, again in turn."""
    every = list(forms(case))
    if case in FIRST_OF_EACH.values():
        check(case, *outcomes(case, every))
        return
    start = (number + 1) % len(every) if every else 0
    check(case, *outcomes(case, every[start:] + every[:start], 2))


def check(case: Case, equal: int, refused: list[tuple[Form, str]]) -> None:
    assert equal or is_refused(case)
    for form, message in refused:
        assert re.match(r"batch='open': \w+ '.*' \(output '.*'\) \w+", message), form
        assert re.search(r"Export the model again with an open batch|export the model without it", message), form


@pytest.mark.parametrize("count", [1, 2])
def test_keys_and_values_that_attention_hands_on(count):
    """Without past ones the standard infers nothing of them; here they come with their heads in one axis."""

    def model() -> ir.Model:
        builder = Builder(ir.Graph([], [], nodes=[], name="attention", opset_imports={"": 23}))
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape([1, 5 * count, 12]))
        builder.graph.inputs.append(x)
        query = builder.op("Reshape", builder.tensor(x), builder.integers([count, 5, 12]))
        key = builder.op("Slice", query, builder.integers([0]), builder.integers([6]), builder.integers([2]))
        for index, result in enumerate(builder.op("Attention", query, key, key, outputs=4, q_num_heads=4, kv_num_heads=2)):
            result.value.name, result.value.type = f"y{index}", x.type
            builder.graph.outputs.append(result.value)
        return ir.Model(builder.graph, ir_version=10)

    rng = np.random.default_rng(11)
    samples = [{"x": rng.standard_normal((1, 5 * count, 12))} for _ in range(SAMPLES)]
    assert_as_alone(load(model()), load(model(), batch="open"), samples, rtol=1e-6)
