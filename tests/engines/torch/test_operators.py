"""Every operator of the tables in ``tests/specs``, forward and gradient, on PyTorch's kernels and on ONNX Runtime's."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import onnx
import pytest

import oracles.gradient_harness as harness
from burnish.engines.communicator import COLLECTIVES
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.operators.row_gradients import COALESCE_ROWS
from burnish.operators.semantic import semantic_operators
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.gradient_harness import Evaluator, GradientGraph, assert_close, cast_inputs, feeds_of, gradient_graph
from oracles.operator_cases import CASES, Case, cases_where, cotangents_of, in_turn
from oracles.operator_records import differentiable_operators

LOWERED = semantic_operators()
# Without what the engine's own fusion makes of several nodes: that has no lowering.
# Exchanges between workers are compared in tests/distributed, and what updates of rows emit in tests/compiler.
KEPT = (translated_operators(BURNISH_DOMAIN) & LOWERED) - COLLECTIVES - {COALESCE_ROWS.name}
# ONNX Runtime computes the weights of an interpolation in float32, whatever the dtype of what they weigh.
SINGLE = {"Resize": 1e-6}
# Which of the largest elements comes first is open with sorted=0.
IN_ANY_ORDER = {"TopK-unsorted"}
# The standard's operators without a translation, by why.
WITHOUT_TRANSLATION = {
    "text": "ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer",
    "quantized arithmetic": "QLinearConv QLinearMatMul",
    "sequences and optional values": "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence",
    "no gradient here, so met in inference alone": "BitCast CausalConvWithState LinearAttention NonMaxSuppression SwiGLU",
    "forms the importer converts": "Scatter Upsample",
}


def feeds(case: Case, graph: GradientGraph, dtype: str) -> dict[str, np.ndarray]:
    dtypes = {value.name: value.dtype.numpy() for value in graph.model.graph.inputs if value.dtype is not None}
    flowing = {index: array.astype(dtypes[f"cotangent{index}"]) for index, array in cotangents_of(case).items()}
    return feeds_of(case.sample, cast_inputs(case.sample, dtype), flowing)


def tolerance(case: Case, dtype: str) -> float:
    if dtype == "float32":
        return case.spec.tolerance
    return SINGLE.get(case.spec.op_type, case.spec.float64_tolerance)


def compare(case: Case, graph: GradientGraph, dtype: str, expected: dict[str, np.ndarray], in_any_order: bool = False) -> None:
    with np.errstate(all="ignore"):
        actual = TorchEngine().run(graph.model, feeds(case, graph, dtype))
    for name in [*graph.outputs, *(name for name in graph.gradients if name is not None)]:
        one, other = actual[name], expected[name]
        assert one.dtype == other.dtype, f"{name}: {one.dtype}, expected {other.dtype}"
        if in_any_order:
            one, other = np.sort(one, axis=None), np.sort(other, axis=None)
        if other.dtype.kind == "f":
            assert_close(one, other, tolerance(case, dtype), f"{dtype}: {name}")
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)


def few_forms(case: Case) -> list[tuple[str, str]]:
    """Float32 where the least is known of the shapes, float64 where all is; the samples of an operator take turns."""
    known = {"float32": case.spec.shapes[-1], "float64": case.spec.shapes[0]}
    return in_turn(case, [(dtype, known[dtype]) for dtype in case.spec.dtypes if dtype in known])


def other_forms(case: Case) -> list[tuple[str, str]]:
    shapes = {"float32": case.spec.shapes, "float64": case.spec.shapes[:2]}
    forms = [(dtype, known) for dtype in case.spec.dtypes if dtype in shapes for known in shapes[dtype]]
    return [form for form in forms if form not in few_forms(case)]


def check_forms(case: Case, forms: list[tuple[str, str]], request: pytest.FixtureRequest) -> None:
    """The gradient in standard operators, and with what has a rule of its own left in it."""
    for dtype, shapes in forms:
        graph = gradient_graph(case.spec, case.sample, dtype, shapes)
        expected = Evaluator(graph.proto)(feeds(case, graph, dtype))
        in_any_order = request.node.callspec.id in IN_ANY_ORDER
        compare(case, graph, dtype, expected, in_any_order)
        with mock.patch.object(harness, "lower_semantic_operators", partial(lower_semantic_operators, keep=KEPT)):
            semantic = gradient_graph(case.spec, case.sample, dtype, shapes)
        if any(node.domain == BURNISH_DOMAIN for node in semantic.model.graph.all_nodes()):
            compare(case, semantic, dtype, expected, in_any_order)


@cases_where(lambda case: True, test=125, test_all=375)
def test_some_form(case: Case, request: pytest.FixtureRequest) -> None:
    check_forms(case, few_forms(case), request)


@pytest.mark.campaign
@cases_where(lambda case: True)
def test_every_other_form(case: Case, request: pytest.FixtureRequest) -> None:
    """All of them for the first sample of an operator, and one more in turn for each of its others."""
    check_forms(case, in_turn(case, other_forms(case)), request)


@pytest.mark.slow
def test_whatever_has_a_gradient_or_is_emitted_has_a_translation() -> None:
    """Where one is missing, each sample that needs it tells as well."""
    graphs = [gradient_graph(case.spec, case.sample, case.widest) for case in CASES.values()]
    lowered = {node.op_type for graph in graphs for node in graph.model.graph.all_nodes()}
    assert (differentiable_operators() | lowered) - {"Constant"} <= translated_operators()
    # A semantic operator with a rule that no sample emits would be one that nothing here compares.
    assert {name for graph in graphs for name in graph.emitted} >= KEPT


def test_what_has_no_translation_is_known() -> None:
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    missing = standard - translated_operators() - {"Constant"}
    assert missing == {name for names in WITHOUT_TRANSLATION.values() for name in names.split()}
